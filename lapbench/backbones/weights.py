"""Loading local weights into a backbone: timm state dicts, lapbench checkpoints, compiled and DDP models' ones."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm.models.eva
import timm.models.vision_transformer
from timm.models import load_state_dict as timm_load_state_dict
from timm.models.eva import Eva
from torch import Tensor, nn

from lapbench.errors import UserError

log = logging.getLogger(__name__)

_PREFIXES = ("_orig_mod.", "module.", "model.", "backbone.")


class LoadReport(NamedTuple):
    """What a load did: names of the tensors of the model that were filled, left alone, and of those not used."""

    matched: list[str]
    missing: list[str]
    unexpected: list[str]


def load_weights(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> LoadReport:
    """Loads weights, resizing position embeddings; a classifier for other classes is left at its start.

    Args:
        model: A timm vision transformer.
        weights: A file (.pth, .pt, .bin, .ckpt, .safetensors) or a state dict. Wrapper prefixes are dropped.

    Raises:
        UserError: No such file, not a checkpoint, no tensor in common, or a tensor whose shape differs (the classifier
            excepted).
    """
    where = str(weights) if isinstance(weights, str | Path) else "state dict"
    state = _read(Path(weights)) if isinstance(weights, str | Path) else dict(weights)
    own = model.state_dict()
    state = _without_prefixes(state, own)
    family = timm.models.eva if isinstance(model, Eva) else timm.models.vision_transformer
    state = dict(family.checkpoint_filter_fn(state, model))
    classifier = model.pretrained_cfg.get("classifier") or "head"  # type: ignore[union-attr, operator]
    heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier))
    usable: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            if name.startswith(heads):
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
    report = LoadReport(list(usable), [n for n in own if n not in usable], [n for n in state if n not in usable])
    log.info("weights %s: %d of %d tensors loaded", where, len(report.matched), len(own))
    if report.missing or report.unexpected:
        log.warning("weights %s: left at their start %s; not used %s", where, report.missing, report.unexpected)
    return report


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"weights: expected a file, {path} is none")
    try:
        state: dict[str, Any] = timm_load_state_dict(str(path), use_ema=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  torch and safetensors raise many types for files that are no checkpoint
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"weights {path}: not a checkpoint that can be read safely ({reason})") from error
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _without_prefixes(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strips wrapper prefixes from every name until it is one of the model's, or no prefix is left."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = name
        while short not in own and (prefix := next((p for p in _PREFIXES if short.startswith(p)), None)):
            short = short[len(prefix) :]
        out[short] = tensor
    return out
