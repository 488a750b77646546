"""``lapbench data``: data sets to WebDataset shards with a manifest; images with masks, conversations, tokenizers.

A new data set is one `Command` in `COMMANDS`.
"""

import sys

from lapbench.datamodules.convert import (
    ade20k,
    chat,
    cifar,
    digits,
    fineweb_edu,
    imagenet,
    index,
    pydocs,
    shapes,
    tokenizer,
)
from lapbench.datamodules.convert.command import Command
from lapbench.datamodules.convert.report import report
from lapbench.errors import ArgumentParser

COMMANDS: dict[str, Command] = {
    "digits": digits.COMMAND,
    "cifar10": cifar.COMMANDS["cifar10"],
    "cifar100": cifar.COMMANDS["cifar100"],
    "imagenet": imagenet.COMMAND,
    "ade20k": ade20k.COMMAND,
    "shapes": shapes.COMMAND,
    "index": index.COMMAND,
    "pydocs": pydocs.COMMAND,
    "fineweb-edu": fineweb_edu.COMMAND,
    "tokenizer": tokenizer.COMMAND,
    **chat.COMMANDS,
}


def main(argv: list[str]) -> int:
    """Run ``lapbench data <argv>``; 0 when ``--out`` holds what was asked for, 130 when interrupted.

    Raises:
        UserError: wrong options, source or folder.
    """
    arguments = _parser().parse_args(argv)
    try:
        result, already = COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        again = (
            "begins anew" if arguments.command in ("tokenizer", *chat.COMMANDS) else "goes on where this one stopped"
        )
        sys.stderr.write(f"interrupted: the same command {again}\n")
        return 130
    sys.stdout.write(report(result, already, str(arguments.out)))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lapbench data",
        description="Convert a data set to WebDataset shards (plain tar files) with a manifest.json, or images with "
        "masks to folders with a layout.json. A conversion that was interrupted goes on where it stopped when the same "
        "command is run again; a finished one is left alone.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="DATASET", title="data sets")
    for name, command in COMMANDS.items():
        description = command.description.replace("``", "")  # written as documentation of the module
        command.configure(commands.add_parser(name, help=command.summary, description=description))
    return parser
