"""Token geometry: how alike the tokens of a model are, within images or texts, within classes and between them."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lapbench.backbones import Decoder
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.evaluation.features import AT_ONCE
from lapbench.evaluation.geometry_data import GeometryData, batch_starts, choose_split
from lapbench.evaluation.geometry_measures import TOKENS_AT_ONCE, GeometryMeasures, Tokens, Unit, backbone_of
from lapbench.evaluation.geometry_report import GeometryReport, report, series
from lapbench.evaluation.geometry_settings import GeometrySettings, choose
from lapbench.evaluation.processes import Processes
from lapbench.figures import FIGURES, save_figure
from lapbench.figures.style import settings as figure_style
from lapbench.results.files import write_json

NAME = "geometry"
SECONDS = 10.0  # between two lines of progress


class TokenGeometry(Evaluation):
    """Measures the tokens of a backbone, layer by layer, and draws them: NAME/{within_sequence,similarity,nc1,...}.

    The section has the numbers of each layer; metrics are those of the last chosen layer. Figures and the numbers
    behind them go to RUN/figures (of another name than "geometry": RUN/figures/NAME). Measures:

    - ``anova``: fractions of the tokens' variance within_sequence, within_class and between_class
      (https://arxiv.org/abs/2602.09297, section 4.1). In language models a token's class is the token that follows, so
      there are two levels; of the last chosen layer only, as the sums of classes take 8 V D bytes.
    - ``similarity``: mean cosine of two tokens of a sequence.
    - ``spectrum``: eigenvalues of the tokens of a sequence about their mean, and k_alpha (last chosen layer).
    - ``collapse``: NC1 to NC4 (https://arxiv.org/abs/2106.02073). Those that compare with a classifier are of
      classification, if the last layer is chosen. NC4 needs the class means first: where a process would have to keep
      more than 2^26 numbers of its samples, the data are read once more.
    - ``pca``, ``simplex``, ``feature_maps``: figures of the last chosen layer, from its first samples.
    - ``sublayers``: within-sequence variance around attention and MLP, and what each kind of head does to it.

    Tokens are those that leave a block; the last block's are taken after the model's final norm. Of language models,
    ``similarity``, ``spectrum`` and ``sublayers`` count the windows that are predicted up to their end.

    Data are streamed once, each sample once, without augmentation. Neither their batches nor the number of processes
    change the numbers, but for rounding. The backbone runs in the run's precision, sums are float64.

    Args:
        measures: Which ones; null takes all that model and data allow, and the section says which do not apply.
        layers: "all", "last", or numbers of blocks from 0.
        max_samples: The first samples of the split to take; null takes all.
        split: "val", "test", or "auto": the validation split where there is one, else the test split.
        tokens: "all" of a sequence, as in the paper, or "patches", without class and register tokens. ``sublayers``
            counts all.
        unit: What stands for an image in ``collapse``: the "sequence mean" of these tokens or the "class token"; behind
            the norm that some models have between pooling and classifier.
        alpha: Fraction of the variance that k_alpha components hold.
        every_n_epochs: Measure also while training, in every n-th epoch, after validation (on its averaged weights
            where there are some). Logs NAME/..., and figures to TensorBoard. Null measures after training only.
        pictures: Whether to draw the figures; else only their numbers are written, which ``lapbench compare`` draws.
            Drawing takes longer than measuring in small runs.
        name: Its name in record and tables.

    Raises:
        UserError: A setting out of range, or one that model or data do not allow.
    """

    def __init__(
        self,
        measures: list[str] | None = None,
        layers: Literal["all", "last"] | list[int] = "all",
        max_samples: int | None = None,
        split: Literal["auto", "val", "test"] = "auto",
        tokens: Tokens = "all",
        unit: Unit = "sequence mean",
        alpha: float = 0.99,
        every_n_epochs: int | None = None,
        pictures: bool = True,
        name: str = NAME,
    ) -> None:
        super().__init__(name)
        self.settings = GeometrySettings(
            None if measures is None else tuple(measures),
            layers if isinstance(layers, str) else tuple(sorted(layers)),
            max_samples,
            split,
            tokens,
            unit,
            alpha,
            every_n_epochs,
            pictures,
        )
        self.settings.check(type(self).__name__)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            s, data = self.settings, trainer.datamodule  # type: ignore[attr-defined]
            choose(s, pl_module, data, type(self).__name__)
            split = choose_split(data, s.split, type(self).__name__)
            GeometryData(data, split, s.max_samples).predict_dataloader()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures while training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._while_training(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures while training, in runs that do not validate."""
        if not trainer.enable_validation:
            self._while_training(trainer, pl_module)

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Measures the run, and draws its figures."""
        run.data.setup()  # type: ignore[call-arg]
        data, measures, skipped = self._prepare(run.task, run.data, run.outer)
        self._pass(run, measures, data, second=False)
        measures.start_mismatch()
        if measures.needs_second_pass:
            self._pass(run, measures, data, second=True)
        found = report(measures, Processes.of(run.outer), _pixels(run.data))
        if run.outer.is_global_zero:
            self._draw(found, run)
        run.outer.strategy.barrier()
        return {
            "metrics": {f"{self.name}/{key}": value for key, value in found.metrics.items()},
            "settings": asdict(self.settings),
            "split": data.split,
            "samples": _samples(data),
            "layers": list(measures.chosen.layers),
            **found.found,
            "left_out": {**skipped, **found.left_out},
            "figures": sorted(found.figures),
        }

    def _pass(self, run: FinishedTraining, measures: GeometryMeasures, data: GeometryData, second: bool) -> None:
        run.trainer().predict(_Reading(measures, data, second), datamodule=data, return_predictions=False)
        # The trainer leaves them on the CPU, where processes on GPUs cannot merge them.
        measures.to(run.outer.strategy.root_device)

    def _draw(self, found: GeometryReport, run: FinishedTraining) -> None:
        folder = figures_folder(run.folder.parents[1], self.name)
        base = series(backbone_of(run.task), run.seed)
        for leftover in folder.glob(".*.tmp"):  # of a start that was killed
            leftover.unlink()
        for name, fields in found.figures.items():
            data = {"figure": name, "series": [{**base, **fields}]}
            if self.settings.pictures:
                save_figure(folder, name, data)
                continue
            for suffix in ("png", "svg"):  # of other numbers
                (folder / f"{name}.{suffix}").unlink(missing_ok=True)
            write_json(folder / f"{name}.json", data)
        print(f"{self.name}: {'figures' if self.settings.pictures else 'data of figures'} in {folder}", file=sys.stderr)

    def _while_training(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        every = self.settings.every_n_epochs
        if every is None or (trainer.current_epoch + 1) % every:
            return
        data, measures, _ = self._prepare(task, trainer.datamodule, trainer)  # type: ignore[attr-defined]
        device = trainer.strategy.root_device
        measures.to(device)
        with _evaluating(backbone_of(task)):
            self._read(measures, data, device, trainer, second=False)
            measures.start_mismatch()
            if measures.needs_second_pass:
                self._read(measures, data, device, trainer, second=True)
        found = report(measures, Processes.of(trainer), _pixels(data.data))
        metrics = {f"{self.name}/{key}": value for key, value in found.metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
            if self.settings.pictures and isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                base = series(backbone_of(task), None)
                for name, fields in found.figures.items():
                    with figure_style():
                        figure = FIGURES[name]({"figure": name, "series": [{**base, **fields}]})
                        logger.experiment.add_figure(f"{self.name}/{name}", figure, trainer.global_step)

    def _read(
        self, measures: GeometryMeasures, data: GeometryData, device: torch.device, trainer: pl.Trainer, second: bool
    ) -> None:
        """A pass over the data beside the trainer's own loops, which stay where they are."""
        loader = data.predict_dataloader()
        said = time.monotonic()
        for number, (first, batch) in enumerate(zip(batch_starts(loader), loader, strict=True), 1):
            _add(measures, data.on_after_batch_transfer(move_data_to_device(batch, device), 0), first, second)
            if trainer.is_global_zero and time.monotonic() - said > SECONDS:
                said = time.monotonic()
                print(f"{self.name}: batch {number}/{len(loader)}", file=sys.stderr, flush=True)

    def _prepare(
        self, task: pl.LightningModule, source: Any, trainer: pl.Trainer
    ) -> tuple[GeometryData, GeometryMeasures, dict[str, str]]:
        """The data, what measures them, and why some measures do not apply."""
        s = self.settings
        chosen, skipped = choose(s, task, source, type(self).__name__)
        data = GeometryData(source, choose_split(source, s.split, type(self).__name__), s.max_samples)
        plan = data.predict_dataloader().stream.plan
        is_text = isinstance(task.backbone, Decoder)
        measures = GeometryMeasures(
            task,
            chosen,
            source.vocab_size if is_text else source.num_classes,
            samples=-(-plan.samples // plan.world_size),
            at_once=min(
                AT_ONCE, source.eval_batch_size, max(1, TOKENS_AT_ONCE // source.context) if is_text else AT_ONCE
            ),
            precision=trainer.precision_plugin.forward_context,
        )
        return data, measures, skipped


def figures_folder(run: Path, name: str = NAME) -> Path:
    """Where the figures of a run's ``TokenGeometry`` of that name are."""
    return run / "figures" if name == NAME else run / "figures" / name


class _Reading(pl.LightningModule):
    """A pass over the data. The backbone is no module of it: it stays as and where it is."""

    def __init__(self, measures: GeometryMeasures, data: GeometryData, second: bool) -> None:
        super().__init__()
        self.measures, self.second = measures, second
        self._data, self._starts = (data,), list[int]()

    def on_predict_start(self) -> None:
        self._starts = batch_starts(self._data[0].predict_dataloader())

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return _add(self.measures, batch, self._starts[batch_idx], self.second)


def _add(measures: GeometryMeasures, batch: Any, first: int, second: bool) -> int:
    """Adds a batch on its device; how many samples it has."""
    inputs, labels, *keys = batch
    if second:
        measures.update_mismatch(inputs)
    else:
        measures.update(inputs, labels, first, *keys)
    return len(inputs)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, each of its parts as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _samples(data: GeometryData) -> int:
    return data.predict_dataloader().stream.plan.samples


def _pixels(data: Any) -> tuple[Any, Any]:
    """What images are normalised by; text has nothing of the kind."""
    return getattr(data, "mean", (0.0,)), getattr(data, "std", (1.0,))
