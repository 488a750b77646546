"""The commands fit, validate, test, predict, generate, evaluate and analyze."""

import errno
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lapbench.errors import UserError
from lapbench.evaluation.after_fit import evaluations_of, join_processes, missing
from lapbench.process import children_die_with_this_process, die_with_parent
from lapbench.results.record import read_record, write_record
from lapbench.training import analyze_arguments, evaluate_command
from lapbench.training.evaluate_arguments import Request
from lapbench.training.evaluate_arguments import parse_request as parse_evaluation
from lapbench.training.evaluating import evaluate_after_fit
from lapbench.training.generating import cli_arguments, parse_request, written
from lapbench.training.parser import CLI
from lapbench.training.predictions import PredictionWriter
from lapbench.training.recording import RecordWriter
from lapbench.training.stock_model import fit_arguments, normalization_note
from lapbench.training.stop_signals import INTERRUPTED, Interrupted

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
_EXPECTED_WARNINGS: dict[str, type[Warning]] = {
    ".*does not have many workers": UserWarning,  # tiny data sets are fastest without
    ".*is smaller than the logging interval": UserWarning,
    "Checkpoint directory .* exists and is not empty": UserWarning,  # a resumed run's
    # A task without labels has no score to validate, a frozen backbone nothing to optimize.
    ".*have no `validation_step`": UserWarning,
    ".*this fit will run with no optimizer": UserWarning,
    ".*callbacks used to create the checkpoint need to be provided": UserWarning,  # scoring needs none of them
    # Each process's clock sees the whole step: the first one's speaks for all.
    ".*'train/(samples_per_second|tokens_per_second|mfu)'.*sync_dist=True": UserWarning,
    ".*in eval mode at the start of training": UserWarning,  # a frozen backbone
    ".*LeafSpec": FutureWarning,  # Lightning's own use of torch
}


def fit(argv: Sequence[str]) -> int:
    """``lapbench fit``: trains, tests the declared checkpoint, then runs the evaluations of the config.

    Returns:
        0, 1 when an evaluation failed, or 75 when interrupted.
    """
    die_with_parent()
    # Lightning starts a process for each further device: they end with this one, however it ends.
    with _user_errors(), children_die_with_this_process():
        cli = _parse("fit", argv)
        try:
            return _fit(cli)
        finally:
            cli.run_folder.release()


def _fit(cli: CLI, folder_option: str = "--run.dir") -> int:
    folder, trainer = cli.run_folder, cli.trainer
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    writer = next(c for c in callbacks if isinstance(c, RecordWriter))
    evaluations = evaluations_of(callbacks)
    todo = missing(evaluations, folder.previous)
    trained = bool(evaluations) and folder.trained  # then only evaluations are left
    if folder.finished and not todo:
        _say(cli, f"{folder.path}: this run has finished already; its results are in record.json")
        return 0
    last = folder.last_checkpoint
    doing = "evaluating" if trained or trainer.max_epochs == 0 else "training"
    _say(cli, f"{doing} in {folder.path}{' from its last checkpoint on' if last else ''}")
    cli.stop_signals.install()
    try:
        metrics: dict[str, float] = {}
        if trained:
            join_processes(trainer)
            writer.resume(trainer)
        else:
            trainer.fit(cli.model, cli.datamodule, ckpt_path=last, weights_only=True)
            if trainer.max_epochs == 0 and last is None:  # no epoch's end has saved the initial weights
                trainer.save_checkpoint(folder.checkpoint_file("last"))
            choice = folder.settings.test
            metrics = {} if choice == "none" else _score(cli, "test", folder.checkpoint_file(choice))
            scored = choice != "none" or bool(todo)
            writer.trained(trainer, metrics, folder.evaluated_checkpoint if scored else None)
        failed = evaluate_after_fit(cli, writer, todo) if todo else []
        writer.finish(trainer)
    except Interrupted as stop:
        _say(cli, f"interrupted; the same command with {folder_option} {folder.path} goes on")
        _leave_group(wait=stop.together)
        return INTERRUPTED if _tells_its_status(trainer) else 0
    _say(cli, f"finished: {folder.path}  {_show(metrics)}".rstrip())
    _leave_group(wait=True)
    return 1 if failed and _tells_its_status(trainer) else 0


def _say(cli: CLI, text: str) -> None:
    if cli.trainer.is_global_zero:
        print(text, file=sys.stderr)


def _tells_its_status(trainer: Trainer) -> bool:
    """Whether this process may end with another status than 0.

    Not if Lightning started it for another device: that would have the first one killed.
    """
    environment = trainer._accelerator_connector.cluster_environment
    return trainer.is_global_zero or not isinstance(environment, LightningEnvironment)


def _leave_group(wait: bool) -> None:
    """Take leave of the run's other processes: just ending can make them, or this one, abort."""
    if dist.is_available() and dist.is_initialized():
        if wait:
            dist.barrier()
        dist.destroy_process_group()


def validate(argv: Sequence[str]) -> int:
    """``lapbench validate``: prints the metrics of the validation split as JSON."""
    return _evaluate("validate", argv)


