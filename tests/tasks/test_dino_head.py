"""DINO's projection head."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lapbench.errors import UserError
from lapbench.tasks.dino_head import DINOHead, ProjectionHead

SMALL = {"out_dim": 11, "hidden_dim": 6, "bottleneck_dim": 4}


def head(**settings: Any) -> DINOHead:
    torch.manual_seed(0)
    return DINOHead(5, ProjectionHead(**{**SMALL, **settings}))


def features(count: int = 9) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_three_layers_then_cosines_with_the_prototypes(batch_norm: bool) -> None:
    ours, x = head(batch_norm=batch_norm), features()
    linear = [m for m in ours.mlp if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linear] == [(5, 6), (6, 6), (6, 4)]
    assert sum(isinstance(m, nn.BatchNorm1d) for m in ours.mlp) == 2 * batch_norm
    hidden = x
    for i, layer in enumerate(linear):
        hidden = hidden @ layer.weight.T + layer.bias
        if i < 2:
            if batch_norm:
                hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    unit = hidden / hidden.norm(dim=1, keepdim=True)
    prototypes = ours.last_layer.direction / ours.last_layer.direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(ours(x), unit @ prototypes.T)
    assert ours(x).abs().max() <= 1 + 1e-6


def test_first_weights() -> None:
    ours = DINOHead(200, ProjectionHead(out_dim=300, hidden_dim=200, bottleneck_dim=100))
    for layer in (m for m in ours.mlp if isinstance(m, nn.Linear)):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.any()
    assert ours.last_layer.direction.std().item() == pytest.approx(100**-0.5 / 3**0.5, rel=0.05)  # torch's own


def test_one_layer_is_a_projection_to_the_bottleneck() -> None:
    assert [type(m) for m in head(layers=1).mlp] == [nn.Linear]


def test_the_norms_of_the_prototypes_are_trained_or_stay_1() -> None:
    assert not head().last_layer.gain.requires_grad
    ours = head(norm_last_layer=False)
    theirs = weight_norm(nn.Linear(4, 11, bias=False))
    gain = torch.rand(11, 1) + 0.5
    with torch.no_grad():
        theirs.parametrizations.weight.original0.copy_(gain)
        theirs.parametrizations.weight.original1.copy_(ours.last_layer.direction)
        ours.last_layer.gain.copy_(gain)
    x = F.normalize(features()[:, :4], dim=1)
    torch.testing.assert_close(ours.last_layer(x), theirs(x))
    ours.last_layer(x).sum().backward()
    theirs(x).sum().backward()
    torch.testing.assert_close(ours.last_layer.gain.grad, theirs.parametrizations.weight.original0.grad)
    torch.testing.assert_close(ours.last_layer.direction.grad, theirs.parametrizations.weight.original1.grad)


def test_a_copy_has_the_same_outputs_and_weights_of_its_own() -> None:
    ours, x = head(batch_norm=True), features()
    other = copy.deepcopy(ours)
    assert torch.equal(ours(x), other(x))
    with torch.no_grad():
        other.last_layer.direction.add_(1)
    assert not torch.equal(ours(x), other(x))


def test_prototypes_are_compared_in_float32_under_autocast() -> None:
    ours, x = head(), F.normalize(features()[:, :4], dim=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(features()).dtype == torch.float32
        assert torch.equal(ours.last_layer(x), ours.last_layer(x.float()))
        under = ours.last_layer(x)
    assert torch.equal(under, ours.last_layer(x))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"out_dim": 1}, r"head\.out_dim: expected at least 2, got 1"),
        ({"layers": 0}, r"head\.layers: expected at least 1, got 0"),
        ({"freeze_epochs": -1}, r"head\.freeze_epochs: expected at least 0, got -1"),
    ],
)
def test_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ProjectionHead(**settings).check()
