"""Rotation and RMSNorm against torch's own operations and gradients."""

import cmath
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lapbench.backbones.decoder_ops import RMSNorm, rms_norm, rotary_table, rotate, swiglu


def results(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * direction).sum(), leaves)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0)])
def test_rms_norm_is_torchs(weighted: bool, dtype: torch.dtype, tolerance: float) -> None:
    x = (3 * torch.randn(2, 7, 4, 10)).to(dtype).transpose(1, 2).requires_grad_()
    weight = torch.randn(10).to(dtype).requires_grad_() if weighted else None
    leaves = [x] if weight is None else [x, weight]
    for eps in (1e-6, 0.5, None):
        ours = results(rms_norm(x, weight, eps), *leaves)
        theirs = results(F.rms_norm(x, (10,), weight, eps), *leaves)
        for mine, stock in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, stock, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_swiglu_is_its_formula(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = (torch.randn(2, 7, 10).to(dtype).requires_grad_() for _ in range(2))
    ours, formula = results(swiglu(gate, up), gate, up), results(gate * gate.sigmoid() * up, gate, up)
    for mine, stock in zip(ours, formula, strict=True):
        torch.testing.assert_close(mine, stock, rtol=tolerance, atol=tolerance)


def test_without_gradients_the_results_are_the_same() -> None:
    x, weight = torch.randn(2, 5, 3, 8), torch.randn(8)
    cos, sin = (table[:, None] for table in rotary_table(5, 8, 10000.0))
    for run in (
        lambda: rms_norm(x, None, 1e-6),
        lambda: rms_norm(x, weight, 1e-6),
        lambda: rotate(x, cos, sin),
        lambda: swiglu(x, 2 * x),
    ):
        before = x.clone()
        with torch.no_grad():
            plain = run()
        assert torch.equal(run(), plain)
        assert torch.equal(x, before)


def test_rms_norm_of_zero_is_zero() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    out, grad = results(rms_norm(x, None, 1e-6), x)
    assert torch.equal(out, torch.zeros(2, 3))
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    "run", [lambda x: rms_norm(x, None, 1e-6), lambda x: rms_norm(x, torch.ones(3), 1e-6), lambda x: swiglu(x, x)]
)
def test_second_gradients_are_refused(run: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(grad.sum())


def test_the_module_is_torchs() -> None:
    x = torch.randn(3, 8)
    ours, theirs = RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


def test_rotation_turns_pairs_clockwise() -> None:
    cos, sin = rotary_table(8, 4, 100.0)
    x = torch.randn(8, 4)
    out = rotate(x, cos, sin)
    for t in range(8):
        for i in range(2):
            turned = complex(x[t, i], x[t, i + 2]) * cmath.exp(-1j * t * 100.0 ** (-i / 2))
            assert out[t, i].item() == pytest.approx(turned.real, abs=1e-5)
            assert out[t, i + 2].item() == pytest.approx(turned.imag, abs=1e-5)


def test_gradients_of_the_rotation() -> None:
    cos, sin = (table.double()[:, None] for table in rotary_table(5, 6, 10000.0))
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (x, cos, sin))
    assert torch.autograd.gradgradcheck(rotate, (x, cos, sin))


def test_compiled_operations_are_the_eager_ones() -> None:
    cos, sin = (table[:, None] for table in rotary_table(5, 6, 10000.0))
    x = torch.randn(2, 5, 3, 6, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        return swiglu(rms_norm(rotate(x, cos, sin), torch.ones(6), 1e-6), x)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for eager, graph in zip(results(both(x), x), results(compiled(x), x), strict=True):
        torch.testing.assert_close(eager, graph)
