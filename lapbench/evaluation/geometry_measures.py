"""All measures of token geometry over all chosen layers of a backbone, from one pass of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lapbench.analysis.anova import TokenANOVA
from lapbench.analysis.collapse import NearestMeanMismatch, NeuralCollapse
from lapbench.analysis.pca import TokenPCA
from lapbench.analysis.similarity import WithinSequenceSimilarity
from lapbench.analysis.spectrum import TokenSpectrum
from lapbench.analysis.sublayers import SublayerVariance, sublayers_left_out
from lapbench.backbones import Decoder, Pixels, VisionBackbone
from lapbench.datamodules.text import IGNORED
from lapbench.evaluation.features import AT_ONCE
from lapbench.evaluation.geometry_samples import IMAGES, MAPS, FirstSamples, shown_classes, simplex_classes, spaced

MEASURES = ("anova", "similarity", "spectrum", "collapse", "pca", "simplex", "feature_maps", "sublayers")
# Tokens that a decoder sees at once: their states after all layers are in memory together.
TOKENS_AT_ONCE = 16384
# Numbers that a process keeps of all samples, for the nearest class means, instead of reading the data once more.
KEPT = 2**26

Tokens = Literal["all", "patches"]
Unit = Literal["sequence mean", "class token"]


@dataclass(frozen=True)
class Chosen:
    """What is measured of a backbone.

    Attributes:
        measures: Some of ``MEASURES``.
        layers: Blocks, in order.
        tokens: Whether prefix tokens count.
        unit: What stands for a sample in neural collapse.
        alpha: Of k_alpha.
    """

    measures: tuple[str, ...]
    layers: tuple[int, ...]
    tokens: Tokens
    unit: Unit
    alpha: float


def left_out(task: pl.LightningModule, num_classes: int, layers: Sequence[int]) -> dict[str, str]:
    """The measures that a task does not allow, and why."""
    backbone = backbone_of(task)
    if isinstance(backbone, Decoder):
        no_label = "text has no label for a whole sequence"
        return {**dict.fromkeys(("collapse", "pca", "simplex"), no_label), "feature_maps": "text has no patches"}
    reasons = {}
    if reason := sublayers_left_out(backbone):
        reasons["sublayers"] = reason
    if backbone.embed_dim < 2:
        reasons["pca"] = "it shows two components, tokens have one feature"
    if classifier_of(task) is None:
        reasons["simplex"] = f"{type(task).__name__} has no linear classifier"
    elif layers[-1] != backbone.num_layers - 1:
        reasons["simplex"] = "the classifier reads the last layer, which was not chosen"
    elif num_classes < 3:
        reasons["simplex"] = f"it shows three classes, the data have {num_classes}"
    return reasons


def backbone_of(task: pl.LightningModule) -> VisionBackbone | Decoder:
    """The backbone of a task that has one."""
    return cast("VisionBackbone | Decoder", task.backbone)


def classifier_of(task: pl.LightningModule) -> nn.Linear | None:
    """The linear classifier behind the backbone of a task; None where there is none, or more than one."""
    backbone = backbone_of(task)
    if isinstance(backbone, Decoder | Pixels):
        return None
    classifier = backbone.get_classifier()  # type: ignore[operator]
    return classifier if isinstance(classifier, nn.Linear) else None


def layer_tokens(backbone: VisionBackbone | Decoder, inputs: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Tokens [B, T, D] as they leave the chosen blocks; those of the last block after the model's final norm."""
    taken = backbone.forward_intermediates(inputs, list(layers))
    norm = getattr(backbone, "norm", None)
    if layers[-1] == backbone.num_layers - 1 and norm is not None:
        taken[-1] = norm(taken[-1])
    return taken


