"""The ``lapbench`` command: finds what a command needs, and imports nothing else."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from lapbench import __version__
from lapbench.errors import UserError


class Command(NamedTuple):
    """Where a command lives, and its line in ``lapbench --help``."""

    target: str
    help: str


COMMANDS: dict[str, Command] = {
    "fit": Command("lapbench.training.commands:fit", "train a model, then test it; resumes an unfinished run"),
    "validate": Command("lapbench.training.commands:validate", "score a run's checkpoint on the validation split"),
    "test": Command("lapbench.training.commands:test", "score a run's checkpoint on the test split"),
    "predict": Command("lapbench.training.commands:predict", "write a run's predictions for the test split"),
    "generate": Command("lapbench.training.commands:generate", "let a run's language model continue texts"),
    "evaluate": Command(
        "lapbench.training.commands:evaluate",
        "measure a run, or any timm model: linear probe, k-NN, segmentation, language",
    ),
    "data": Command("lapbench.datamodules.convert:main", "convert a data set to WebDataset shards"),
    "sweep": Command("lapbench.sweeps.launch:main", "train every cell of a grid: schedules x seeds x anything"),
    "table": Command("lapbench.results.table:main", "print the leaderboard of a folder of runs"),
    "compare": Command("lapbench.figures.compare:main", "draw the figures of several runs in one picture each"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lapbench <command> [options]",
            "",
            "Benchmark of Laplacian heads and other ways of steering token smoothing in transformers.",
            "",
            "commands:",
            *lines,
            "",
            "Each command explains its options with --help. An error that you can mend is one line, exit status 2.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 done, 1 a run failed, 2 bad input, 75 interrupted, start again."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except UserError as error:
        print(f"lapbench: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `lapbench table DIR | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        return 141
    return status


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"lapbench {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}{_did_you_mean(name)}")
    module, function = COMMANDS[name].target.split(":")
    status: int = getattr(_import(module), function)(rest)
    return status


def _import(name: str) -> ModuleType:
    """Imports a module without collecting garbage: of the million objects that torch brings, all stay.

    Looking through them again and again takes a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if enabled:
            gc.enable()


def _did_you_mean(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
