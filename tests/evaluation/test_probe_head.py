"""The grid of heads against heads that are trained alone, by torch's own SGD."""

import math

import pytest
import torch
from torch import Tensor, nn

from lapbench.evaluation.probe_head import Head, HeadGrid, HeadScores, Part, grid, parts_of

LRS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
DIM, CLASSES, BATCH, STEPS = 6, 7, 16, 10
HEADS = grid(LRS, (1, 4), ("token", "token+avg"))


@pytest.fixture(scope="module")
def batches() -> list[tuple[dict[Part, Tensor], Tensor]]:
    """Parts of images that a linear classifier can tell apart in part, and their labels."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, 5, DIM, generator=generator)
    found = []
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        values = means[labels] + torch.randn(BATCH, 5, DIM, generator=generator)
        named: dict[Part, Tensor] = {("token", block): values[:, 4 - block] for block in (1, 2, 3, 4)}
        found.append((named | {("avg", 1): values[:, 4]}, labels))
    return found


def trained(heads: list[Head], batches: list[tuple[dict[Part, Tensor], Tensor]], **settings: float) -> HeadGrid:
    """The grid after an epoch on a cosine."""
    decay = settings.pop("weight_decay", 0.0)
    model = HeadGrid(heads, DIM, CLASSES, **settings)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), model.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2)
    for parts, labels in batches:
        optimizer.zero_grad()
        model.loss(torch.stack([parts[part] for part in parts_of(heads)], dim=1), labels, decay).backward()
        optimizer.step()
        schedule.step()
    return model


def logits_of(model: HeadGrid, heads: list[Head], parts: dict[Part, Tensor]) -> Tensor:
    """[B, H, C]."""
    return torch.cat(model(torch.stack([parts[part] for part in parts_of(heads)], dim=1)), dim=1)


def test_the_grid_is_dinov2s() -> None:
    assert len(HEADS) == len(set(HEADS)) == 52
    assert HEADS[0] == Head(1e-5, 1, "token")
    assert Head(0.1, 4, "token+avg").parts == (*(("token", n) for n in (4, 3, 2, 1)), ("avg", 1))
    assert Head(0.1, 2, "avg").parts == (("avg", 2), ("avg", 1))
    assert set(parts_of(HEADS)) == set(Head(0.1, 4, "token+avg").parts)
    assert len(parts_of(HEADS)) == 5


def test_each_head_ends_as_if_trained_alone(batches: list[tuple[dict[Part, Tensor], Tensor]]) -> None:
    parts, _ = batches[0]
    settings = {"init_std": 0.01, "seed": 3, "weight_decay": 0.1}
    together = logits_of(trained(HEADS, batches, **settings), HEADS, parts)
    alone = torch.cat([logits_of(trained([head], batches, **settings), [head], parts) for head in HEADS], dim=1)
    assert together.detach().abs().max() > 0.5
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)


def test_a_head_is_what_sgd_makes_of_a_linear_layer(batches: list[tuple[dict[Part, Tensor], Tensor]]) -> None:
    head = Head(0.1, 4, "token+avg")
    layer = nn.Linear(5 * DIM, CLASSES, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9, weight_decay=0.05)
    # dinov2's order: the class tokens from the earliest of the blocks on, then the mean patch token.
    order: list[Part] = [("token", 4), ("token", 3), ("token", 2), ("token", 1), ("avg", 1)]
    inputs = [torch.cat([parts[part] for part in order], dim=1).double() for parts, _ in batches]
    for step, (x, (_, labels)) in enumerate(zip(inputs, batches, strict=True)):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(x), labels).backward()
        optimizer.step()
    model = trained(HEADS, batches, weight_decay=0.05)
    found = logits_of(model, HEADS, batches[0][0])[:, HEADS.index(head)]
    torch.testing.assert_close(found, layer(inputs[0]), rtol=0, atol=1e-10)


def test_first_weights_are_drawn_for_each_kind_of_features() -> None:
    model = HeadGrid(HEADS, DIM, CLASSES, init_std=0.01, seed=5)
    wide, other = model.banks[3].weight.view(13, CLASSES, 5 * DIM), HeadGrid(HEADS[-1:], DIM, CLASSES, 0.01, 5)
    assert torch.equal(wide[0], wide[12])
    assert torch.equal(wide[12], other.banks[0].weight)
    assert float(wide[0].detach().std()) == pytest.approx(0.01, rel=0.15)
    assert not any(bank.bias.any() for bank in model.banks)


@pytest.mark.parametrize(("classes", "k"), [(7, 5), (3, 3)])
def test_scores_of_each_head(classes: int, k: int) -> None:
    logits = torch.randn(40, 4, classes, dtype=torch.float64)
    labels = torch.randint(classes, (40,))
    scores = HeadScores(4, classes)
    for rows in (slice(0, 25), slice(25, 40)):
        scores.update([logits[rows, :1], logits[rows, 1:]], labels[rows])
    found = scores.compute()
    for i in range(4):
        ranked = logits[:, i].argsort(dim=1, descending=True)
        assert found["top1"][i] == sum(int(ranked[n, 0] == labels[n]) for n in range(40)) / 40
        assert found["top5"][i] == sum(int(labels[n] in ranked[n, :k]) for n in range(40)) / 40
        assert found["loss"][i] == pytest.approx(float(nn.functional.cross_entropy(logits[:, i], labels)), rel=1e-12)
