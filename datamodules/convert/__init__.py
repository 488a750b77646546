"""``lapbench data``: data sets to WebDataset shards with a manifest.

A new data set is one `Command` in `COMMANDS`.
"""

import shlex
import sys

from lapbench.datamodules.convert import cifar, digits, imagenet, index
from lapbench.datamodules.convert.command import Command
from lapbench.datamodules.convert.pipeline import DAMAGED
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import ArgumentParser

COMMANDS: dict[str, Command] = {
    "digits": digits.COMMAND,
    "cifar10": cifar.COMMANDS["cifar10"],
    "cifar100": cifar.COMMANDS["cifar100"],
    "imagenet": imagenet.COMMAND,
    "index": index.COMMAND,
}


def main(argv: list[str]) -> int:
    """Run ``lapbench data <argv>``; 0 when the folder holds the data set, 130 when interrupted.

    Raises:
        UserError: wrong options, source or folder.
    """
    arguments = _parser().parse_args(argv)
    try:
        manifest, already = COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on where this one stopped\n")
        return 130
    sys.stdout.write(_report(manifest, already, str(arguments.out)))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lapbench data",
        description="Convert a data set to WebDataset shards (plain tar files) with a manifest.json. A conversion that "
        "was interrupted goes on where it stopped when the same command is run again; a finished one is left alone.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="DATASET", title="data sets")
    for name, command in COMMANDS.items():
        description = command.description.replace("``", "")  # written as documentation of the module
        command.configure(commands.add_parser(name, help=command.summary, description=description))
    return parser


def _report(manifest: Manifest, already: bool, folder: str) -> str:
    """The closing lines: what is where, what was left out, and the command that uses it."""
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    images = " + ".join(f"{manifest.samples(split):,} {split}" for split in manifest.splits)
    size = sum(shard.bytes for shard in shards) / 1e6
    lines = [
        f"{'already converted: ' if already else ''}{manifest.dataset}: {images} images of "
        f"{manifest.num_classes} classes in {len(shards)} shard{'s' * (len(shards) != 1)} ({size:,.1f} MB) in {folder}"
    ]
    if damaged := manifest.source.get(DAMAGED):
        lines.append(f"damaged images left out: {len(damaged)}, listed in the manifest; the first is {damaged[0]}")
    config = manifest.dataset if manifest.dataset in COMMANDS else "CONFIG"
    lines.append(f"next: lapbench fit --config supervised/{config} --data.init_args.data_dir {shlex.quote(folder)}")
    return "\n".join(lines) + "\n"
