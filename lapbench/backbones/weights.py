"""Loading local weights into a backbone: timm state dicts, lapbench checkpoints, compiled and DDP models' ones."""

import argparse
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import timm.models.eva
import timm.models.vision_transformer
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.eva import Eva
from torch import Tensor, nn

from lapbench.errors import UserError

log = logging.getLogger(__name__)

_PREFIXES = ("_orig_mod.", "module.", "model.", "backbone.", "teacher.")
# Where training scripts keep the model in a checkpoint, averaged weights first; Lightning's is "state_dict". In
# self-distillation (DINO) the teacher is the average.
_STATE_KEYS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model")
_TEACHER = "teacher.backbone."

Grid = tuple[int, int]


class LoadReport(NamedTuple):
    """What a load did: names of the tensors of the model that were filled, left alone, and of those not used."""

    matched: list[str]
    missing: list[str]
    unexpected: list[str]


def load_weights(
    model: nn.Module, weights: str | Path | Mapping[str, Tensor], *, grid: Grid | None = None
) -> LoadReport:
    """Loads weights, resizing position embeddings; a classifier for other classes is left at its start.

    Args:
        model: A timm vision transformer.
        weights: A file (.pth, .pt, .bin, .ckpt, .safetensors) or a state dict. Wrapper prefixes are dropped.
        grid: Rows and columns of the patches that the weights' position embeddings are for. By default what a lapbench
            checkpoint says; for other weights a square, or else the model's own grid.

    Raises:
        UserError: No such file, not a checkpoint, no tensor in common, a tensor whose shape differs (the classifier
            excepted), or position embeddings of an unknown grid.
    """
    where = str(weights) if isinstance(weights, str | Path) else "state dict"
    settings: Mapping[str, Any] = {}
    if isinstance(weights, str | Path):
        weights, settings = read_state(Path(weights))
    own = model.state_dict()
    state = without_prefixes(weights, own)
    state = _converted(state, model, grid or _declared_grid(settings, state), where)
    usable: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            if name.startswith(_classifiers(model)):
                continue
            raise UserError(
                f"weights {where}: {name} has shape {tuple(tensor.shape)}, the model expects {tuple(own[name].shape)}"
            )
        if name in own:
            usable[name] = tensor
    if not usable:
        raise UserError(
            f"weights {where}: none of its {len(state)} tensors has a name that the model has "
            f"(first ones: {', '.join(list(state)[:3])}; expected for example {next(iter(own))})"
        )
    model.load_state_dict(usable, strict=False)
    report = LoadReport(
        [n for n in own if n in usable], [n for n in own if n not in usable], [n for n in state if n not in usable]
    )
    log.info("weights %s: %d of %d tensors loaded", where, len(report.matched), len(own))
    if report.missing or report.unexpected:
        log.warning("weights %s: left at their start %s; not used %s", where, report.missing, report.unexpected)
    return report


def read_state(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The state dict of a file, and the settings of the backbone that it is of (lapbench checkpoints have them)."""
    if not path.is_file():
        raise UserError(f"weights: expected a file, {path} is none")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path), {}
        # timm's training script puts its arguments into its checkpoints.
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"weights {path}: not a checkpoint that can be read safely ({reason})") from error
    if not isinstance(checkpoint, Mapping):
        raise UserError(f"weights {path}: expected a state dict, got {type(checkpoint).__name__}")
    state = next((checkpoint[key] for key in _STATE_KEYS if isinstance(checkpoint.get(key), Mapping)), checkpoint)
    tensors = {name: t for name, t in state.items() if isinstance(name, str) and isinstance(t, Tensor)}
    tensors = {name: t for name, t in tensors.items() if name.startswith(_TEACHER)} or tensors
    hyper_parameters = checkpoint.get("hyper_parameters")
    settings = hyper_parameters.get("backbone") if isinstance(hyper_parameters, Mapping) else None
    return tensors, settings if isinstance(settings, Mapping) else {}


def _converted(state: dict[str, Tensor], model: nn.Module, grid: Grid | None, where: str) -> dict[str, Tensor]:
    """The tensors under timm's names, patch and position embeddings in the model's sizes."""
    family = timm.models.eva if isinstance(model, Eva) else timm.models.vision_transformer
    # timm takes a source grid for that of the pretrained image size, or a square. Its own names are resized here; a
    # mask token marks a foreign checkpoint, whose conversion needs the position embeddings.
    positions = None if "mask_token" in state else state.pop("pos_embed", None)
    try:
        state = dict(family.checkpoint_filter_fn(state, model))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"weights {where}: timm cannot convert them: {' '.join(str(error).split())}") from error
    if positions is not None:
        state["pos_embed"] = _resized(positions, model, grid, where)
    return state


def _resized(positions: Tensor, model: nn.Module, grid: Grid | None, where: str) -> Tensor:
    """Position embeddings [1, prefix + N, D] for the model's grid; those of prefix tokens are left alone."""
    if getattr(model, "pos_embed", None) is None or positions.ndim != 3:
        return positions
    own: Grid = model.patch_embed.grid_size  # type: ignore[union-attr, assignment]
    prefix: int = 0 if model.no_embed_class else model.num_prefix_tokens  # type: ignore[assignment]
    count = positions.size(1) - prefix
    side = math.isqrt(max(count, 0))
    if grid is None:
        grid = (side, side) if side**2 == count else own
    if grid[0] * grid[1] != count:
        raise UserError(
            f"weights {where}: pos_embed has {count} positions besides {prefix} of prefix tokens, expected "
            f"{grid[0]} x {grid[1]} or a square; load a lapbench checkpoint, which knows its image size"
        )
    if grid != own:
        log.info("weights %s: position embeddings resized from %s to %s", where, grid, own)
    resized: Tensor = resample_abs_pos_embed(positions, list(own), list(grid), num_prefix_tokens=prefix)
    return resized


def _declared_grid(settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Grid | None:
    """The patch grid that the settings of a lapbench checkpoint give, or None where they leave timm's image size."""
    size = (settings.get("options") or {}).get("img_size") or settings.get("img_size")
    patch = state.get("patch_embed.proj.weight")
    if size is None or patch is None or patch.ndim != 4:
        return None
    height, width = size if isinstance(size, Iterable) else (size, size)
    return height // patch.size(-2), width // patch.size(-1)


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    """What the names of the classifier's tensors begin with."""
    names: str | tuple[str, ...] = model.pretrained_cfg.get("classifier") or "head"  # type: ignore[union-attr, operator]
    return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))


def without_prefixes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strips wrapper prefixes from every name until it is one of the model's, or no prefix is left."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = name
        while short not in own and (prefix := next((p for p in _PREFIXES if short.startswith(p)), None)):
            short = short[len(prefix) :]
        out[short] = tensor
    return out
