"""Settings of vision backbones, and what models do besides a forward pass."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ParallelThingsBlock
from torch import Tensor, nn

from lapbench.backbones import VisionBackbone, build_backbone
from lapbench.errors import UserError
from lapbench.heads import recompute

DEIT3, ROPE, EVA = "deit3_small_patch16_224", "vit_small_patch16_rope_ape_224", "eva02_tiny_patch14_224"


def grads(model: Any, images: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    out: Tensor = model.train()(images)
    torch.autograd.backward(out.square().sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_contract(zoo: Any, family: str) -> None:
    assert isinstance(zoo.mixed(family, "0-4L"), VisionBackbone)
    model: Any = zoo.mixed(family, "0-4L")
    assert (model.embed_dim, model.num_layers, model.num_heads) == (32, 3, 4)
    assert model.schedule.name == "0-4L"
    assert model.eval()(zoo.images()).shape == (2, 5)
    tokens = model.forward_features(zoo.images())
    assert tokens.shape == (2, 16 + model.num_prefix_tokens, 32)
    prefix = {"deit3": 1, "vit_small_patch14_reg4": 5, "vit_base_patch16_siglip": 0, "deit_tiny_distilled": 2}
    known = [n for start, n in prefix.items() if family.startswith(start)]
    assert model.num_prefix_tokens == (known[0] if known else 5 if "dinov3" in family else 1)


def test_without_a_classifier(zoo: Any) -> None:
    assert zoo.mixed(DEIT3, 2, num_classes=0)(zoo.images()).shape == (2, 32)


def test_an_official_model_in_full() -> None:
    model = build_backbone("deit3_small_patch16_224", 3, num_classes=10)
    assert (model.num_layers, model.num_heads, model.embed_dim) == (12, 6, 384)
    assert model.schedule.name == "3L"


@pytest.mark.parametrize("name", [DEIT3, EVA])
@pytest.mark.parametrize(("schedule", "rates"), [("linear", [0, 0.2, 0.4]), ("constant", [0.4, 0.4, 0.4])])
def test_drop_path_over_depth(zoo: Any, name: str, schedule: str, rates: list[float]) -> None:
    model = zoo.mixed(name, 2, drop_path=0.4, drop_path_schedule=schedule)
    for block, rate in zip(model.blocks, rates, strict=True):
        for branch in (block.drop_path1, block.drop_path2):
            got = branch.drop_prob if isinstance(branch, DropPath) else 0.0
            assert got == pytest.approx(rate)
    assert len({tuple(zoo.mixed(name, 2, drop_path=0.4).train()(zoo.images()).flatten().tolist()) for _ in "ab"}) == 1
    assert torch.equal(model.eval()(zoo.images()), zoo.mixed(name, 2).eval()(zoo.images()))


def test_constant_drop_path_drops_in_the_first_block(zoo: Any) -> None:
    model = zoo.mixed(DEIT3, 2, drop_path=0.999, drop_path_schedule="constant").train()
    embedded = model._pos_embed(model.patch_embed(zoo.images()))
    torch.manual_seed(0)
    assert torch.equal(model.blocks[0](embedded), embedded)
    assert not torch.equal(model.eval().blocks[0](embedded), embedded)


@pytest.mark.parametrize("name", [DEIT3, ROPE, EVA, "vit_small_patch16_dinov3"])
def test_layer_scale(zoo: Any, name: str) -> None:
    def scales(model: nn.Module) -> list[float]:
        return [p.flatten()[0].item() for n, p in model.named_parameters() if "gamma" in n]

    default = scales(build_backbone(name, 1, img_size=16, patch_size=8, embed_dim=32, depth=3, num_heads=4))
    assert scales(zoo.mixed(name, 1, layer_scale=0.25)) == [0.25] * 6
    without = zoo.mixed(name, 1, layer_scale=0)
    assert scales(without) == []
    assert len(default) in (0, 6)
    # Blocks still compute: without LayerScale they start at full strength.
    assert not torch.allclose(
        without.eval().forward_features(zoo.images()),
        zoo.mixed(name, 0, layer_scale=0).eval().forward_features(zoo.images()),
    )


@pytest.mark.parametrize("name", [DEIT3, ROPE, EVA])
def test_qk_norm(zoo: Any, name: str) -> None:
    model = zoo.mixed(name, 2, qk_norm=True)
    assert "blocks.0.attn.q_norm.weight" in model.state_dict()
    assert model.blocks[0].attn.q_norm.weight.shape == (8,)
    with torch.no_grad():
        model.blocks[0].attn.q_norm.weight.zero_()
    assert model.eval()(zoo.images()).isfinite().all()
    assert "blocks.0.attn.q_norm.weight" not in zoo.mixed(name, 2, qk_norm=False).state_dict()


def test_image_settings(zoo: Any) -> None:
    model: Any = build_backbone(DEIT3, 1, img_size=24, patch_size=6, in_chans=1, embed_dim=32, depth=1, num_heads=4)
    assert model.patch_embed.proj.weight.shape == (32, 1, 6, 6)
    assert model.patch_embed.grid_size == (4, 4)
    assert model(torch.zeros(1, 1, 24, 24)).shape == (1, 1000)
    with pytest.raises(AssertionError, match="24"):
        model(torch.zeros(1, 1, 30, 30))


@pytest.mark.parametrize("name", [DEIT3, "vit_tiny_patch16_224", ROPE, EVA, "vit_small_patch16_dinov3"])
def test_dynamic_image_size(zoo: Any, name: str) -> None:
    """Other sizes give what stock timm gives; the size of the model is untouched."""
    ours = zoo.mixed(name, 0, dynamic_img_size=True).eval()
    stock = zoo.stock(name, dynamic_img_size=True).eval()
    mixed = zoo.mixed(name, 3, dynamic_img_size=True).eval()
    for size in (16, 24, (12, 20)):
        assert torch.equal(ours(zoo.images(size)), stock(zoo.images(size)))
        assert mixed(zoo.images(size)).isfinite().all()
    torch.testing.assert_close(mixed(zoo.images()), zoo.mixed(name, 3).eval()(zoo.images()))


@pytest.mark.parametrize("size", [61, 115, 122])
def test_sizes_that_the_patch_does_not_divide(zoo: Any, size: int) -> None:
    model = zoo.mixed("vit_tiny_patch16_224", 2, patch_size=8, dynamic_img_size=True, dynamic_img_pad=True).eval()
    grid = -(-size // 8)
    assert model.forward_features(zoo.images(size, batch=1)).shape == (1, 1 + grid**2, 32)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_pooling(zoo: Any, pool: str) -> None:
    model = zoo.mixed("vit_tiny_patch16_224", 2, global_pool=pool).eval()
    tokens = model.forward_features(zoo.images())
    pooled = tokens[:, 0] if pool == "token" else tokens[:, 1:].mean(dim=1)
    torch.testing.assert_close(model(zoo.images()), model.head(model.fc_norm(pooled)))


def test_grad_checkpointing_gives_equal_gradients(zoo: Any, family: str) -> None:
    settings = {"drop_path": 0.2, "attn_drop_rate": 0.1}
    plain = grads(zoo.mixed(family, "1TL+1S+1L", **settings), zoo.images())
    saved = grads(zoo.mixed(family, "1TL+1S+1L", grad_checkpointing=True, **settings), zoo.images())
    assert zoo.mixed(family, 2, grad_checkpointing=True).grad_checkpointing
    assert plain.keys() == saved.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(saved[name], grad, rtol=0, atol=0, msg=name)


def kept_for_backward(model: nn.Module, images: Tensor) -> int:
    """Bytes of the distinct activations that autograd keeps."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(images).sum()
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def test_mixed_heads_keep_nothing_more_than_attention(zoo: Any, family: str) -> None:
    stock = kept_for_backward(zoo.stock(family), zoo.images())
    assert stock > 0
    for heads in ("4L", "2L", "2S+1L"):
        assert kept_for_backward(zoo.mixed(family, heads), zoo.images()) <= stock


