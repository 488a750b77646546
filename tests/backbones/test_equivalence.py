"""All-attention models are stock timm bit for bit; Laplacian and other kinds equal an explicit softmax in float64."""

from typing import Any

import pytest
import timm.layers
import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from lapbench.heads import HeadSchedule

SCHEDULES = ["0L", "2L", "4L", [0, 4, 1], "1S+1D0.5+1L", "1L+1A+1H0.5+1A"]


class ToMixing(nn.Module):
    """Stands where timm's explicit attention has its dropout on P, [B, H, T, T], and returns a I + b P + c C."""

    def __init__(self, coefficients: list[tuple[float, float, float]]) -> None:
        super().__init__()
        self.p = 0.0
        self.table = torch.tensor(coefficients, dtype=torch.float64)

    def forward(self, attention: Tensor) -> Tensor:
        tokens = attention.size(-1)
        a, b, c = self.table.T[:, :, None, None]
        mixing: Tensor = a * torch.eye(tokens, dtype=torch.float64) + b * attention + c / tokens
        return mixing


def with_explicit_heads(model: nn.Module, schedule: HeadSchedule) -> Any:
    """A stock timm model in float64 whose heads are computed from the full P, without a fused kernel."""
    for block, kinds in zip(model.blocks, schedule.layers, strict=True):  # type: ignore[arg-type]
        block.attn.fused_attn = False
        block.attn.attn_drop = ToMixing([kind.coefficients for kind in kinds])
    return model.double().eval()


def test_the_families_cover_every_attention_type(zoo: Any) -> None:
    types = {type(zoo.stock(name).blocks[0].attn) for name in zoo.families}
    assert types == {Attention, AttentionRope, EvaAttention}


def test_all_attention_is_stock_timm_bit_for_bit(zoo: Any, family: str) -> None:
    """Outputs, gradients and state dict, in train mode with all that is random on."""
    random = {"drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1}
    ours = zoo.mixed(family, 0, drop_path=0.3, **random)
    stock = zoo.stock(family, drop_path_rate=0.3, **random)
    assert list(ours.state_dict()) == list(stock.state_dict())
    for (name, a), b in zip(ours.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    outputs = []
    for model in (ours, stock):
        torch.manual_seed(3)
        outputs.append(model.train()(zoo.images()))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    for (name, p), q in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    assert torch.equal(ours.eval()(zoo.images()), stock.eval()(zoo.images()))


@pytest.mark.parametrize("heads", SCHEDULES, ids=str)
def test_heads_equal_the_explicit_softmax(zoo: Any, family: str, heads: Any) -> None:
    ours = zoo.mixed(family, heads).double().eval()
    reference = with_explicit_heads(zoo.stock(family), ours.schedule)
    images = zoo.images(dtype=torch.float64).requires_grad_()
    out, expected = ours(images), reference(images)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = []
    for model, result in ((ours, out), (reference, expected)):
        leaves = {"images": images, **dict(model.named_parameters())}
        # Some kinds have no use for some parameters of a family: queries and keys where no head attends.
        found = torch.autograd.grad((result * direction).sum(), list(leaves.values()), allow_unused=True)
        gradients.append({name: g for name, g in zip(leaves, found, strict=True) if g is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=1e-10, msg=name)


def test_the_schedule_matters(zoo: Any, family: str) -> None:
    """What the tests above compare is not the same for every schedule, layer by layer."""
    outputs = [zoo.mixed(family, heads).eval()(zoo.images()) for heads in (0, 4, [4, 0, 0], [0, 0, 4])]
    for i, a in enumerate(outputs):
        for b in outputs[i + 1 :]:
            assert not torch.allclose(a, b, rtol=1e-4)


def test_parameters_and_state_dict_keys_do_not_depend_on_the_schedule(zoo: Any, family: str) -> None:
    stock = zoo.stock(family)
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    for heads in SCHEDULES:
        model = zoo.mixed(family, heads)
        assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in stock.parameters())
        for name, tensor in stock.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)  # the same start for every schedule


def test_learned_heads_add_only_their_coefficients(zoo: Any, family: str) -> None:
    model = zoo.mixed(family, ["1TL+1L", 0, "1TD0.5+1A+1TS"])
    added = set(model.state_dict()) - set(zoo.stock(family).state_dict())
    assert added == {"blocks.0.attn.head_coefficients", "blocks.2.attn.head_coefficients"}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert state["blocks.0.attn.head_coefficients"].tolist() == [[1, -1, 0]]
    assert state["blocks.2.attn.head_coefficients"].tolist() == [[0, 1, -0.5], [1, 1, -1]]
    assert all(model.get_parameter(name).requires_grad for name in added)
    start = zoo.mixed(family, ["2L", 0, "1D0.5+1A+1S"])
    torch.testing.assert_close(model.eval()(zoo.images()), start.eval()(zoo.images()), rtol=1e-4, atol=1e-6)

    # They are trained, with the gradients of coefficients before an explicit P.
    model.double()
    reference = with_explicit_heads(zoo.stock(family), model.schedule)
    tables = [block.attn.attn_drop.table.requires_grad_() for block in reference.blocks]
    for trained in (model, reference):
        torch.autograd.backward(trained(zoo.images(dtype=torch.float64)).square().sum())
    for i in (0, 2):
        coefficients = model.blocks[i].attn.head_coefficients
        learned = [kind.learned for kind in model.schedule.layers[i]]
        assert coefficients.grad.abs().max() > 0
        torch.testing.assert_close(coefficients.grad, tables[i].grad[learned], rtol=1e-6, atol=1e-12)


def test_unfused_timm_changes_nothing(zoo: Any) -> None:
    """TIMM_FUSED_ATTN=0: all-attention layers are timm's explicit ones, mixed ones stay fused."""
    expected = zoo.mixed("deit3_small_patch16_224", [0, 2, 2]).eval()(zoo.images())
    timm.layers.set_fused_attn(False)
    try:
        model = zoo.mixed("deit3_small_patch16_224", [0, 2, 2]).eval()
    finally:
        timm.layers.set_fused_attn(True)
    assert [block.attn.fused_attn for block in model.blocks] == [False, True, True]
    torch.testing.assert_close(model(zoo.images()), expected)


def test_masks_reach_the_heads(zoo: Any) -> None:
    """timm passes masks and causality down; a causal model's tokens do not see later ones."""
    model = zoo.mixed("vit_tiny_patch16_224", "1S+1L", class_token=False, global_pool="avg").eval()
    before = zoo.images()
    after = before.clone()
    after[:, :, 8:] += 1.0  # the lower half: tokens 8 to 15
    a, b = (model.forward_features(images, is_causal=True) for images in (before, after))
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.allclose(a[:, 8:], b[:, 8:])
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    torch.testing.assert_close(model.forward_features(before, attn_mask=mask), a)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_query_attention(zoo: Any, num_kv_heads: int) -> None:
    settings = {"num_kv_heads": num_kv_heads, "qkv_fused": False}
    ours = zoo.mixed("vit_small_patch16_rope_ape_224", "1S+2L", **settings).double().eval()
    reference = with_explicit_heads(zoo.stock("vit_small_patch16_rope_ape_224", **settings), ours.schedule)
    images = zoo.images(dtype=torch.float64)
    torch.testing.assert_close(ours(images), reference(images), rtol=0, atol=1e-10)
