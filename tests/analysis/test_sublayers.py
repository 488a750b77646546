"""Variance around sublayers and by head kind, against blocks run by hand with the other kinds' weights set to 0."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapbench.analysis.sublayers import SublayerVariance
from lapbench.backbones import Decoder, VisionBackbone, build_backbone
from lapbench.errors import UserError

SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 0}
TINY: dict[str, Any] = {"vocab_size": 11, "depth": 3, "width": 32, "num_heads": 4, "context": 16, "init": "normal"}
# No kind twice; one layer of one kind; and kinds in turns.
HEADS = ["1D0.5+1L", "4L", ["laplacian", "attention", "laplacian", "learned(shaped)"]]
# What makes the families differ.
MODELS: dict[str, dict[str, Any]] = {
    "deit3_small_patch16_224": {**SIZES, "init_values": 0.1},  # LayerScale
    "deit_tiny_distilled_patch16_224": SIZES,  # two prefix tokens
    "vit_small_patch16_rope_mixed_224": {**SIZES, "init_values": 0.1},  # Eva's block with timm's attention
    "vit_small_patch16_dinov3": {**SIZES, "init_values": 0.1},  # Eva's attention
    "eva02_tiny_patch14_224": {**SIZES, "scale_attn_inner": True},  # a norm before the output projection
    "tiny": TINY,
    "d4": {**TINY, "num_kv_heads": 2},
    "postnorm-48": {**TINY, "mlp": "swiglu"},
}
Backbone = VisionBackbone | Decoder


@pytest.fixture(scope="module", params=MODELS)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return build(request.param)


def build(name: str, heads: Any = HEADS, **settings: Any) -> Backbone:
    """In float64, no parameter at its start: neither biases of 0 nor norm weights of 1."""
    model = build_backbone(name, heads, **{**MODELS[name], **settings}).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.8 * parameter + 0.2 * noise)
    return model


def batch(backbone: Backbone, size: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(backbone, Decoder):
        return torch.randint(backbone.vocab_size, (size, 9), generator=generator)
    return torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64)


def by_hand(backbone: Backbone, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All that ``compute`` gives, from each block's arguments."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def recording(block: nn.Module) -> Callable[..., Tensor]:
        forward = block.forward

        def record(*given: Any, **named: Any) -> Tensor:
            calls.append((block, given, named))
            return forward(*given, **named)

        return record

    with monkeypatch.context() as patch, torch.no_grad():
        for block in backbone.blocks:
            patch.setattr(block, "forward", recording(block))
        backbone(inputs)
    found: dict[str, Any] = {"before_attention": [], "after_attention": [], "after_mlp": [], "by_kind": {}}
    specs = list(dict.fromkeys(kind.spec for layer in backbone.schedule.layers for kind in layer))
    for spec in specs:
        found["by_kind"][spec] = {"variance": [], "update_variance": [], "mean_shift": []}
    for (block, (x, *given), named), kinds in zip(calls, backbone.schedule.layers, strict=True):
        with torch.no_grad():
            attended, out = sublayers(block, x, *given, **named)
            found["before_attention"].append(variance(x))
            found["after_attention"].append(variance(attended))
            found["after_mlp"].append(variance(out))
            for spec in specs:
                heads = [h for h, kind in enumerate(kinds) if kind.spec == spec]
                of_kind: dict[str, float | None] = dict.fromkeys(("variance", "update_variance", "mean_shift"))
                if heads:
                    u = update_of(block, heads, x, *given, **named)
                    shift = sum(float(sequence.mean(0) @ sequence.mean(0)) for sequence in u) / len(u)
                    of_kind = {"variance": variance(x + u), "update_variance": variance(u), "mean_shift": shift}
                for name, value in of_kind.items():
                    found["by_kind"][spec][name].append(value)
    return found


def sublayers(block: Any, x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    if getattr(block, "post_norm", False):
        attended = block.norm1(x + attention(block, x, *given, **named))
        return attended, block.norm2(attended + block.mlp(attended))
    attended = x + attention(block, x, *given, **named)
    added = block.mlp(block.norm2(attended))
    if getattr(block, "gamma_2", None) is not None:
        added = block.gamma_2 * added
    return attended, attended + (block.ls2(added) if hasattr(block, "ls2") else added)


def attention(block: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
    """What attention adds to x."""
    added: Tensor = block.attn(x if getattr(block, "post_norm", False) else block.norm1(x), *given, **named)
    if getattr(block, "gamma_1", None) is not None:
        added = block.gamma_1 * added
    return block.ls1(added) if hasattr(block, "ls1") else added


def update_of(block: Any, heads: list[int], x: Tensor, *given: Any, **named: Any) -> Tensor:
    """The same with the output weights of the other heads 0, and without bias."""
    projection = getattr(block.attn, "o_proj", None) or block.attn.proj
    saved = {name: value.clone() for name, value in projection.state_dict().items()}
    of_heads = projection.weight.unflatten(1, (block.attn.num_heads, -1))
    others = [h for h in range(block.attn.num_heads) if h not in heads]
    of_heads[:, others] = 0
    if projection.bias is not None:
        projection.bias.zero_()
    added = attention(block, x, *given, **named)
    projection.load_state_dict(saved)
    return added


def variance(tokens: Tensor) -> float:
    """Token by token."""
    total = 0.0
    for sequence in tokens.double():
        mean = sum(sequence) / len(sequence)
        total += sum(float((token - mean) @ (token - mean)) for token in sequence)
    return total / (tokens.size(0) * tokens.size(1))


def measured(backbone: Backbone, *batches: Tensor) -> dict[str, Any]:
    measure = SublayerVariance(backbone)
    for inputs in batches:
        with measure.watching(), torch.inference_mode():
            backbone(inputs)
    return measure.compute()


def assert_equal(got: dict[str, Any], expected: dict[str, Any], rel: float = 1e-9) -> None:
    got, expected = dict(got), dict(expected)
    of_kinds, expected_of_kinds = got.pop("by_kind"), expected.pop("by_kind")
    assert list(of_kinds) == list(expected_of_kinds)
    for name, values in expected.items():
        assert_near(got.pop(name), values, rel)
    assert not got
    for spec, of_kind in of_kinds.items():
        assert list(of_kind) == list(expected_of_kinds[spec])
        for name, values in of_kind.items():
            assert_near(values, expected_of_kinds[spec][name], rel)


def assert_near(got: list[float | None], expected: list[float | None], rel: float) -> None:
    assert [x is None for x in got] == [x is None for x in expected]
    assert [x for x in got if x is not None] == pytest.approx([x for x in expected if x is not None], rel=rel)


def test_it_is_what_blocks_run_by_hand_give(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch(backbone)
    expected = by_hand(backbone, inputs, monkeypatch)
    assert list(expected["by_kind"]) == ["attention", "deescalated(0.5)", "laplacian", "learned(shaped)"]
    assert expected["by_kind"]["attention"]["mean_shift"][1] is None
    assert_equal(measured(backbone, inputs), expected)
    # In any batches.
    assert_equal(measured(backbone, inputs[:1], inputs[1:3], inputs[3:]), expected)


def test_what_kinds_add_makes_up_what_attention_adds(backbone: Backbone) -> None:
    parts = SublayerVariance(backbone)._parts
    for layer, watched in zip(backbone.schedule.layers, parts, strict=True):
        heads = torch.randn(2, 3, watched.projection.in_features, dtype=torch.float64)
        with torch.no_grad():
            shares = sum(watched.update_of(kind, heads) for kind in set(layer))
            whole = nn.functional.linear(heads, watched.projection.weight)
            block: Any = watched.block
            if getattr(block, "gamma_1", None) is not None:
                whole = whole * block.gamma_1
            if hasattr(block, "ls1"):
                whole = block.ls1(whole)
        assert torch.allclose(shares, whole, rtol=1e-12, atol=1e-12)


def test_outputs_and_gradients_are_the_same_to_the_bit_and_no_hook_is_left(backbone: Backbone) -> None:
    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.modules())

    def outcome() -> list[Tensor]:
        backbone.zero_grad()
        out = backbone(batch(backbone))
        out.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in backbone.parameters() if parameter.grad is not None]
        return [out.detach(), *gradients]

    before, plain = hooks(), outcome()
    measure = SublayerVariance(backbone)
    with measure.watching():
        assert hooks() == before + 4 * backbone.num_layers
        watched = outcome()
    assert hooks() == before
    assert len(plain) == len(watched) > 10
    assert all(map(torch.equal, plain, watched))
    with pytest.raises(ZeroDivisionError), measure.watching():
        _ = 1 / 0
    assert hooks() == before
    assert not list(measure.parameters())
    assert not measure.state_dict()


def test_passes_that_stop_early_and_other_dtypes() -> None:
    backbone = build("tiny")
    inputs = batch(backbone)
    measure = SublayerVariance(backbone)
    whole = measured(backbone, inputs)
    with measure.watching(), torch.no_grad():
        backbone.forward_intermediates(inputs, [0, 1])
    got = measure.compute()
    assert got["before_attention"] == [*whole["before_attention"][:2], None]
    assert got["by_kind"]["laplacian"]["mean_shift"] == [*whole["by_kind"]["laplacian"]["mean_shift"][:2], None]
    # As near as float32 and bfloat16 compute the tokens themselves.
    assert_equal(measured(backbone.float(), inputs), whole, rel=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(measured(backbone, inputs), whole, rel=0.1)
    assert_equal(measured(backbone.bfloat16(), inputs), whole, rel=0.1)


def test_sequences_that_only_fill_up_a_batch_do_not_count(backbone: Backbone) -> None:
    inputs = batch(backbone, 7)
    measure = SublayerVariance(backbone)
    with torch.no_grad():
        for first, last, count in ((0, 5, 3), (3, 7, 2), (0, 2, 0)):
            with measure.watching(count):
                backbone(inputs[first:last])
    assert_equal(measure.compute(), measured(backbone, inputs[:5]), rel=1e-6)


def test_sums_do_not_depend_on_an_offset_nor_on_the_dtype_of_tokens() -> None:
    backbone = build("tiny", "1L")
    generator = torch.Generator().manual_seed(2)
    before, heads, attended, after = torch.randn(4, 3, 7, 32, generator=generator, dtype=torch.float64)
    plain, shifted, rounded = (SublayerVariance(backbone) for _ in range(3))
    for layer in range(3):
        plain.update(layer, before, heads, attended, after)
        shifted.update(layer, before + 1000, heads, attended + 1000, after + 1000)
        rounded.update(layer, *((t + 1000).float() for t in (before,)), heads, (attended + 1000).float(), after.float())
    assert_equal(shifted.compute(), plain.compute())
    assert rounded.compute()["before_attention"] == pytest.approx([variance((before + 1000).float())] * 3, rel=1e-9)
    assert rounded.compute()["after_attention"] == pytest.approx([variance((attended + 1000).float())] * 3, rel=1e-9)
    assert rounded.compute()["after_mlp"] == pytest.approx([variance(after.float())] * 3, rel=1e-9)


def test_a_kinds_variance_and_mean_shift_are_its_squared_length() -> None:
    backbone = build("tiny", 4)
    measure = SublayerVariance(backbone)
    tokens, heads = torch.randn(2, 4, 7, 32, dtype=torch.float64)
    measure.update(0, tokens, heads, tokens, tokens)
    of_kind = measure.compute()["by_kind"]["laplacian"]
    with torch.no_grad():
        u = backbone.blocks[0].attn.o_proj(heads)
    length = float(u.square().sum(-1).mean())
    assert of_kind["update_variance"][0] + of_kind["mean_shift"][0] == pytest.approx(length, rel=1e-12)


def test_laplacian_heads_spread_tokens_and_attention_heads_move_their_mean() -> None:
    """arXiv 2602.09297, section 2.1, where attention is uniform: P V is one vector, V - P V has mean 0."""
    backbone = build_backbone("deit3_small_patch16_224", 2, **SIZES, init_values=1.0).double().eval()
    with torch.no_grad():
        for block in backbone.blocks:
            block.attn.qkv.weight[:64] = 0  # queries and keys
    of_kinds = measured(backbone, batch(backbone))["by_kind"]
    assert of_kinds["attention"]["update_variance"] == pytest.approx([0] * 3, abs=1e-20)
    assert of_kinds["laplacian"]["mean_shift"] == pytest.approx([0] * 3, abs=1e-20)
    assert min(of_kinds["attention"]["mean_shift"]) > 1e-6
    assert min(of_kinds["laplacian"]["update_variance"]) > 1e-6


def test_sequences_of_one_token_have_no_variance() -> None:
    backbone = build("tiny")
    got = measured(backbone, batch(backbone)[:, :1])
    zero = [0.0] * 3
    assert got["before_attention"] == got["after_attention"] == got["after_mlp"] == zero
    # A head that attends to the only token outputs V; a Laplacian one 0.
    assert got["by_kind"]["laplacian"] == {"variance": zero, "update_variance": zero, "mean_shift": zero}
    assert min(x for x in got["by_kind"]["attention"]["mean_shift"] if x is not None) > 0


def test_a_compiled_backbone_is_measured_too() -> None:
    backbone = build("tiny", depth=1, heads=1)
    inputs = batch(backbone)
    expected = measured(backbone, inputs)
    backbone.compile(backend="eager")
    with torch.inference_mode():
        backbone(inputs)
        assert measured(backbone, inputs) == expected
        backbone(inputs)


def one_of_two(rank: int, folder: Path, found: Any) -> None:
    """A process of two, which see different numbers of sequences."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    backbone = build("tiny")
    inputs = batch(backbone)
    found.put(measured(backbone, *((inputs[:1], inputs[1:3]) if rank == 0 else (inputs[3:],))))
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path, found)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    backbone = build("tiny")
    expected = measured(backbone, batch(backbone))
    for _ in pair:
        assert_equal(found.get(), expected)


def test_backbones_that_have_no_such_sublayers_are_refused() -> None:
    with pytest.raises(UserError, match=r"sublayers: Pixels has no blocks; leave this measure out"):
        SublayerVariance(build_backbone("pixels", patch_size=4, num_classes=0))
    normalised = build_backbone("vit_base_patch16_rpn_224", 1, **SIZES)
    with pytest.raises(UserError, match=r"sublayers: block 0 is a ResPostBlock, which normalises what"):
        SublayerVariance(normalised)


def test_misuse_is_an_error() -> None:
    measure = SublayerVariance(build("tiny"))
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ValueError, match="nothing seen"):
        measure.compute()
    with measure.watching(), pytest.raises(ValueError, match="watching already"), measure.watching():
        pass
