"""``lapbench evaluate``: evaluations of a run that is there already, written into its record."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lapbench.errors import ArgumentParser, UserError
from lapbench.evaluation import LanguageEvaluation
from lapbench.evaluation.after_fit import AfterFit, join_processes
from lapbench.evaluation.language import TASKS
from lapbench.process import lock_folder
from lapbench.results.record import read_record, write_record
from lapbench.training.parser import CLI
from lapbench.training.run_folder import CONFIG

# One process on what this machine has, unless --trainer... says otherwise; the run's weights are all in its checkpoint.
_HERE = (
    *("--trainer.accelerator", "auto", "--trainer.devices", "1", "--trainer.num_nodes", "1"),
    *("--trainer.strategy", "auto", "--trainer.callbacks", "null"),
    *("--model.backbone", "{weights: null, compile: false}"),
)


def parse_request(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of ``lapbench evaluate``; ``trainer`` are those that the trainer gets.

    Raises:
        UserError: An argument that there is not, or a value out of range.
    """
    parser = ArgumentParser(
        prog="lapbench evaluate",
        description="Evaluate the model of a run and write the scores into its record. Settings of the trainer may "
        "follow, such as --trainer.devices 8 --trainer.precision bf16-mixed; one process is the default.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--ckpt", metavar="CKPT", help="last, best or a file (default: the one that the run declares)")
    parser.add_argument("--name", help="name in record and tables (default: language; with --ckpt language-CKPT)")
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--tasks", metavar="TASK,...", type=_names, required=True, help=f"some of {','.join(TASKS)}, or all"
    )
    language.add_argument(
        "--data-dir", metavar="DIR", help="folder with a folder of local files for each task (default: load the hub's)"
    )
    language.add_argument(
        "--scoring", choices=("letters", "harness"), default="letters", help="of multiple choice (default: letters)"
    )
    language.add_argument("--chat", action="store_true", help="for models fine-tuned on conversations")
    language.add_argument("--limit", metavar="N", type=_number, help="take the first N questions of each task")
    language.add_argument(
        "--samples", metavar="N", type=_number, default=10, help="answers to each question of HumanEval (default: 10)"
    )
    language.add_argument(
        "--k", metavar="K,...", type=_numbers, default=[1, 10], help="the k of pass@k (default: 1,10)"
    )
    language.add_argument("--temperature", type=float, default=0.8, help="of these answers (default: 0.8)")
    language.add_argument(
        "--max-new-tokens", metavar="N", type=_number, default=512, help="of a generated answer (default: 512)"
    )
    language.add_argument(
        "--batch-size", metavar="N", type=_number, default=16, help="sequences in a batch (default: 16)"
    )
    language.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the programs that the model writes for HumanEval, in processes with little time, memory and rights; "
        "a guard, no security boundary",
    )
    request, rest = parser.parse_known_args(argv)
    for argument in rest:
        if argument.startswith("-") and not argument.startswith("--trainer."):
            parser.error(f"unrecognized arguments: {argument}")
    request.trainer = rest
    return request


def evaluations_of(request: argparse.Namespace) -> list[LanguageEvaluation]:
    """The evaluations that were asked for.

    Raises:
        UserError: Settings out of range.
    """
    name = request.name or ("language" if request.ckpt is None else f"language-{_slug(request.ckpt)}")
    return [
        LanguageEvaluation(
            tasks=request.tasks,
            data_dir=request.data_dir,
            scoring=request.scoring,
            chat=request.chat,
            limit=request.limit,
            samples=request.samples,
            k=request.k,
            temperature=request.temperature,
            max_new_tokens=request.max_new_tokens,
            batch_size=request.batch_size,
            allow_code_execution=request.allow_code_execution,
            name=name,
        )
    ]


def cli_arguments(request: argparse.Namespace) -> list[str]:
    """The run's own configuration as arguments of ``CLI``.

    Raises:
        UserError: The folder holds no run.
    """
    file = request.run / CONFIG
    if not file.is_file():
        raise UserError(f"{request.run}: expected the folder of a run, it has no {CONFIG}")
    read_record(request.run)
    return ["--config", str(file), "--run.dir", str(request.run), *_HERE, *request.trainer]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps ``lapbench fit`` out of the folder; by the first process only, as the others belong to it."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        yield
        return
    with lock_folder(folder, "another `lapbench fit` or `evaluate`"):
        yield


def evaluate_run(cli: CLI, request: argparse.Namespace, evaluations: Sequence[LanguageEvaluation]) -> list[str]:
    """Runs ``evaluations`` and writes each into the record; those of a run that is not trained yet only as sections.

    Returns:
        The names of those that failed.

    Raises:
        UserError: No such checkpoint, or something that an evaluation needs is missing.
    """
    folder, trainer = cli.run_folder, cli.trainer
    checkpoint = folder.checkpoint_to_score(request.ckpt)
    assert folder.path is not None
    assert checkpoint is not None  # as there is a folder
    for evaluation in evaluations:
        evaluation.check(cli.model, cli.datamodule)
    join_processes(trainer)
    choice = request.ckpt or folder.evaluated_checkpoint
    after = AfterFit(trainer, cli.model, cli.datamodule, cli.config.seed_everything, folder.path, checkpoint, choice)
    metrics: dict[str, float] = {}

    def keep(name: str, section: dict[str, Any]) -> None:
        metrics.update(section.get("metrics", {}))
        if trainer.is_global_zero and "error" not in section:  # a failure replaces no scores
            _write(Path(request.run), name, section)

    failed = after.run(evaluations, keep)
    if trainer.is_global_zero:
        sys.stdout.write(json.dumps(metrics, indent=2) + "\n")
    return failed


def _write(folder: Path, name: str, section: dict[str, Any]) -> None:
    record = read_record(folder)
    metrics = record.metrics
    if record.checkpoint is not None:  # else the weights are not the run's last ones
        metrics = {key: value for key, value in metrics.items() if not key.startswith(f"{name}/")}
        metrics |= section.get("metrics", {})
    write_record(folder, replace(record, metrics=metrics, evaluations={**record.evaluations, name: section}))


def _slug(checkpoint: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in Path(checkpoint).stem.lower())


def _names(value: str) -> list[str]:
    return list(TASKS) if value == "all" else value.split(",")


def _number(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value!r}")
    return int(value)


def _numbers(value: str) -> list[int]:
    return [_number(part) for part in value.split(",")]
