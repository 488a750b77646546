"""ADE20K's scene parsing benchmark, from ADEChallengeData2016.zip or the folder that it unpacks to. Every image is
checked to have its mask and the reverse, both are decoded, and sizes and labels (0..150) compared. The files keep their
bytes: images/{training,validation}/*.jpg and annotations/{training,validation}/*.png below --out, and a layout.json.
With the unpacked folder as --source and --out nothing is copied: the folder is checked and gets its layout.json.
"""

import argparse
import hashlib
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PureWindowsPath
from typing import Any

from lapbench.datamodules.convert.command import Command, add_source, existing
from lapbench.datamodules.convert.formats import shorten
from lapbench.datamodules.convert.journal import JOURNAL, Entry, Journal, must_agree
from lapbench.datamodules.convert.pairs import check_layout, check_pair, each_pair, pair_files, read_file
from lapbench.datamodules.convert.progress import waiting
from lapbench.datamodules.layout import LAYOUT, Layout, is_part, list_files, pair_names
from lapbench.datamodules.manifest import MODE
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

DATASET = "ade20k"
NUM_CLASSES = 150
IMAGES = {"training": 20210, "validation": 2000}  # of the official benchmark
ROOT = "ADEChallengeData2016"
LARGEST_FILE = 64 * 2**20  # bytes; the official files are below 2 MB, and an archive must not fill the memory


class _Folder:
    """The unpacked folder: ``sizes`` of its images and masks by their names in the layout."""

    def __init__(self, path: Path) -> None:
        self._root = path / ROOT if (path / ROOT).is_dir() else path
        self.origin = str(self._root.resolve())
        self.sizes = {name: (self._root / name).stat().st_size for name in list_files(self._root)}

    def read(self, name: str) -> bytes:
        return read_file(self._root / name)


class _Zip:
    """The archive, of which nothing is extracted under a name of its own."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.origin = str(path.resolve())
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            _check_member(member, path)
            name = re.sub(r"^(.*?/)?(?=(images|annotations)/)", "", member.filename)
            if is_part(name):
                if name in self._members:
                    raise UserError(f"{path}: {name} is there twice")
                if member.file_size > LARGEST_FILE:
                    raise UserError(f"{path}: {name} has {member.file_size} bytes, more than {LARGEST_FILE}: refused")
                self._members[name] = member
        self.sizes = {name: self._members[name].file_size for name in sorted(self._members)}

    def read(self, name: str) -> bytes:
        try:
            return self._archive.read(self._members[name])
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
            raise UserError(f"{self.origin}: cannot read member {name}: {error}") from error


def convert(source: Path, out: Path, progress: bool = False) -> tuple[Layout, bool]:
    """Check the data set in ``source`` and copy it to ``out``; go on with an unfinished conversion.

    Args:
        source: The archive, or the folder that it unpacks to.
        out: A new or empty folder, that of an earlier conversion of the same source, or ``source`` itself.
        progress: Show bars and notices on stderr.

    Returns:
        What ``out`` holds, and whether it was there already.

    Raises:
        UserError: the source is not of the layout or damaged, or ``out`` holds something else or cannot be written.
    """
    with _opened(existing(source)) as archive:
        opened = _Folder(source) if archive is None else _Zip(source, archive)
        names = pair_names(opened.sizes, str(source))
        # Names and sizes, not contents: enough to notice that files came, went or were replaced.
        listing = "".join(f"{name}\0{size}\n" for name, size in opened.sizes.items())
        settings = {"listing_sha256": hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()}
        layout = Layout(
            DATASET,
            NUM_CLASSES,
            {split: len(members) for split, members in names.items()},
            {"origin": opened.origin, **settings},
        )
        if opened.origin == str(out.resolve()):
            return _checked_in_place(layout, settings, out, progress)
        if (finished := _finished(settings, out)) and not (out / JOURNAL).exists():
            return finished, True
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the folder {out}: {error.strerror}") from error
        with Journal(out, Entry.load, lambda: waiting(out, progress)) as journal:
            if not (finished := _finished(settings, out)):
                journal.begin(DATASET, settings)
                for left_over in out.glob("*/*/.*.tmp"):  # killed while files were being written
                    left_over.unlink()

                def copy(name: str) -> None:
                    _copy(opened, out, name, str(source))

                each_pair(copy, names, DATASET, progress)
                layout.save(out)
            journal.remove()
    return finished or layout, finished is not None


def _opened(source: Path) -> AbstractContextManager[zipfile.ZipFile | None]:
    """The archive ``source``, None for a folder."""
    if source.is_dir():
        return nullcontext()
    try:
        return zipfile.ZipFile(source)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"--source {source} is no whole zip archive: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error


def _check_member(member: zipfile.ZipInfo, path: Path) -> None:
    where, name = f"{path}: member {shorten(member.filename)}", member.filename
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise UserError(f"{where} is a link or special file: refused")
    if name.startswith("/") or PureWindowsPath(name).drive or ".." in name.split("/") or "\\" in name:
        raise UserError(f"{where} has a name that leads out of a folder: refused")


def _copy(source: _Folder | _Zip, out: Path, name: str, where: str) -> None:
    """Check and write one pair; its files appear under their names when they are whole, the image last."""
    image, mask = pair_files(name)
    if _is_there(out / image, source.sizes[image]) and _is_there(out / mask, source.sizes[mask]):
        return
    contents = {mask: source.read(mask), image: source.read(image)}
    check_pair(contents[image], contents[mask], NUM_CLASSES, f"{where}: ", name)
    for file, content in contents.items():
        write_atomically(out / file, content, MODE)


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _finished(settings: Mapping[str, Any], out: Path) -> Layout | None:
    """The layout of ``out`` if it is there; UserError if it is of something else or lacks a file."""
    if not (out / LAYOUT).is_file():
        return None
    layout = Layout.load(out)
    must_agree(f"{out} holds", layout.dataset, layout.source, DATASET, settings)
    return layout


def _checked_in_place(layout: Layout, settings: Mapping[str, Any], folder: Path, progress: bool) -> tuple[Layout, bool]:
    if finished := _finished(settings, folder):
        return finished, True
    check_layout(folder, NUM_CLASSES, progress)
    layout.save(folder)
    return layout, False


def _configure(parser: argparse.ArgumentParser) -> None:
    add_source(parser, f"{ROOT}.zip from http://sceneparsing.csail.mit.edu, or the folder {ROOT} that it unpacks to")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder to write images, masks and layout.json into: new, empty, or that of an interrupted "
        "conversion, which goes on where it stopped; or the --source folder itself, to copy nothing",
    )


def _run(arguments: argparse.Namespace) -> tuple[Layout, bool]:
    return convert(arguments.source, arguments.out, progress=True)


COMMAND = Command(
    "ADE20K for segmentation (20,210 + 2,000 images with masks of 150 classes), from its archive or folder",
    __doc__ or "",
    _configure,
    _run,
)
