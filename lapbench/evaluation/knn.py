"""Weighted k nearest neighbours: how well a frozen backbone's tokens tell classes apart with nothing trained."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lapbench.backbones import VisionBackbone
from lapbench.datamodules.images import ImageShards, Part
from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.evaluation.features import AT_ONCE, image_token, last_tokens
from lapbench.evaluation.plain_data import PlainData
from lapbench.evaluation.processes import Processes

TOPS = (1, 5)
Batch = tuple[Tensor, Tensor, list[str]]


@dataclass(frozen=True)
class NeighborSettings:
    """The settings of ``NearestNeighbors``, as its section in the record shows them."""

    k: tuple[int, ...]
    report_k: int
    temperature: float
    split: Literal["val", "test"]
    database_device: Literal["auto", "cpu"]


class NearestNeighbors(Evaluation):
    """Classifies images by their neighbours in the training split: NAME/{top1,top5} and NAME/{top1,top5}_k10, ...

    The weighted vote of Wu et al. 2018 (https://arxiv.org/abs/1805.01978, section 3.4) as DINO uses it (Caron et al.
    2021, https://arxiv.org/abs/2104.14294). An image is its class token, or the mean of its patch tokens in models
    without one, after the last block and the model's final norm, divided by its length. Each of the k training samples
    with the largest cosine s votes for its class with weight exp(s / temperature). Training samples are those that
    training draws from, without augmentation.

    Of neighbours equally near, the first in the order of the training split count; of classes with equal votes the
    lower number goes first; a class without votes is not among the five. Votes are float64, cosines float32 in matrix
    products of one shape, so processes and restarts change no bit of the scores (with ``data.reader stream`` and
    several workers, equally near neighbours may come in another order).

    Each process holds the whole database, 4 bytes a number: 2.0 GB for ImageNet and 384 numbers an image.

    Args:
        k: Numbers of neighbours, each of which gives its scores.
        report_k: Which of them NAME/top1 and NAME/top5 are of; DINO's tables have 20.
        temperature: Of the weights.
        split: What is classified: "val" or "test".
        database_device: Where the training samples' features lie and are searched: "auto" is the run's device.
        name: Its name in record and tables.

    Raises:
        UserError: A setting out of range, a split that the data do not have, more neighbours than training samples.
    """

    def __init__(
        self,
        k: tuple[int, ...] = (10, 20, 100, 200),
        report_k: int = 20,
        temperature: float = 0.07,
        split: Literal["val", "test"] = "test",
        database_device: Literal["auto", "cpu"] = "auto",
        name: str = "knn",
    ) -> None:
        super().__init__(name)
        k = tuple(k)
        for setting, value, good, expected in (
            ("k", k, k and min(k) >= 1 and len(set(k)) == len(k), "different numbers of at least 1"),
            ("report_k", report_k, report_k in k, f"one of k {k}"),
            ("temperature", temperature, temperature > 0, "above 0"),
        ):
            if not good:
                raise UserError(f"{type(self).__name__}.{setting}: expected {expected}, got {value}")
        self.settings = NeighborSettings(k, report_k, temperature, split, database_device)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            data = self._check(trainer.datamodule)  # type: ignore[attr-defined]
            self._check_k(data.samples_of("train"))

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Embeds the training split, then classifies ``split``."""
        s, data = self.settings, self._check(run.data)
        embedding = _Embedding(cast(VisionBackbone, run.task.backbone))
        processes = Processes.of(run.outer)
        parts = zip(*_predict(run, embedding, data, "train"), strict=True)
        features, labels = (processes.cat(torch.cat(part)) for part in parts)
        self._check_k(len(labels))
        device = run.outer.strategy.root_device if s.database_device == "auto" else torch.device("cpu")
        database = Database(features.to(device), labels.to(device), data.num_classes)
        counted = _predict(run, _Classification(embedding, database, s), data, s.split)
        hits_of_all = processes.cat(torch.stack(counted)).sum(0)
        queries = data.samples_of(s.split)
        metrics = {
            f"{self.name}/top{top}_k{k}": int(count) / queries
            for k, of_k in zip(s.k, hits_of_all, strict=True)
            for top, count in zip(TOPS, of_k, strict=True)
        }
        reported = {f"{self.name}/top{top}": metrics[f"{self.name}/top{top}_k{s.report_k}"] for top in TOPS}
        return {
            "metrics": {**reported, **metrics},
            "settings": asdict(s),
            "samples": {"database": len(labels), s.split: queries},
        }

    def _check(self, data: object) -> ImageShards:
        s, me = self.settings, type(self).__name__
        if not isinstance(data, ImageShards):
            raise UserError(f"{me}: expected images with labels, got {type(data).__name__}")
        if s.split == "val" and not data.val_fraction and data.val_split is None:
            raise UserError(
                f"{me}.split val: {type(data).__name__} has no validation split: "
                "hold one out with data.val_fraction > 0, or classify split test"
            )
        return data

    def _check_k(self, samples: int) -> None:
        k = max(self.settings.k)
        if k > samples:
            raise UserError(
                f"{type(self).__name__}.k: expected at most the {samples} samples that training draws from, got {k}"
            )


@dataclass(frozen=True)
class Database:
    """What queries are compared with.

    Attributes:
        features: Of unit length, [N, D] float32.
        labels: [N] int64.
        num_classes: Number of classes C.
    """

    features: Tensor
    labels: Tensor
    num_classes: int

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest neighbours, nearest first, equally near ones in the order of the database.

        Args:
            queries: Of unit length, [Q, D].
            k: At most N.

        Returns:
            Cosines and places in the database, [Q, k] both.
        """
        cosines = queries @ self.features.T
        least = cosines.topk(k).values[:, -1:]
        nearer, at_edge = cosines > least, cosines == least
        # topk takes any of those at the edge: take the first ones.
        room = k - nearer.sum(1, keepdim=True, dtype=torch.int32)
        chosen = nearer | (at_edge & (at_edge.cumsum(1, dtype=torch.int32) <= room))
        places = chosen.nonzero()[:, 1].view(len(queries), k)
        ordered = cosines.gather(1, places).sort(dim=1, descending=True, stable=True)
        return ordered.values, places.gather(1, ordered.indices)

    def votes(self, queries: Tensor, k: tuple[int, ...], temperature: float) -> Tensor:
        """The votes of each class, [len(k), Q, C] float64, of queries of unit length, [Q, D]."""
        cosines, places = self.nearest(queries, max(k))
        weights, labels = (cosines.double() / temperature).exp(), self.labels[places]
        votes = torch.zeros(len(queries), self.num_classes, dtype=torch.float64, device=queries.device)
        rows = torch.arange(len(queries), device=queries.device)
        of_k = {}
        # One after the other: sums in a fixed order, on any device.
        for count in range(1, max(k) + 1):
            votes[rows, labels[:, count - 1]] += weights[:, count - 1]
            if count in k:
                of_k[count] = votes.clone()
        return torch.stack([of_k[count] for count in k])


def hits(votes: Tensor, labels: Tensor) -> Tensor:
    """How many queries have their own class among those with the most votes.

    Args:
        votes: [..., Q, C].
        labels: [Q].

    Returns:
        [..., 2] int64: for each of ``TOPS``, how many have it among that many classes.
    """
    own = labels.view(-1, 1).expand(*votes.shape[:-1], 1)
    of_own = votes.gather(-1, own)
    lower = torch.arange(votes.size(-1), device=votes.device) < own
    ahead = ((votes > of_own) | ((votes == of_own) & lower)).sum(-1)
    voted = of_own.squeeze(-1) > 0
    return torch.stack([((ahead < top) & voted).sum(-1) for top in TOPS], dim=-1)


def _predict(run: FinishedTraining, module: pl.LightningModule, data: ImageShards, part: Part) -> list[Any]:
    """What ``module`` says of each batch of this process's share."""
    return cast("list[Any]", run.trainer().predict(module, datamodule=PlainData(data, part)))


class _Embedding(pl.LightningModule):
    """Features of unit length. The backbone is no module of it: it stays as and where it is."""

    def __init__(self, backbone: VisionBackbone) -> None:
        super().__init__()
        self._backbone = (backbone,)

    def forward(self, images: Tensor) -> Tensor:
        """[B, D] in float32 of images [B, C, H, W]."""
        (backbone,) = self._backbone
        (tokens,) = last_tokens(backbone, images)
        return nn.functional.normalize(image_token(backbone, tokens).float(), dim=1)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        images, labels, _ = batch
        return self(images), labels


class _Classification(pl.LightningModule):
    """Counts the hits of batches of queries, [len(k), 2]."""

    def __init__(self, embedding: _Embedding, database: Database, settings: NeighborSettings) -> None:
        super().__init__()
        self.embedding = embedding
        self.database = database
        self.settings = settings

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, _ = batch
        device = self.database.features.device
        queries, labels = self.embedding(images).to(device), labels.to(device)
        counted = []
        for piece, of_piece in zip(torch.split(queries, AT_ONCE), torch.split(labels, AT_ONCE), strict=True):
            padded = nn.functional.pad(piece, (0, 0, 0, AT_ONCE - len(piece)))
            votes = self.database.votes(padded, self.settings.k, self.settings.temperature)
            counted.append(hits(votes[:, : len(piece)], of_piece))
        return torch.stack(counted).sum(0)