def test(argv: Sequence[str]) -> int:
    """``lapbench test``: prints the metrics of the test split as JSON."""
    return _evaluate("test", argv)


def predict(argv: Sequence[str]) -> int:
    """``lapbench predict``: writes predictions.csv for the test split."""
    with _user_errors():
        cli = _parse("predict", argv)
        if not is_overridden("predict_step", cli.model):
            raise UserError(f"predict: expected an image classifier, got a run of {type(cli.model).__name__}")
        file = (cli.run_folder.path or Path()) / "predictions.csv"
        writer = PredictionWriter(file)
        cli.trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        cli.trainer.predict(
            cli.model,
            cli.datamodule,
            return_predictions=False,
            ckpt_path=cli.run_folder.checkpoint_to_score(cli.config.ckpt_path),
            weights_only=True,
        )
        print(f"{writer.count} predictions: {file}", file=sys.stderr)
    return 0


def generate(argv: Sequence[str]) -> int:
    """``lapbench generate``: prints what the language model of a run writes after each prompt."""
    request = parse_request(argv)
    with _user_errors():
        print("\n---\n".join(written(_parse("generate", cli_arguments(request)), request)))
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """``lapbench evaluate``: evaluates a run or a timm model, keeps the scores in a record, prints them as JSON.

    Returns:
        0, 1 when an evaluation failed, or 75 when interrupted.
    """
    return _measure(parse_evaluation(argv))


def analyze(argv: Sequence[str]) -> int:
    """``lapbench analyze``: measures and draws the token geometry of a run or a timm model, as ``evaluate`` would.

    Returns:
        0, 1 when it failed, or 75 when interrupted.
    """
    return _measure(analyze_arguments.parse_request(argv))


def _measure(request: Request) -> int:
    evaluations = request.evaluations()
    die_with_parent()
    with _user_errors(), children_die_with_this_process():
        if request.run is None:
            return _evaluate_model(request)
        arguments = evaluate_command.cli_arguments(request)
        with evaluate_command.locked(request.run):
            cli = _parse("evaluate", arguments)
            failed = evaluate_command.evaluate_run(cli, request, evaluations)
        _leave_group(wait=True)
        return 1 if failed and _tells_its_status(cli.trainer) else 0


def _evaluate_model(request: Request) -> int:
    """A run of 0 epochs, whose evaluations ``fit`` resumes like any other's."""
    cli = _parse("fit", fit_arguments(request), name=request.options.what)
    try:
        if (note := normalization_note(cli.model.settings, cli.datamodule)) is not None:
            cli.run_folder.notes["normalization"] = note
            _say(cli, f"note: {note}")
        status = _fit(cli, "--out")
        folder = cli.run_folder.path
        assert folder is not None
        if status != INTERRUPTED and cli.trainer.is_global_zero:
            evaluate_command.print_metrics(read_record(folder).metrics)
        return status
    finally:
        cli.run_folder.release()


def _evaluate(command: str, argv: Sequence[str]) -> int:
    with _user_errors():
        cli = _parse(command, argv)
        folder = cli.run_folder
        checkpoint = folder.checkpoint_to_score(cli.config.ckpt_path)
        metrics = _score(cli, command, checkpoint)
        if not cli.trainer.is_global_zero:
            return 0
        if folder.path is not None and folder.previous is not None:
            # Beside the run's own metrics, not over them: tables show the checkpoint that the run declared.
            section = {"checkpoint": str(checkpoint), "metrics": metrics}
            evaluations = {**folder.previous.evaluations, command: section}
            write_record(folder.path, replace(folder.previous, evaluations=evaluations))
        print(json.dumps(metrics, indent=2))
    return 0


def _score(cli: CLI, command: str, checkpoint: Path | None) -> dict[str, float]:
    run = cli.trainer.validate if command == "validate" else cli.trainer.test
    results = run(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False, weights_only=True)
    return {name: float(value) for result in results for name, value in result.items()}


def _parse(command: str, argv: Sequence[str], name: str | None = None) -> CLI:
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)  # its remarks would stand around an error's one line
    for message, category in _EXPECTED_WARNINGS.items():
        warnings.filterwarnings("ignore", message, category)
    return CLI(command, argv, name)


def _show(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turns a full disk, a read-only folder and Lightning's own complaints about settings into one line."""
    previous, threading.excepthook = threading.excepthook, _thread_error
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(" ".join(str(error).split())) from error
    except OSError as error:
        if error.errno not in _FULL_OR_READ_ONLY:
            raise
        raise UserError(f"cannot write {error.filename or 'the run folder'}: {error.strerror}") from error
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise UserError(f"the checkpoint is of another model: {' '.join(str(error).split())[:250]}") from error
    finally:
        threading.excepthook = previous


def _thread_error(error: threading.ExceptHookArgs) -> None:
    # TensorBoard writes in a thread of its own; training meets the same error at its next event, and reports it.
    if not (isinstance(error.exc_value, OSError) and error.exc_value.errno in _FULL_OR_READ_ONLY):
        threading.__excepthook__(error)
