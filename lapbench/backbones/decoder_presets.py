"""Settings of a decoder, the presets that they start from, and what may not be combined."""

import difflib
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lapbench.errors import UserError

Norm = Literal["rms", "rms_weight", "layer"]
NormPosition = Literal["pre", "post"]
MLPKind = Literal["relu2", "swiglu", "gelu"]
Positions = Literal["rope", "learned"]
Init = Literal["nanochat", "normal"]


@dataclass
class DecoderSettings:
    """Settings of a decoder; None keeps what the preset has.

    Args:
        name: Preset: tiny, d4 to d32 (nanochat's family) or postnorm-48.
        heads: Head schedule: 6 (Laplacian heads in every layer), [0, 2, 2, 0] (for each layer), a name (0-12L,
            6L@last4, 4L+2D0.5) or a mapping of kinds to counts.
        depth: Number of blocks.
        width: Width of the tokens.
        num_heads: Query heads of each block.
        num_kv_heads: Key and value heads, which groups of query heads share; ``num_heads`` by default.
        context: Longest sequence, in tokens.
        norm: "rms" has no weight, "rms_weight" and "layer" have one and no bias.
        norm_position: "pre" is x + f(norm(x)), "post" norm(x + f(x)).
        mlp: "relu2" and "gelu" have two matrices, "swiglu" three.
        mlp_width: Hidden width; by default 4 x width, for "swiglu" 8/3 x width rounded up to a multiple of 64.
        positions: Rotary ("rope") or learned position embeddings.
        rope_base: Base of the rotary frequencies.
        qk_norm: Whether to normalise queries and keys, after the rotation.
        softcap: Bound s of the logits, s tanh(z / s); 0 for none.
        tied: Whether the output matrix is the token embedding.
        embed_norm: Whether to normalise the embedding.
        init: "nanochat" scales by fan-in, with output projections of 0 and embeddings N(0, 1); "normal" is
            N(0, init_std) throughout.
        init_std: Standard deviation for "normal", and for learned positions and a tied embedding in both.
        head_std: Standard deviation of the output matrix.
        weights: Local weights to start from: a state dict (.pth, .safetensors) or a lapbench checkpoint (.ckpt).
        grad_checkpointing: Whether to recompute blocks in the backward pass, to save memory.
        compile: Whether to compile the model with torch.compile.
    """

    name: str
    # Not a Union of its forms: HeadSchedule.parse says better than jsonargparse what does not fit.
    heads: Any = 0
    depth: int | None = None
    width: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    context: int | None = None
    norm: Norm | None = None
    norm_position: NormPosition | None = None
    mlp: MLPKind | None = None
    mlp_width: int | None = None
    positions: Positions | None = None
    rope_base: float | None = None
    qk_norm: bool | None = None
    softcap: float | None = None
    tied: bool | None = None
    embed_norm: bool | None = None
    init: Init | None = None
    init_std: float | None = None
    head_std: float | None = None
    weights: str | None = None
    grad_checkpointing: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Architecture:
    """What ``DecoderSettings`` come to: every value of the model, checked. Fields as there."""

    depth: int
    width: int
    num_heads: int
    num_kv_heads: int
    context: int
    norm: Norm
    norm_position: NormPosition
    mlp: MLPKind
    mlp_width: int
    positions: Positions
    rope_base: float
    qk_norm: bool
    softcap: float
    tied: bool
    embed_norm: bool
    init: Init
    init_std: float
    head_std: float

    @property
    def head_width(self) -> int:
        """Width d_h of one head."""
        return self.width // self.num_heads


