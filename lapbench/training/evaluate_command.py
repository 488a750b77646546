"""``lapbench evaluate RUN``: evaluations of a run that is there already, written into its record."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lapbench.evaluation import Evaluation
from lapbench.evaluation.after_fit import FOLDER, AfterFit, join_processes
from lapbench.process import lock_folder
from lapbench.results.files import write_atomically
from lapbench.results.record import read_record, write_record
from lapbench.training.evaluate_arguments import Request
from lapbench.training.existing_run import run_arguments
from lapbench.training.parser import CLI

_REQUEST = "request.json"


def cli_arguments(request: Request) -> list[str]:
    """The run's own configuration as arguments of ``CLI``, with the trainer's that were given.

    Raises:
        UserError: The folder holds no run.
    """
    assert request.run is not None
    arguments = run_arguments(request.run)
    read_record(request.run)
    return [*arguments, *request.of("trainer")]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps ``lapbench fit`` out of the folder; by the first process only, as the others belong to it."""
    if _rank() != 0:
        yield
        return
    with lock_folder(folder, "another `lapbench fit` or `evaluate`"):
        yield


def evaluate_run(cli: CLI, request: Request, evaluations: Sequence[Evaluation]) -> list[str]:
    """Runs ``evaluations`` and writes each into the record; those of a run that is not trained yet only as sections.

    Returns:
        The names of those that failed.

    Raises:
        UserError: No such checkpoint, or something that an evaluation needs is missing.
    """
    folder, trainer = cli.run_folder, cli.trainer
    ckpt = request.options.ckpt
    checkpoint = folder.checkpoint_to_score(ckpt)
    run = folder.path
    assert run is not None
    assert checkpoint is not None  # as there is a folder
    trainer.datamodule = cli.datamodule  # type: ignore[attr-defined]
    if request.options.suite:  # which look at the data
        if _rank() == 0:
            cli.datamodule.prepare_data()
        cli.datamodule.setup()
    for evaluation in evaluations:
        evaluation.setup(trainer, cli.model, "fit")  # says now what would only be found out later
    if request.options.suite and _rank() == 0:
        _clear_others(run, evaluations, request, checkpoint)
    join_processes(trainer)
    choice = ckpt or folder.evaluated_checkpoint
    after = AfterFit(trainer, cli.model, cli.datamodule, cli.config.seed_everything, run, checkpoint, choice)
    metrics: dict[str, float] = {}

    def keep(name: str, section: dict[str, Any]) -> None:
        metrics.update(section.get("metrics", {}))
        if trainer.is_global_zero and "error" not in section:  # a failure replaces no scores
            _write(run, name, section)

    failed = after.run(evaluations, keep)
    if trainer.is_global_zero:
        print_metrics(metrics)
    return failed


def print_metrics(metrics: dict[str, float]) -> None:
    """Prints ``metrics`` as JSON."""
    sys.stdout.write(json.dumps(metrics, indent=2) + "\n")


def _rank() -> int:
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank


def _clear_others(run: Path, evaluations: Sequence[Evaluation], request: Request, checkpoint: Path) -> None:
    """Removes what evaluations of the same names left behind, unless they were asked for in the same way.

    An evaluation goes on from its own files: those of other settings or weights would be taken for its own.
    """
    status = checkpoint.stat()
    content = json.dumps({"settings": request.settings, "checkpoint": [status.st_size, status.st_mtime_ns]})
    for evaluation in evaluations:
        folder = run / FOLDER / evaluation.name
        mark = folder / _REQUEST
        if mark.is_file() and mark.read_text(encoding="utf-8") == content:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(mark, content)


def _write(folder: Path, name: str, section: dict[str, Any]) -> None:
    record = read_record(folder)
    metrics, checkpoint = record.metrics, record.checkpoint
    if record.status == "finished":  # also one that scored nothing by itself
        checkpoint = checkpoint or section["checkpoint"]
    if checkpoint is not None:  # else the weights are not the run's last ones
        metrics = {key: value for key, value in metrics.items() if not key.startswith(f"{name}/")}
        metrics |= section.get("metrics", {})
    sections = {**record.evaluations, name: section}
    write_record(folder, replace(record, metrics=metrics, checkpoint=checkpoint, evaluations=sections))
