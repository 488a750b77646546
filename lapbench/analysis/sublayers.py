"""What attention, MLP and each kind of head do to the spread and to the mean of a sequence's tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NamedTuple

import timm.models.eva
import timm.models.vision_transformer
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lapbench.backbones import Decoder, VisionBackbone, decoder_layers
from lapbench.errors import UserError
from lapbench.heads.kinds import HeadKind
from lapbench.heads.schedule import Layer

PerLayer = list[float | None]

_STAGES = ("before_attention", "after_attention", "after_mlp")
_OF_A_KIND = ("variance", "update_variance", "mean_shift")
CPU_AT_ONCE = 512  # tokens
_BLOCKS = (timm.models.vision_transformer.Block, timm.models.eva.EvaBlock, decoder_layers.Block)


class SublayerVariance(Metric):
    """Within-sequence variance around each sublayer, and what each kind of head alone does to a sequence.

    Laplacian heads are said to control the within-sequence variance directly, attention heads the mean (arXiv
    2602.09297, section 2.1). Both are measured here: the heads of kind k add u_k = W_O[:, heads of k] z_k to the
    tokens x of a sequence (eq. 2 and 3), where z_k is what these heads output; LayerScale is part of u_k, the bias of
    W_O, which belongs to no head, and dropout are not. The u_k of a layer and the bias add up to attention's update.

    All numbers are means over tokens of squared lengths: the variance (1/N) sum |x - mean of its sequence|^2, summed
    over features, and the mean shift (1/N) sum over sequences of T |mean of u_k|^2. So a kind's ``update_variance`` and
    ``mean_shift`` add up to the mean of |u_k|^2. Sums are float64, over tokens centred in float64; u_k is computed in
    the precision in which the model computes, autocast considered. All tokens count, class tokens and padding too.

    Use it as ``with measure.watching(): backbone(batch)``, in any number of passes; outside, it costs nothing.

    Args:
        backbone: Its blocks are watched.

    Attributes:
        kinds: Specs of the head kinds of the backbone's schedule, in order of appearance.
        sums: [L, 1 + 3 + 3 K], for each layer: tokens, the stages of ``compute``, then those of each kind.

    Raises:
        UserError: A backbone without blocks, or whose blocks normalise what attention adds: that has no share of a
            kind.
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor

    def __init__(self, backbone: VisionBackbone | Decoder) -> None:
        super().__init__()
        self._parts = _parts(backbone)
        self._watching = False
        # In a tuple, or the backbone would be a part of this metric.
        self._backbone = (backbone,)
        self._kinds_of_layers = [set(layer) for layer in backbone.schedule.layers]
        self._kinds = list(dict.fromkeys(kind for layer in backbone.schedule.layers for kind in layer))
        width = 1 + len(_STAGES) + len(_OF_A_KIND) * len(self._kinds)
        self.add_state("sums", torch.zeros(len(self._parts), width, dtype=torch.float64), dist_reduce_fx="sum")

    @property
    def kinds(self) -> list[str]:
        return [kind.spec for kind in self._kinds]

    @contextmanager
    def watching(self, sequences: int | None = None) -> Iterator[None]:
        """Inside, every pass through the backbone is added; a compiled backbone runs as it would without compiling.

        Args:
            sequences: Only so many of the first sequences of each pass count, where others just fill up a batch.

        Raises:
            ValueError: It is watching already.
        """
        if self._watching:
            raise ValueError("SublayerVariance: it is watching already, every pass would count twice")
        (backbone,) = self._backbone
        self.to(next(backbone.parameters()).device)
        with ExitStack() as stack:
            # Compiled code would not call the hooks. (Asking for it imports the compiler.)
            if any(module._compiled_call_impl is not None for module in backbone.modules()):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for layer, parts in enumerate(self._parts):
                for handle in _Watch(self, layer, parts, sequences).hooks():
                    stack.callback(handle.remove)
            self._watching = True
            try:
                yield
            finally:
                self._watching = False

    def update(self, layer: int, before: Tensor, heads: Tensor, attended: Tensor, after: Tensor) -> None:
        """Add a pass of a batch through one block; ``watching`` does it.

        Args:
            layer: Number of the block.
            before: Its input, [B, T, D].
            heads: What its heads output, side by side: [B, T, H d_h].
            attended: Tokens after the attention sublayer, [B, T, D].
            after: Its output, [B, T, D].
        """
        # On CPUs a few sequences at a time, which stay in a cache.
        at_once = max(1, CPU_AT_ONCE // before.size(1)) if before.device.type == "cpu" else len(before)
        # Not in inference mode, whose tensors could not be added to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            row = torch.zeros_like(self.sums[layer])
            for piece in zip(*(torch.split(x, at_once) for x in (before, heads, attended, after)), strict=True):
                row += self._row(layer, *piece)
            rows = list(self.sums)
            rows[layer] = rows[layer] + row
            self.sums = torch.stack(rows)

    def _row(self, layer: int, before: Tensor, heads: Tensor, attended: Tensor, after: Tensor) -> Tensor:
        """What some sequences add to the row of ``sums``."""
        centred, _ = _centred(before)
        row = [centred.new_tensor(before[..., 0].numel())]
        row += [_squares(centred), _squares(_centred(attended)[0]), _squares(_centred(after)[0])]
        for kind in self._kinds:
            if kind not in self._kinds_of_layers[layer]:
                row += [torch.zeros_like(row[0])] * len(_OF_A_KIND)
                continue
            own, mean = _centred(self._parts[layer].update_of(kind, heads))
            alone = _squares(own)
            row += [_squares(own.add_(centred)), alone, _squares(mean) * own.size(1)]
        return torch.stack(row)

    def compute(self) -> dict[str, PerLayer | dict[str, dict[str, PerLayer]]]:
        """What was measured, one number for each layer; None in layers that no pass went through.

        Returns:
            ``before_attention``, ``after_attention`` and ``after_mlp``: the within-sequence variance of a block's
            input, of what its MLP sublayer starts from and of its output. In Post-Norm decoders the last two are after
            the norm. ``by_kind``: for each kind the lists ``variance`` of x + u_k, to compare with
            ``before_attention``, ``update_variance`` of u_k and ``mean_shift``; None in layers that have no such head.

        Raises:
            ValueError: No pass was watched.
        """
        if not self.sums[:, 0].any():
            raise ValueError("SublayerVariance: nothing seen; run the backbone inside `with measure.watching()`")
        columns = [
            [total / tokens if tokens else None for tokens, total in zip(self.sums[:, 0].tolist(), column, strict=True)]
            for column in self.sums[:, 1:].T.tolist()
        ]
        found: dict[str, PerLayer | dict[str, dict[str, PerLayer]]] = dict(zip(_STAGES, columns, strict=False))
        by_kind = {}
        for i, kind in enumerate(self._kinds):
            first = len(_STAGES) + i * len(_OF_A_KIND)
            by_kind[kind.spec] = {
                name: [value if kind in has else None for value, has in zip(column, self._kinds_of_layers, strict=True)]
                for name, column in zip(_OF_A_KIND, columns[first:], strict=False)
            }
        found["by_kind"] = by_kind
        return found


class _Parts(NamedTuple):
    """What is watched of a block: itself, attention's output projection, and what takes the attended tokens."""

    block: nn.Module
    projection: nn.Linear
    second: nn.Module
    kinds: Layer

    def update_of(self, kind: HeadKind, heads: Tensor) -> Tensor:
        """u_k [B, T, D] from what all heads output, [B, T, H d_h]."""
        width = self.projection.in_features // len(self.kinds)
        added = []
        first = 0
        for own, run in groupby(self.kinds):
            last = first + len(list(run)) * width
            if own == kind:
                added.append(F.linear(heads[..., first:last], self.projection.weight[:, first:last]))
            first = last
        update = added[0] if len(added) == 1 else torch.stack(added).sum(dim=0)
        if isinstance(self.block, timm.models.vision_transformer.Block):
            return self.block.ls1(update)  # type: ignore[no-any-return]
        gamma = getattr(self.block, "gamma_1", None)
        return update if gamma is None else gamma * update


def sublayers_left_out(backbone: VisionBackbone | Decoder) -> str | None:
    """Why a backbone's sublayers cannot be measured, None if they can."""
    blocks = list(getattr(backbone, "blocks", ()))
    if not blocks:
        return f"{type(backbone).__name__} has no blocks"
    for i, block in enumerate(blocks):
        if not isinstance(block, _BLOCKS):
            return f"block {i} is a {type(block).__name__}, which normalises what its heads add together"
    return None


def _parts(backbone: VisionBackbone | Decoder) -> list[_Parts]:
    if reason := sublayers_left_out(backbone):
        raise UserError(f"sublayers: {reason}; leave this measure out")
    parts = []
    for block, kinds in zip(backbone.blocks, backbone.schedule.layers, strict=True):  # type: ignore[arg-type]
        post_norm = getattr(block, "post_norm", False)
        projection = block.attn.o_proj if isinstance(backbone, Decoder) else block.attn.proj
        assert isinstance(projection, nn.Linear)
        parts.append(_Parts(block, projection, block.mlp if post_norm else block.norm2, kinds))
    return parts


class _Watch:
    """Keeps what passes through one block until its output is there."""

    def __init__(self, measure: SublayerVariance, layer: int, parts: _Parts, sequences: int | None) -> None:
        self.measure, self.layer, self.parts, self.sequences = measure, layer, parts, sequences
        self.passing: dict[str, Tensor] = {}

    def hooks(self) -> list[RemovableHandle]:
        kept = {"before": self.parts.block, "heads": self.parts.projection, "attended": self.parts.second}
        handles = [module.register_forward_pre_hook(self._keep(name)) for name, module in kept.items()]
        return [*handles, self.parts.block.register_forward_hook(self._add)]

    def _keep(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            self.passing[name] = given[0].detach()[: self.sequences]

        return keep

    def _add(self, block: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        passed, self.passing = self.passing, {}
        self.measure.update(self.layer, **passed, after=output.detach()[: self.sequences])


def _centred(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, tokens [B, T, D] less the means of their sequences, and these means, [B, 1, D]."""
    wide = tokens.to(torch.float64, copy=True)
    mean = wide.mean(dim=1, keepdim=True)
    return wide.sub_(mean), mean


def _squares(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x)
    return norm.square()
