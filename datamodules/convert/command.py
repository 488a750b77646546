"""What a subcommand of ``lapbench data`` consists of, and the options that several share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapbench.errors import UserError


@dataclass(frozen=True)
class Command:
    """A converter: a line and a description for the help, ``configure(parser)``, and ``run(arguments)``.

    ``run`` returns what is in ``arguments.out`` (a manifest, or one of the results that `report` knows) and whether the
    work was done already.
    """

    summary: str
    description: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[Any, bool]]


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``."""
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder to write shards and manifest.json into: new, empty, or that of an interrupted conversion, "
        "which goes on where it stopped",
    )


def add_source(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--source``."""
    parser.add_argument("--source", type=Path, required=True, metavar="PATH", help=help_text)


def add_texts(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--source`` for files of text."""
    parser.add_argument(
        "--source", nargs="+", required=True, metavar="FILES", help=f"{help_text}; quoted globs work as well"
    )


def add_shard_size(parser: argparse.ArgumentParser, default: int) -> None:
    """Add ``--shard-size``."""
    parser.add_argument(
        "--shard-size",
        type=positive,
        default=default,
        metavar="N",
        help="images in each shard; the last one of a split takes what is left (default: %(default)s)",
    )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def existing(path: Path) -> Path:
    """``path``, or a UserError if there is nothing."""
    if not path.exists():
        raise UserError(f"--source {path}: no such file or folder")
    return path
