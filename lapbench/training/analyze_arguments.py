"""The arguments of ``lapbench analyze``: those of ``lapbench evaluate --suite geometry``, in short."""

import argparse
import json
import sys
from collections.abc import Sequence

from lapbench.errors import ArgumentParser, UserError, positive
from lapbench.training.evaluate_arguments import Request, check, split, stock_arguments
from lapbench.training.suite import SUITE, Suite

NAME = "geometry"
DESCRIPTION = (
    "Measure the geometry of the tokens of a run, of any task, or of a timm model, write the numbers into the record "
    "and draw them in RUN/figures. Settings of the trainer may follow, such as --trainer.devices 8 "
    "--trainer.precision bf16-mixed; one process is the default."
)
EPILOG = (
    "Further settings of the measures follow as --geometry.KEY; those of a timm model and of its data as "
    "--model.backbone.KEY and --data.KEY. `lapbench compare` draws several runs in one picture."
)


def parse_request(argv: Sequence[str]) -> Request:
    """Reads the arguments.

    Returns:
        The request for ``evaluate`` that does what was asked for.

    Raises:
        UserError: An argument that there is not, or one that does not fit the others.
    """
    parser, stock = _parser()
    plain, settings = split(argv)
    if {"-h", "--help"} & {*plain}:
        sys.stdout.write(f"{parser.format_help()}\n{Suite([NAME]).help()}")
        raise SystemExit(0)
    options = parser.parse_args(plain)
    if other := [key for key in settings if key in SUITE and key != NAME]:
        raise UserError(f"{settings[other[0]][0]} is for `lapbench evaluate --suite {other[0]}`")
    given = [
        f"--{NAME}.{key}={value}"
        for key in ("layers", "max_samples", "measures", "split")
        if (value := getattr(options, key)) is not None
    ]
    options.suite, options.tasks = [NAME], None
    request = Request(options, {**settings, NAME: [*given, *settings.get(NAME, [])]})
    check(request, stock)
    return request


def _parser() -> tuple[ArgumentParser, argparse._ArgumentGroup]:
    """The parser, and its arguments for timm models."""
    parser = ArgumentParser(prog="lapbench analyze", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("what", metavar="RUN", help="folder of a run, or the name of a timm model")
    parser.add_argument("--layers", metavar="all|last|N,...", type=_layers, help="the first is 0 (default: all)")
    parser.add_argument("--max-samples", metavar="N", type=positive, help="take the first N samples (default: all)")
    parser.add_argument(
        "--measures", metavar="NAME,...", type=_names, help="anova,similarity,... (default: all that the model allows)"
    )
    parser.add_argument(
        "--split", choices=("auto", "val", "test"), help="auto is val, or test where there is none (default: auto)"
    )
    parser.add_argument("--ckpt", metavar="CKPT", help="last, best or a file (default: the one that the run declares)")
    parser.add_argument("--name", help="name in record and tables (default: geometry; with --ckpt geometry-CKPT)")
    return parser, stock_arguments(parser)


def _layers(value: str) -> str:
    """ "all", "last" or "0,5,11" as the setting reads it."""
    if value in ("all", "last"):
        return value
    parts = value.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected all, last or numbers such as 0,5,11, got {value!r}")
    return json.dumps([int(part) for part in parts])


def _names(value: str) -> str:
    """ "anova,similarity" as the setting reads it."""
    return json.dumps(value.split(","))
