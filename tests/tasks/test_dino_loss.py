"""DINO's loss and centre against their formulas."""

import math

import pytest
import torch
from dino_runs import published_loss
from torch import Tensor

from lapbench.tasks.dino_loss import DINOLoss


def outputs(views: int, batch: int = 3, dim: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(batch, views, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("global_views", "local_views"), [(2, 8), (2, 0), (1, 1), (3, 2)])
def test_the_loss_is_the_mean_over_pairs_of_different_crops(global_views: int, local_views: int) -> None:
    loss = DINOLoss(7, student_temperature=0.5)
    loss.center.copy_(outputs(1)[0, 0])
    student, teacher = outputs(global_views + local_views), outputs(global_views, seed=1)
    value = loss(student, loss.targets(teacher, 0.3))
    expected = published_loss(list(student.unbind(1)), list(teacher.unbind(1)), loss.center, 0.3)
    torch.testing.assert_close(value, expected)


def test_two_global_and_eight_local_crops_make_18_pairs() -> None:
    """A teacher that is certain of prototype 0 for its first crop alone: the pairs are those that lack it."""
    targets = torch.zeros(1, 2, 4)
    targets[0, :, 0] = 1
    student = torch.zeros(1, 10, 4)
    for view in range(10):
        alone = student.clone()
        alone[0, view] = torch.tensor([-20.0, 0.0, 0.0, 0.0])  # one view is wrong, the others do not know
        wrong = -math.log(math.exp(-200) / (math.exp(-200) + 3))
        pairs = 1 if view < 2 else 2  # with both teacher views, or with that of the other crop
        expected = (pairs * wrong + (18 - pairs) * math.log(4)) / 18
        assert DINOLoss(4)(alone, targets).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("out_dim", "value"), [(4096, 8.31777), (65536, 11.09035)])
def test_uniform_outputs_give_the_logarithm_of_their_number(out_dim: int, value: float) -> None:
    loss = DINOLoss(out_dim)
    constant = torch.full((2, 4, out_dim), 0.3)
    assert loss(constant, loss.targets(constant[:, :2], 0.04)).item() == pytest.approx(value, abs=1e-5)


def test_no_gradient_reaches_the_teacher() -> None:
    loss, teacher = DINOLoss(7), outputs(2).requires_grad_()
    assert not loss.targets(teacher, 0.04).requires_grad


def test_the_centre_moves_to_the_mean_over_all_micro_batches_and_processes() -> None:
    loss = DINOLoss(7, center_momentum=0.9)
    start = outputs(1, seed=3)[0, 0]
    loss.center.copy_(start)
    small, large = outputs(2, batch=2), outputs(2, batch=5, seed=1)
    for teacher in (small, large):
        loss.targets(teacher, 0.04)
        assert torch.equal(loss.center, start)
    elsewhere = torch.cat((torch.ones(7), torch.tensor([6.0])))  # the sum and number of another process
    loss.move_center(lambda mine: mine + elsewhere)
    mean = (small.sum((0, 1)) + large.sum((0, 1)) + 1) / 20
    torch.testing.assert_close(loss.center, 0.9 * start + 0.1 * mean)
    loss.targets(small, 0.04)
    loss.move_center(lambda mine: mine)  # forgets what came before
    torch.testing.assert_close(loss.center, 0.81 * start + 0.09 * mean + 0.1 * small.mean((0, 1)))


def test_the_loss_is_in_float32_under_autocast() -> None:
    loss, teacher = DINOLoss(7), outputs(2, seed=1)
    student = outputs(4).bfloat16().float()
    expected = loss(student, loss.targets(teacher, 0.04))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(student.bfloat16(), loss.targets(teacher, 0.04))
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
