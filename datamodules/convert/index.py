"""Index the samples of shards, so that they can be read at random. In a folder that has a manifest.json the offsets of
its shards are written beside them (older folders have none). Shards that others made (for example the
``timm/imagenet-1k-wds`` files) get a manifest.json as well: tell their --dataset and --split patterns. Every shard is
read once: samples are counted and checked (one image and a ``.cls`` holding the class index in ASCII), and the checksum
of an unknown shard is taken. Nothing but manifest.json and the SPLIT.index.npy files is written.
"""

import argparse
from pathlib import Path

from lapbench.datamodules.convert.command import Command, positive
from lapbench.datamodules.convert.journal import JOURNAL
from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.convert.scan import Scan, scan
from lapbench.datamodules.convert.writer import file_sha256
from lapbench.datamodules.manifest import MANIFEST, Manifest, Shard, is_plain_name
from lapbench.datamodules.offsets import save_indexed
from lapbench.errors import UserError

METHOD = "index"


def index(
    folder: Path,
    dataset: str,
    patterns: dict[str, str],
    classes: tuple[str, ...] | None = None,
    progress: bool = False,
) -> Manifest:
    """Check the shards in ``folder`` and write its manifest and offsets.

    Args:
        folder: where the shards are.
        dataset: the data set's name.
        patterns: for each split the glob of its shards, within the folder.
        classes: the class names; None for "0" up to the largest label found.
        progress: show a bar on stderr.

    Raises:
        UserError: no such shards, a shard that is empty, truncated or unsafe, a sample without image or label, or a
            folder that a conversion wrote.
    """
    _check_folder(folder)
    if (folder / MANIFEST).is_file() and Manifest.load(folder).source.get("method") != METHOD:
        raise UserError(
            f"{folder} holds a converted data set, which has its manifest already: without --split it gets its offsets"
        )
    files = {split: _matches(folder, split, pattern) for split, pattern in patterns.items()}
    splits: dict[str, tuple[Shard, ...]] = {}
    rows, largest = {}, 0
    with Bar(f"{dataset} shards", sum(map(len, files.values())), progress, unit="shards") as bar:
        for split, paths in files.items():
            scans = []
            for path in paths:
                found = scan(path, None if classes is None else len(classes))
                scans.append((found, Shard(path.name, found.samples, path.stat().st_size, file_sha256(path))))
                bar.advance(1)
            splits[split] = tuple(shard for _, shard in scans)
            rows[split] = b"".join(found.rows for found, _ in scans)
            largest = max(largest, *(found.largest for found, _ in scans))
    names = classes if classes is not None else tuple(map(str, range(largest + 1)))
    manifest = Manifest(dataset, names, splits, {"method": METHOD, "patterns": patterns})
    return save_indexed(folder, manifest, rows)


def index_again(folder: Path, progress: bool = False) -> Manifest:
    """Write the offsets of the shards that the manifest in ``folder`` lists; the manifest names them, else it stays.

    Raises:
        UserError: no manifest, or a shard that is not as the manifest says, or is unsafe.
    """
    _check_folder(folder)
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"no {MANIFEST} in {folder}: tell what the shards are with --dataset NAME and --split NAME=GLOB"
        )
    manifest = Manifest.load(folder)
    rows = {}
    with Bar(f"{manifest.dataset} shards", sum(map(len, manifest.splits.values())), progress, unit="shards") as bar:
        for split, shards in manifest.splits.items():
            parts = []
            for shard in shards:
                parts.append(_as_listed(folder / shard.file, shard, manifest.num_classes).rows)
                bar.advance(1)
            rows[split] = b"".join(parts)
    return save_indexed(folder, manifest, rows)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if (folder / JOURNAL).exists():
        raise UserError(f"{folder} holds an unfinished conversion: finish it, and it has its manifest")


def _as_listed(path: Path, shard: Shard, num_classes: int) -> Scan:
    """What a shard holds, which must be what the manifest says of it."""
    if not path.is_file():
        raise UserError(f"{path} is missing: the manifest lists it, and offsets are made where the shards are")
    if path.stat().st_size != shard.bytes:
        raise UserError(f"{path}: expected {shard.bytes} bytes as in the manifest, got {path.stat().st_size}")
    found = scan(path, num_classes)
    if found.samples != shard.samples:
        raise UserError(f"{path}: expected {shard.samples} samples as in the manifest, got {found.samples}")
    return found


def _matches(folder: Path, split: str, pattern: str) -> list[Path]:
    if "/" in pattern or "\\" in pattern or not pattern:
        raise UserError(f"--split {split}={pattern}: the pattern must name files in {folder} itself")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise UserError(f"--split {split}={pattern}: no such files in {folder}")
    for path in paths:
        if not is_plain_name(path.name):
            raise UserError(f"{path}: a shard's name may have letters, digits and _ . + = @ - only")
    return paths


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "out", type=Path, metavar="DIR", help="the folder that holds the shards; manifest and offsets go there"
    )
    parser.add_argument("--dataset", metavar="NAME", help="the data set's name, for example imagenet")
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME=GLOB",
        help="a split and the shards in it, for example val='imagenet1k-validation-*.tar'; once for each split "
        "(ImageNet's are train and val)",
    )
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument(
        "--num-classes",
        type=positive,
        metavar="N",
        help="the number of classes, named 0 to N-1 (default: as many as the largest label asks for)",
    )
    classes.add_argument(
        "--classes", type=Path, metavar="FILE", help="a text file with the classes' names, one a line in order"
    )


def _run(arguments: argparse.Namespace) -> tuple[Manifest, bool]:
    if not arguments.split:
        if arguments.dataset or arguments.num_classes or arguments.classes:
            raise UserError("--dataset, --num-classes and --classes describe the shards that --split NAME=GLOB names")
        return index_again(arguments.out, progress=True), False
    if not arguments.dataset:
        raise UserError("--split needs --dataset NAME: what the shards are of")
    patterns: dict[str, str] = {}
    for text in arguments.split:
        split, sign, pattern = text.partition("=")
        if not sign or not is_plain_name(split):
            raise UserError(f"--split {text}: expected NAME=GLOB, for example train='*-train-*.tar'")
        if split in patterns:
            raise UserError(f"--split {split} is given twice: one pattern a split")
        patterns[split] = pattern
    names = tuple(map(str, range(arguments.num_classes))) if arguments.num_classes else None
    if arguments.classes:
        names = _read_names(arguments.classes)
    return index(arguments.out, arguments.dataset, patterns, names, progress=True), False


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise UserError(f"--classes {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--classes {path} is not UTF-8 text: {error}") from error
    if not names or not all(names):
        raise UserError(f"--classes {path}: expected one name on every line, got an empty one")
    return names


COMMAND = Command(
    "offsets of shards for random access, and the manifest of shards made by others", __doc__ or "", _configure, _run
)