class GeometryMeasures(nn.Module):
    """The chosen measures of a task's backbone, over processes.

    ``spectrum``, ``pca``, ``simplex``, ``feature_maps``, and ``anova`` of text, are of the last chosen layer, all
    others of each. Neural collapse reads sequence means or class tokens, behind the norm between pooling and classifier
    where the model has one and the layer is its last; classifier and predictions belong to that layer alone.

    The backbone is no module of it: it stays as and where it is.

    Args:
        task: Its backbone is in evaluation mode.
        chosen: What is measured.
        num_classes: Classes of the labels, or tokens of the vocabulary.
        samples: How many samples a process will add, at most.
        at_once: Samples that the backbone sees at once; blank ones fill up, so that numbers do not depend on batches.
        precision: Enters the precision in which the backbone runs.
    """

    def __init__(
        self,
        task: pl.LightningModule,
        chosen: Chosen,
        num_classes: int,
        samples: int,
        at_once: int = AT_ONCE,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        backbone = backbone_of(task)
        self._backbone, self._classifier = (backbone,), (classifier_of(task),)
        self.chosen, self.num_classes, self.at_once, self.precision = chosen, num_classes, at_once, precision
        self.is_text = isinstance(backbone, Decoder)
        self.reads_classifier = self.classifier is not None and chosen.layers[-1] == backbone.num_layers - 1
        width, layers, has = backbone.embed_dim, chosen.layers, chosen.measures.__contains__
        self.samples = self.whole = self.length = 0
        self.anova_layers = () if not has("anova") else layers[-1:] if self.is_text else layers
        self.anova = [TokenANOVA(num_classes, width) for _ in self.anova_layers]
        self.similarity = [WithinSequenceSimilarity() for _ in layers if has("similarity")]
        self.spectrum = TokenSpectrum(width, chosen.alpha) if has("spectrum") else None
        self.collapse = [NeuralCollapse(num_classes, width) for _ in layers if has("collapse")]
        self.pca = TokenPCA(width) if has("pca") else None
        self.sublayers = SublayerVariance(backbone) if has("sublayers") else None
        # For their device.
        self.of_layers = nn.ModuleList([*self.anova, *self.similarity, *self.collapse])
        self.scatter = FirstSamples(shown_classes(num_classes), IMAGES) if has("pca") else None
        self.simplex = FirstSamples(simplex_classes(num_classes), 2 * IMAGES) if has("simplex") else None
        self.maps = FirstSamples([0], MAPS) if has("feature_maps") else None
        self.images = FirstSamples([0], MAPS) if has("feature_maps") else None
        self.keys: dict[int, str] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._keeps = samples * width <= KEPT
        self.mismatch: NearestMeanMismatch | None = None

    @property
    def backbone(self) -> VisionBackbone | Decoder:
        """What is measured."""
        return self._backbone[0]

    @property
    def classifier(self) -> nn.Linear | None:
        """The task's classifier, if it has a linear one."""
        return self._classifier[0]

    @property
    def counts_mismatch(self) -> bool:
        """Whether NC4 is measured: it compares the nearest class mean with the classifier."""
        return len(self.collapse) > 0 and self.reads_classifier

    @property
    def needs_second_pass(self) -> bool:
        """Whether ``update_mismatch`` is to see all samples once more before ``compute``."""
        return self.counts_mismatch and not self._keeps

    @torch.no_grad()
    def update(self, inputs: Tensor, labels: Tensor, first: int, keys: Sequence[str] = ()) -> None:
        """Adds a batch.

        Args:
            inputs: Images [B, C, H, W] or token numbers [B, T].
            labels: [B], or next tokens [B, T].
            first: Place of the first sample in the split; the others follow.
            keys: Of images: their names.
        """
        if self.images is not None:
            self.images.update(inputs, [0] * len(inputs), first)
            self.keys |= {first + row: key for row, key in enumerate(keys) if first + row < MAPS}
        for piece, of_piece in zip(torch.split(inputs, self.at_once), torch.split(labels, self.at_once), strict=True):
            if self.is_text:
                self._add_text(piece, of_piece)
            else:
                self._add_images(piece, of_piece, first)
            self.samples += len(piece)
            first += len(piece)

    @torch.no_grad()
    def update_mismatch(self, inputs: Tensor) -> None:
        """Adds a batch of the second pass, after ``start_mismatch``."""
        assert self.mismatch is not None
        for piece in torch.split(inputs, self.at_once):
            (tokens,) = self._tokens(piece, self.chosen.layers[-1:], watched=None)
            self.mismatch.update(self._unit(tokens, last=True), self._predictions(tokens))

    def start_mismatch(self) -> None:
        """Takes the class means of all processes, and compares what was kept of the samples with them."""
        if not self.counts_mismatch:
            return
        self.mismatch = self.collapse[-1].nearest_mean_mismatch()
        device = self.mismatch.means.device
        for features, predictions in self._kept:
            self.mismatch.update(features.to(device), predictions.to(device))

    def _add_images(self, images: Tensor, labels: Tensor, first: int) -> None:
        every = self._tokens(images, self.chosen.layers, watched=len(images))
        prefix = 0 if self.chosen.tokens == "all" else cast(VisionBackbone, self.backbone).num_prefix_tokens
        counted = [tokens[:, prefix:] for tokens in every]
        for anova, tokens in zip(self.anova, counted, strict=False):
            anova.update(tokens, labels)
        self._add_sequences(counted)
        self._add_collapse(every, labels)
        self._add_pictures(every[-1], counted[-1], labels.tolist(), first)

    def _add_text(self, inputs: Tensor, targets: Tensor) -> None:
        # Windows that end early, or in a token that is not to be predicted, are no whole sequences; they go last.
        whole = targets[:, -1] != IGNORED
        order = (~whole).int().argsort(stable=True)
        inputs, targets, count = inputs[order], targets[order], int(whole.sum())
        every = self._tokens(inputs, self.chosen.layers, watched=count)
        for anova in self.anova:
            anova.update(every[-1], targets)
        self._add_sequences([tokens[:count] for tokens in every])

    def _add_sequences(self, layers: Sequence[Tensor]) -> None:
        self.whole += len(layers[-1])
        self.length = layers[-1].size(1)
        for similarity, tokens in zip(self.similarity, layers, strict=False):
            similarity.update(tokens)
        if self.spectrum is not None:
            self.spectrum.update(layers[-1])

    def _add_collapse(self, layers: Sequence[Tensor], labels: Tensor) -> None:
        for collapse, layer, tokens in zip(self.collapse, self.chosen.layers, layers, strict=False):
            collapse.update(self._unit(tokens, layer == self.backbone.num_layers - 1), labels)
        if self.counts_mismatch and self._keeps:
            self._kept.append((self._unit(layers[-1], last=True).cpu(), self._predictions(layers[-1]).cpu()))

    def _add_pictures(self, every: Tensor, counted: Tensor, labels: Sequence[int], first: int) -> None:
        if self.pca is not None and self.scatter is not None:
            self.pca.update(counted)
            self.scatter.update(spaced(counted), labels, first)
        if self.simplex is not None:
            self.simplex.update(self._before_classifier(spaced(counted)), labels, first)
        if self.maps is not None:
            prefix = cast(VisionBackbone, self.backbone).num_prefix_tokens
            self.maps.update(every[:, prefix:], [0] * len(labels), first)

    def _tokens(self, inputs: Tensor, layers: Sequence[int], watched: int | None) -> list[Tensor]:
        """Tokens of each layer, of as many samples as there are; sublayers see the first ``watched`` of them."""
        backbone = self.backbone
        padded = nn.functional.pad(inputs, (0, 0) * (inputs.ndim - 1) + (0, self.at_once - len(inputs)))
        watching = (
            self.sublayers.watching(watched) if self.sublayers is not None and watched is not None else nullcontext()
        )
        with self.precision(), watching:
            return [tokens[: len(inputs)] for tokens in layer_tokens(backbone, padded, layers)]

    def _unit(self, tokens: Tensor, last: bool) -> Tensor:
        """What stands for each sample, [B, D] of all tokens [B, T, D]."""
        if self.chosen.unit == "class token":
            unit = tokens[:, 0]
        else:
            prefix = 0 if self.chosen.tokens == "all" else cast(VisionBackbone, self.backbone).num_prefix_tokens
            unit = tokens[:, prefix:].mean(dim=1)
        return self._before_classifier(unit) if last else unit

    def _before_classifier(self, features: Tensor) -> Tensor:
        """Behind the norm that some models have between pooling and classifier."""
        norm = getattr(self.backbone, "fc_norm", None)
        with self.precision():
            return features if norm is None else cast(Tensor, norm(features))

    def _predictions(self, tokens: Tensor) -> Tensor:
        backbone = self.backbone
        with self.precision():
            logits: Tensor = backbone.forward_head(tokens)  # type: ignore[operator]
        return logits.argmax(dim=1)