# nanochat, October 2025.
_NANOCHAT: dict[str, Any] = {
    "context": 2048,
    "norm": "rms",
    "norm_position": "pre",
    "mlp": "relu2",
    "positions": "rope",
    "rope_base": 10000.0,
    "qk_norm": True,
    "softcap": 15.0,
    "tied": False,
    "embed_norm": True,
    "init": "nanochat",
    "init_std": 0.02,
    "head_std": 0.0,
}
# arXiv 2608.09417 states 48 layers, RMSNorm after each residual sum, SwiGLU and length 2048. Width and heads are ours
# (those of GPT-2 small, whose learning rate its stable run has), and so is Llama's start N(0, 0.02).
_POSTNORM_48: dict[str, Any] = {
    **_NANOCHAT,
    "depth": 48,
    "width": 768,
    "num_heads": 12,
    "norm": "rms_weight",
    "norm_position": "post",
    "mlp": "swiglu",
    "qk_norm": False,
    "softcap": 0.0,
    "embed_norm": False,
    "init": "normal",
    "head_std": 0.02,
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_NANOCHAT, "depth": 4, "width": 128, "num_heads": 4, "context": 256},
    "postnorm-48": _POSTNORM_48,
}
HEAD_WIDTH = 128  # of the d-family


def is_decoder(name: str) -> bool:
    """Whether a backbone of this name is a decoder: a preset, or written like one of the d-family."""
    return name in PRESETS or re.fullmatch(r"d[0-9]+", name) is not None


def resolve(settings: DecoderSettings) -> Architecture:
    """Puts the settings over those of their preset.

    Raises:
        UserError: An unknown preset, a value out of its range, or values that do not fit together.
    """
    names = {f.name for f in fields(Architecture)}
    given = {key: value for key, value in asdict(settings).items() if key in names and value is not None}
    values = {**_preset(settings.name), **given}
    where = f"backbone {settings.name}"
    _check_ranges(values, where)
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("mlp_width", _mlp_width(values["width"], values["mlp"]))
    a = Architecture(**values)
    if a.width % a.num_heads:
        raise UserError(f"{where}: num_heads must divide the width {a.width}, got {a.num_heads}")
    if a.num_heads % a.num_kv_heads:
        raise UserError(f"{where}: num_kv_heads must divide num_heads {a.num_heads}, got {a.num_kv_heads}")
    if a.positions == "rope" and a.head_width % 2:
        raise UserError(f"{where}: positions rope needs heads of even width, got {a.width} / {a.num_heads} heads")
    return a


def _preset(name: str) -> dict[str, Any]:
    if name in PRESETS:
        return PRESETS[name]
    family = [f"d{depth}" for depth in range(4, 33)]
    if name in family:
        depth = int(name[1:])
        # nanochat's 64 x depth; odd depths take the next width that whole heads of 128 fill, as its later versions do.
        num_heads = math.ceil(64 * depth / HEAD_WIDTH)
        return {**_NANOCHAT, "depth": depth, "width": HEAD_WIDTH * num_heads, "num_heads": num_heads}
    near = difflib.get_close_matches(name, [*PRESETS, *family], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"backbone.name: unknown decoder {name!r}; expected {', '.join(PRESETS)} or d4 to d32{hint}")


def _check_ranges(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        allowed = get_args(Architecture.__annotations__[key])
        kind = Architecture.__annotations__[key]
        if allowed and value not in allowed:
            raise UserError(f"{where}: {key} must be one of {', '.join(allowed)}, got {value!r}")
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"{where}: {key} must be true or false, got {value!r}")
        if kind is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{where}: {key} must be a whole number of at least 1, got {value!r}")
        if kind is float and (isinstance(value, bool) or not isinstance(value, int | float) or not _fits(key, value)):
            raise UserError(f"{where}: {key} must be a finite number {_bound(key)}, got {value!r}")


def _fits(key: str, value: float) -> bool:
    return math.isfinite(value) and (value > 0 if key == "rope_base" else value >= 0)


def _bound(key: str) -> str:
    return "above 0" if key == "rope_base" else "of at least 0"


def _mlp_width(width: int, mlp: MLPKind) -> int:
    return 64 * math.ceil(8 * width / 3 / 64) if mlp == "swiglu" else 4 * width
