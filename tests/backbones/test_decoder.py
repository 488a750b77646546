"""Decoders: sizes, starts, causality, gradients, settings, and what a user may get wrong."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from lapbench.backbones import Decoder, DecoderSettings, build_backbone, build_decoder
from lapbench.backbones.decoder import load_decoder_weights
from lapbench.errors import UserError
from lapbench.heads import HeadKind

KINDS = ["attention", "laplacian", "deescalated(0.5)", "shaped", "highpass(0.5)", "learned(laplacian)"]
MIXED = [["attention", "laplacian", "shaped", "learned(shaped)"], 2, ["laplacian"] * 4]
SMALL: dict[str, Any] = {"depth": 3, "width": 32, "context": 64, "vocab_size": 61}
# What makes architectures differ, each at least once.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "nanochat": {},
    "grouped": {"num_kv_heads": 2},
    "llama": {"norm": "rms_weight", "mlp": "swiglu", "qk_norm": False, "softcap": 0.0, "embed_norm": False},
    "gpt2": {"norm": "layer", "mlp": "gelu", "positions": "learned", "qk_norm": False, "tied": True, "softcap": 0.0},
    "post": {"norm": "rms_weight", "norm_position": "post", "mlp": "swiglu", "embed_norm": False},
}


def small(heads: Any = 0, **settings: Any) -> Decoder:
    """A small decoder whose output projections are not 0, so that what happens inside shows in the logits."""
    torch.manual_seed(0)
    return build_decoder("tiny", heads, **{**SMALL, "init": "normal", "init_std": 0.2, "head_std": 0.2, **settings})


def tokens_of(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def naive_logits(model: Decoder, tokens: Tensor) -> Tensor:
    """The formulas, one sequence and one head at a time, P and C built."""
    a = model.architecture

    def norm(x: Tensor, module: Any) -> Tensor:
        weight = getattr(module, "weight", None)
        if a.norm == "layer":
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        else:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x if weight is None else x * weight

    def rotated(x: Tensor) -> Tensor:  # [T, d]
        half = x.size(-1) // 2
        out = torch.empty_like(x)
        for t in range(len(x)):
            for i in range(half):
                angle = t * a.rope_base ** (-i / half)
                cos, sin = math.cos(angle), math.sin(angle)
                out[t, i] = cos * x[t, i] + sin * x[t, half + i]
                out[t, half + i] = cos * x[t, half + i] - sin * x[t, i]
        return out

    def attention(x: Tensor, module: Any) -> Tensor:
        length, width = len(x), a.head_width
        visible = torch.ones(length, length, dtype=x.dtype).tril()
        average = visible / visible.sum(dim=1, keepdim=True)
        heads, learned = [], 0
        for h, kind in enumerate(module.kinds):
            g = h // (a.num_heads // a.num_kv_heads)
            q = x @ module.q_proj.weight[h * width : (h + 1) * width].T
            k = x @ module.k_proj.weight[g * width : (g + 1) * width].T
            v = x @ module.v_proj.weight[g * width : (g + 1) * width].T
            if a.positions == "rope":
                q, k = rotated(q), rotated(k)
            if a.qk_norm:
                q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
            p = (q @ k.T / math.sqrt(width)).masked_fill(visible == 0, -math.inf).softmax(-1)
            ca, cb, cc = kind.coefficients
            if kind.learned:
                ca, cb, cc = module.head_coefficients[learned]
                learned += 1
            heads.append(ca * v + cb * p @ v + cc * average @ v)
        return torch.cat(heads, dim=-1) @ module.o_proj.weight.T

    def mlp(x: Tensor, module: Any) -> Tensor:
        if a.mlp == "swiglu":
            gate = x @ module.gate_proj.weight.T
            return (gate * gate.sigmoid() * (x @ module.up_proj.weight.T)) @ module.down_proj.weight.T  # type: ignore[no-any-return]
        hidden = x @ module.fc1.weight.T
        hidden = hidden.clamp(min=0) ** 2 if a.mlp == "relu2" else 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
        return hidden @ module.fc2.weight.T  # type: ignore[no-any-return]

    rows = []
    for row in tokens:
        x = model.embedding.weight[row]
        if model.positions is not None:
            x = x + model.positions.weight[: len(row)]
        if a.embed_norm:
            x = norm(x, model.embed_norm)
        for block in model.blocks:
            if a.norm_position == "post":
                x = norm(x + attention(x, block.attn), block.norm1)
                x = norm(x + mlp(x, block.mlp), block.norm2)
            else:
                x = x + attention(norm(x, block.norm1), block.attn)
                x = x + mlp(norm(x, block.norm2), block.mlp)
        if a.norm_position == "pre":
            x = norm(x, model.norm)
        logits = x @ model.head.weight.T
        rows.append(a.softcap * torch.tanh(logits / a.softcap) if a.softcap else logits)
    return torch.stack(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_gradients_equal_the_naive_rewrite(architecture: str) -> None:
    model = small(MIXED, **ARCHITECTURES[architecture]).double()
    for name, parameter in model.named_parameters():
        if "norm" in name or "coefficients" in name:  # away from 1 and from their start
            parameter.data += 0.1 * torch.arange(parameter.numel()).view_as(parameter) / parameter.numel()
    tokens = tokens_of(2, 9)
    direction = torch.randn(2, 9, 61, dtype=torch.float64)
    results = []
    for logits in (model(tokens), naive_logits(model, tokens)):
        model.zero_grad()
        torch.autograd.backward((logits * direction).sum())
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(list(model.parameters()))
    for fast, slow in zip(*results, strict=True):
        # The rotary table is that of float32 in every model.
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [0, 5, 10, "0-10L", {"shaped": 4}, {"deescalated(0.5)": 3, "laplacian": 2}], ids=str)
def test_d20_has_the_papers_number_of_parameters(heads: Any) -> None:
    with torch.device("meta"):
        model = build_decoder("d20", heads, vocab_size=65536)
    assert sum(p.numel() for p in model.parameters()) == 560_988_160
    assert (model.num_layers, model.embed_dim, model.num_heads, model.context) == (20, 1280, 10, 2048)
    # 6 N without the embedding, and 12 L H d T for the attention.
    assert model.flops_per_token(2048) == 6 * (560_988_160 - 65536 * 1280) + 12 * 20 * 1280 * 2048


@pytest.mark.parametrize("depth", range(4, 33))
def test_the_d_family(depth: int) -> None:
    with torch.device("meta"):
        model = build_decoder(f"d{depth}", vocab_size=10)
    assert model.architecture.head_width == 128
    assert model.num_heads == math.ceil(64 * depth / 128)
    if depth % 2 == 0:
        assert model.embed_dim == 64 * depth


def test_postnorm_48() -> None:
    with torch.device("meta"):
        model = build_decoder("postnorm-48", 12, vocab_size=10)
    kinds = {type(m).__name__ for m in model.blocks[0].modules()}
    assert (model.num_layers, model.context, "SwiGLU" in kinds, "RMSNorm" in kinds) == (48, 2048, True, True)
    assert all(block.post_norm for block in model.blocks)
    assert isinstance(model.norm, torch.nn.Identity)


@pytest.mark.parametrize("heads", [1, 4, {"shaped": 4}, {"deescalated(2)": 2}, {"learned(highpass(1))": 4}], ids=str)
def test_at_the_start_all_schedules_give_the_same_logits(heads: Any) -> None:
    logits = []
    for schedule in (0, heads):
        torch.manual_seed(3)
        logits.append(build_decoder("tiny", schedule, **SMALL, head_std=0.1)(tokens_of(2, 16)))
    assert torch.equal(*logits)
    assert logits[0].std() > 0.1


def test_start_of_nanochats_matrices() -> None:
    torch.manual_seed(0)
    model = build_decoder("tiny", vocab_size=2000, width=256, depth=1)
    block: Any = model.blocks[0]
    for weight, std in [
        (model.embedding.weight, 1.0),
        (block.attn.q_proj.weight, 1 / 16),
        (block.mlp.fc1.weight, 1 / 16),  # fan_out above fan_in
        (block.attn.o_proj.weight, 0.0),
        (block.mlp.fc2.weight, 0.0),
        (model.head.weight, 0.0),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.02)
    narrow: Any = build_decoder("tiny", vocab_size=10, width=256, num_kv_heads=1, depth=1).blocks[0]
    assert narrow.attn.v_proj.weight.std().item() == pytest.approx(1 / 16 * 0.5, rel=0.02)  # fan_out a quarter


@pytest.mark.parametrize("heads", [*({kind: 4} for kind in KINDS), MIXED], ids=str)
def test_causality(heads: Any) -> None:
    model = small(heads, num_kv_heads=2)
    tokens = tokens_of(1, 64)
    before = model(tokens)
    for prefix in (1, 3, 7, 15, 31, 32, 63):
        changed = tokens.clone()
        changed[:, prefix:] = (changed[:, prefix:] + 7) % 61
        after = model(changed)
        assert torch.equal(after[:, :prefix], before[:, :prefix])
        assert not torch.equal(after[:, prefix:], before[:, prefix:])


@pytest.mark.parametrize("architecture", ["nanochat", "grouped", "gpt2"])
@pytest.mark.parametrize("heads", [0, MIXED], ids=["attention", "mixed"])
def test_left_padding_changes_nothing(architecture: str, heads: Any) -> None:
    model = small(heads, **ARCHITECTURES[architecture])
    tokens = tokens_of(3, 20)
    padding = torch.tensor([0, 7, 20])
    logits = model(tokens, padding=padding)
    assert logits.isfinite().all()  # the third row is padding only
    for row, n in enumerate(padding[:2].tolist()):
        torch.testing.assert_close(logits[row, n:], model(tokens[row : row + 1, n:])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 0])])
def test_no_tokens(padding: Tensor | None) -> None:
    assert small(MIXED)(tokens_of(2, 0), padding=padding).shape == (2, 0, 61)


def test_padding_counts_for_the_context() -> None:
    model = small(MIXED)
    assert model(tokens_of(1, 70), padding=torch.tensor([6])).shape == (1, 70, 61)
    with pytest.raises(UserError, match=r"tokens: expected at most 64 \(the model's context\), got 65"):
        model(tokens_of(1, 70), padding=torch.tensor([5]))
    with pytest.raises(UserError, match=r"got 65"):
        model(tokens_of(1, 65))


def test_gradients_are_the_same_with_recomputed_mixtures_and_blocks() -> None:
    tokens = tokens_of(2, 32)
    grads = []
    for mode in ("lean", "kept", "checkpointed"):
        model = small(MIXED)
        if mode == "kept":
            for block in model.blocks:
                block.attn.lean = False
        model.set_grad_checkpointing(mode == "checkpointed")
        torch.autograd.backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        grads.append([p.grad for p in model.parameters()])
    for lean, kept, checkpointed in zip(*grads, strict=True):
        assert lean is not None
        assert torch.equal(lean, kept)
        assert torch.equal(lean, checkpointed)


def test_lean_mixtures_are_not_kept() -> None:
    """Half Laplacian keeps as many bytes for the backward pass as all-attention."""

    def kept(model: Decoder) -> int:
        storages: dict[int, int] = {}

        def pack(t: Any) -> Any:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(tokens_of(2, 64))
        assert out.requires_grad
        return sum(storages.values())

    fat = small(2)
    for block in fat.blocks:
        block.attn.lean = False
    assert kept(small(2)) <= kept(small(0)) < kept(fat)


def test_intermediates() -> None:
    model = small(MIXED)
    tokens = tokens_of(2, 12)
    every = model.forward_intermediates(tokens)
    assert [x.shape for x in every] == [(2, 12, 32)] * 3
    assert torch.equal(model.forward_intermediates(tokens, 1, norm=True)[0], model.forward_features(tokens))
    assert torch.equal(model.forward_head(model.forward_features(tokens)), model(tokens))
    for indices, expected in [(2, every[1:]), ([0, -1], [every[0], every[2]]), ([-2], [every[1]]), (0, [])]:
        got = model.forward_intermediates(tokens, indices)
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))
    for indices in ([3], 4):
        with pytest.raises(IndexError, match="the model has 3 blocks"):
            model.forward_intermediates(tokens, indices)


def test_soft_capped_logits_are_float32_under_autocast() -> None:
    model = small(MIXED, head_std=50.0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens_of(2, 12))
    assert logits.dtype == torch.float32
    assert 10 < logits.abs().max() <= 15


@pytest.mark.parametrize("architecture", ["grouped", "gpt2"])
def test_compiled_models_are_the_eager_ones(architecture: str) -> None:
    tokens = tokens_of(2, 16)
    results = []
    for compiled in (False, True):
        model = small(MIXED[:1], **ARCHITECTURES[architecture], depth=1)  # compiling takes seconds for each block
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else model
        logits = run(tokens)
        torch.autograd.backward(logits.square().mean())
        results.append([logits, *(p.grad for p in model.parameters())])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-4, atol=1e-5)


def test_learned_coefficients_train() -> None:
    model = small({"learned(attention)": 4})
    torch.autograd.backward(model(tokens_of(2, 12)).square().sum())
    for block in model.blocks:
        assert block.attn.head_coefficients.shape == (4, 3)
        assert (block.attn.head_coefficients.grad.abs() > 0).all()


def test_build_backbone_knows_decoders() -> None:
    model = build_backbone("tiny", "4L@last2", vocab_size=100)
    assert isinstance(model, Decoder)
    assert (model.schedule.name, model.num_prefix_tokens, model.num_kv_heads) == ("4L@last2", 0, 4)
    assert DecoderSettings("tiny").heads == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tinny"}, r"unknown decoder 'tinny'; .* \(did you mean tiny\?\)"),
        ({"name": "d33"}, r"unknown decoder 'd33'; expected tiny, postnorm-48 or d4 to d32"),
        ({"hads": 2}, r"decoders have no 'hads' \(did you mean heads\?\)"),
        ({"num_classes": 10}, r"decoders have no 'num_classes'"),
        ({"num_heads": 5}, "num_heads must divide the width 128, got 5"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4, got 3"),
        ({"width": 12}, "even width, got 12 / 4 heads"),
        ({"depth": 0}, "depth must be a whole number of at least 1, got 0"),
        ({"context": True}, "context must be a whole number"),
        ({"norm": "rsm"}, "norm must be one of rms, rms_weight, layer, got 'rsm'"),
        ({"softcap": -1.0}, "softcap must be a finite number of at least 0, got -1"),
        ({"rope_base": 0}, "rope_base must be a finite number above 0, got 0"),
        ({"tied": 1}, "tied must be true or false, got 1"),
        ({"heads": [0, 1]}, "heads: expected 4 entries"),
        ({"heads": 5}, "the model has 4 heads"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number of at least 1, got 0"),
        ({"weights": "nowhere.ckpt"}, "weights: expected a file, nowhere.ckpt is none"),
    ],
)
def test_user_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_decoder(**{"name": "tiny", "vocab_size": 61, **arguments})
    assert "\n" not in str(error.value)


def test_a_decoder_without_vocabulary() -> None:
    with pytest.raises(UserError, match="backbone d4: a decoder reads tokens and needs vocab_size"):
        build_backbone("d4", num_classes=10)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors", "state dict"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back(kind: str, tied: bool, tmp_path: Path) -> None:
    source, tokens = small(MIXED, tied=tied), tokens_of(2, 12)
    state = source.state_dict()
    path = tmp_path / {"checkpoint": "last.ckpt", "safetensors": "model.safetensors", "state dict": "w.pth"}[kind]
    if kind == "safetensors":
        safetensors.torch.save_file({n: t for n, t in state.items() if not (tied and n == "head.weight")}, path)
    else:
        prefixed = {f"backbone._orig_mod.{name}": t for name, t in state.items()}
        torch.save({"state_dict": prefixed} if kind == "checkpoint" else state, path)
    torch.manual_seed(9)
    model = build_decoder("tiny", MIXED, **SMALL, tied=tied, weights=str(path))
    assert torch.equal(model(tokens), source(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 4}, r"6 of the model's tensors are missing, the first blocks\.3\."),
        ({"depth": 2}, r"6 tensors are not the model's, the first blocks\.2\."),
        ({"vocab_size": 62}, r"embedding.weight has shape \(61, 32\), the model expects \(62, 32\)"),
        (
            {"heads": {"learned(shaped)": 4}},
            r"3 of the model's tensors are missing, the first blocks\.0\.attn\.head_coefficients",
        ),
    ],
)
def test_weights_of_another_model(settings: dict[str, Any], message: str) -> None:
    model = small(**settings)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_decoder_weights(model, small().state_dict())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_head_kinds_are_those_of_the_schedule() -> None:
    model = small(MIXED)
    kinds = [block.attn.kinds for block in model.blocks]
    assert kinds == list(model.schedule.layers)
    assert kinds[1] == tuple(map(HeadKind.parse, ("attention", "attention", "laplacian", "laplacian")))
