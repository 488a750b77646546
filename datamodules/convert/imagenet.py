"""ImageNet from class folders (``train/<wnid>/*.JPEG``, ``val/<wnid>/*.JPEG``) or from parquet files in the Hugging
Face layout (``train-*.parquet``, ``validation-*.parquet``). Images keep their bytes; both splits are written in a
seeded random order, so that every shard holds many classes. The images are streamed: memory does not grow with the
data set.
"""

import argparse
from pathlib import Path

from lapbench.datamodules.convert import pipeline
from lapbench.datamodules.convert.class_folders import ClassFolders
from lapbench.datamodules.convert.command import Command, add_out, add_shard_size, add_source, existing
from lapbench.datamodules.convert.parquet import Parquet, find
from lapbench.datamodules.convert.progress import notice
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError


def open_source(folder: Path) -> pipeline.Source:
    """The layout that ``folder`` has; UserError if it has neither."""
    if not existing(folder).is_dir():
        raise UserError(f"--source {folder} must be a folder: class folders train/ and val/, or parquet files")
    files = find(folder)
    if files:
        return Parquet(folder, files)
    source = ClassFolders(folder)
    notice(f"{source.ignored} files that are no images are ignored", source.ignored > 0)
    return source


def _configure(parser: argparse.ArgumentParser) -> None:
    add_source(
        parser, "a folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or with the parquet files of both splits"
    )
    add_out(parser)
    add_shard_size(parser, 1000)
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out images that are empty or no JPEG, PNG or WebP, and list them in the manifest; without this the "
        "first one stops the conversion",
    )


def _run(arguments: argparse.Namespace) -> tuple[Manifest, bool]:
    return pipeline.convert(
        open_source(arguments.source),
        arguments.out,
        shard_size=arguments.shard_size,
        skip_damaged=arguments.skip_damaged,
        progress=True,
    )


COMMAND = Command(
    "ImageNet or any data set in its layout, from class folders or parquet", __doc__ or "", _configure, _run
)