def test_small_mixtures_are_kept(zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.mixed(DEIT3, "2L"), zoo.images()
    lean = kept_for_backward(model, images)
    monkeypatch.setattr(recompute, "LEAST_BYTES", 2**20)
    assert kept_for_backward(model, images) > lean


def test_checkpointed_heads_keep_no_recipe(zoo: Any) -> None:
    """A recipe holds P V and V, which checkpointed blocks have no need of."""
    model = zoo.mixed(DEIT3, [0, 2, 2], grad_checkpointing=True)
    assert [block.attn.lean for block in model.blocks[1:]] == [False, False]
    model.set_grad_checkpointing(False)
    assert [block.attn.lean for block in model.blocks[1:]] == [True, True]


def test_function_transforms(zoo: Any) -> None:
    """torch.func's gradients, for per-sample gradients or influence, equal autograd's."""
    model = zoo.mixed(DEIT3, "1TS+2L").double().eval()
    images = zoo.images(dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        total: Tensor = model(x).square().sum()
        return total

    leaf = images.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(images), expected)


def test_a_mixed_block_compiles_to_one_graph(zoo: Any) -> None:
    model = zoo.mixed(DEIT3, "1TS+1D0.5+1L", drop_path=0.0)
    block, x = model.blocks[0], torch.randn(2, 5, 32)
    torch.compiler.reset()
    compiled: Any = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x))
    torch.autograd.backward(compiled(x).square().sum())
    found = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    block(x).square().sum().backward()
    for name, p in block.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=name)
    torch.compiler.reset()


def test_compiling_keeps_the_state_dict_keys(zoo: Any) -> None:
    compiled = zoo.mixed(DEIT3, 2, compile=True)
    assert list(compiled.state_dict()) == list(zoo.stock(DEIT3).state_dict())
    assert compiled._compiled_call_impl is not None


def test_channels_last(zoo: Any) -> None:
    plain, model = zoo.mixed(DEIT3, 2).eval(), zoo.mixed(DEIT3, 2, channels_last=True).eval()
    assert model.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)
    images = zoo.images()
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), plain(images))


