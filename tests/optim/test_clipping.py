"""Clipping of each gradient against torch's, called for one parameter at a time."""

import torch
from torch import nn

from lapbench.optim import clip_each_grad_norm_


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2), (1,), (7,))]
    for parameter, size in zip(made[:4], (10.0, 0.1, 0.0, 1e6), strict=True):
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)
    return made  # the last has no gradient


def test_each_gradient_is_clipped_by_itself() -> None:
    ours, theirs = parameters(), parameters()
    clip_each_grad_norm_(ours, 3.0)
    for parameter in theirs:
        nn.utils.clip_grad_norm_([parameter], 3.0)
    for a, b in zip(ours[:4], theirs[:4], strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)
        assert a.grad.norm() <= 3.0 + 1e-5
    assert ours[4].grad is None
    torch.testing.assert_close(ours[1].grad, parameters()[1].grad)  # short ones stay as they are


def test_nothing_to_clip() -> None:
    clip_each_grad_norm_([nn.Parameter(torch.zeros(2))], 3.0)