def test_attention_dropout_is_off_in_eval_mode(zoo: Any, family: str) -> None:
    model = zoo.mixed(family, "1S+2L", attn_drop_rate=0.5)
    first, second = (model.train()(zoo.images()) for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (model.eval()(zoo.images()) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, zoo.mixed(family, "1S+2L").eval()(zoo.images()))


def test_copies(zoo: Any, family: str) -> None:
    model = zoo.mixed(family, "1TS+1L").eval()
    expected = model(zoo.images())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(zoo.images()), expected)
        assert other.schedule == model.schedule
        with torch.no_grad():
            other.get_parameter("blocks.0.attn.head_coefficients").add_(1.0)
        assert not torch.allclose(other(zoo.images()), expected)
    assert torch.equal(model(zoo.images()), expected)


def test_bfloat16_autocast(zoo: Any, family: str) -> None:
    model = zoo.mixed(family, "1TS+1D0.5+1L").eval()
    with torch.autocast("cpu", torch.bfloat16):
        out = model.forward_features(zoo.images())
    torch.testing.assert_close(out.float(), model.forward_features(zoo.images()), rtol=0.1, atol=0.1)


class TestForwardIntermediates:
    @pytest.mark.parametrize(
        ("indices", "blocks"),
        [(None, [0, 1, 2]), (1, [2]), (2, [1, 2]), ([0], [0]), ([-1], [2]), ([2, 0], [0, 2]), ((0, -2), [0, 1])],
        ids=str,
    )
    def test_equals_the_blocks_outputs(self, zoo: Any, family: str, indices: Any, blocks: list[int]) -> None:
        model = zoo.mixed(family, [0, 2, 4]).eval()
        outputs: list[Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        taken = model.forward_intermediates(zoo.images(), indices)
        assert isinstance(taken, list)
        assert [t.shape for t in taken] == [(2, model.num_prefix_tokens + 16, 32)] * len(blocks)
        for got, i in zip(taken, blocks, strict=True):
            assert torch.equal(got, outputs[i])

    def test_prefix_tokens_stand_first(self, zoo: Any, family: str) -> None:
        model = zoo.mixed(family, 2).eval()
        last = model.forward_intermediates(zoo.images(), 1, norm=True)[0]
        torch.testing.assert_close(last, model.forward_features(zoo.images()))

    @pytest.mark.parametrize("name", [ROPE, "vit_tiny_patch16_224"])
    def test_without_prefix_tokens(self, zoo: Any, name: str) -> None:
        model = zoo.mixed(name, 2, class_token=False, global_pool="avg").eval()
        assert model.num_prefix_tokens == 0
        assert [t.shape for t in model.forward_intermediates(zoo.images(), 2)] == [(2, 16, 32)] * 2


class TestRefused:
    def refusal(self, name: str, heads: Any = 1, **settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            build_backbone(name, heads, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_unknown_models_suggest_others(self) -> None:
        said = self.refusal("deit3_bsae_patch16_224")
        assert "backbone.name: timm" in said
        assert "no model 'deit3_bsae_patch16_224'" in said
        assert "did you mean deit3_base_patch16_224" in said
        assert "did you mean" not in self.refusal("?")

    def test_other_architectures(self) -> None:
        swin = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
        said = self.refusal("swin_tiny_patch4_window7_224", **swin)
        assert (
            "expected a model of class VisionTransformer, VisionTransformerDistilled, Eva, got SwinTransformer" in said
        )
        assert "got ResNet" in self.refusal("resnet18")
        assert "got Beit" in self.refusal("beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=4)

    @pytest.mark.parametrize(
        ("settings", "got"),
        [
            ({"attn_layer": "diff"}, "DiffAttention"),
            ({"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
            ({"block_fn": ParallelThingsBlock}, "ParallelThingsBlock"),
            ({"block_fn": DiffParallelScalingBlock}, "DiffParallelScalingBlock"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    @pytest.mark.parametrize("heads", [0, 1])
    def test_other_attention(self, zoo: Any, settings: dict[str, Any], got: str, heads: int) -> None:
        with pytest.raises(UserError) as caught:
            zoo.mixed("vit_tiny_patch16_224", heads, **settings)
        expected = "expected attention of type Attention, AttentionRope, EvaAttention, got"
        assert str(caught.value) == f"backbone vit_tiny_patch16_224, block 0: {expected} {got}"

    def test_settings_that_timm_refuses(self) -> None:
        assert "unexpected keyword argument 'drop_pth'" in self.refusal(DEIT3, drop_pth=0.1)
        assert "should be divisible by num_heads" in self.refusal(DEIT3, embed_dim=30, num_heads=4)
        assert "backbone deit3_small_patch16_224" in self.refusal(DEIT3, global_pool="none")

    def test_schedules_that_do_not_fit(self) -> None:
        small = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
        assert "expected 0..4 (the model has 4 heads), got 5" in self.refusal(DEIT3, 5, **small)
        assert "expected 3 entries (one for each layer), got 2" in self.refusal(DEIT3, [1, 2], **small)
        assert "unknown kind 'laplacain'" in self.refusal(DEIT3, {"laplacain": 2}, **small)
