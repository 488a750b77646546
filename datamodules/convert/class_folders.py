"""ImageNet as class folders: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``.

The class index is the position among the sorted folder names (WordNet ids), the same for both splits. Folders whose
names are all numbers are their own indices: "2" is class 2 even beside "10" and "11", and none may be missing.
Files are stored byte for byte. Both splits are in a seeded random order, so that a shard holds many classes; the key
of a sample is its index in the sorted listing.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from lapbench.datamodules.convert.order import permutation
from lapbench.datamodules.convert.pipeline import Sample
from lapbench.errors import UserError

SPLITS = ("train", "val")
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
# Small files at random places: on a network file system the wait for each dominates, so some are asked for at once.
READERS, AHEAD = 8, 64


class ClassFolders:
    """Class folders as a `pipeline.Source`. Holds the file names (150 MB for ImageNet), never the images.

    Attributes:
        ignored: the number of files in class folders that are no images by their names.
    """

    dataset = "imagenet"

    def __init__(self, folder: Path) -> None:
        """List the folder.

        Raises:
            UserError: no class folders, a class without images, or other classes in val than in train.
        """
        self.origin = str(folder.resolve())
        self._folder = folder
        names = {split: _class_names(folder / split) for split in SPLITS}
        _same_classes(names["train"], names["val"], folder)
        self.classes = tuple(names["train"])
        self._files: dict[str, list[tuple[str, int]]] = {}
        digest, ignored = hashlib.sha256(), 0
        for split in SPLITS:
            files: list[tuple[str, int]] = []
            for label, name in enumerate(self.classes):
                images, others = _images(folder / split / name)
                files += [(f"{split}/{name}/{image}", label) for image, _ in images]
                ignored += others
                for image, size in images:
                    digest.update(f"{split}/{name}/{image}\0{size}\n".encode("utf-8", "surrogateescape"))
            self._files[split] = files
        self.sizes = {split: len(files) for split, files in self._files.items()}
        # Names and sizes, not contents: enough to notice that files came, went or were replaced.
        self.settings: dict[str, Any] = {"layout": "class folders", "listing_sha256": digest.hexdigest()}
        self.ignored = ignored

    def samples(self, split: str, start: int) -> Iterator[Sample]:
        """The samples of ``split`` from ``start`` on, in the seeded order."""
        files = self._files[split]
        order = islice(permutation(len(files), f"lapbench imagenet {split}"), start, None)
        with ThreadPoolExecutor(READERS) as pool:
            under_way: deque[Future[Sample]] = deque()
            try:
                for index in order:
                    under_way.append(pool.submit(self._read, index, *files[index]))
                    if len(under_way) == AHEAD:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    def _read(self, index: int, name: str, label: int) -> Sample:
        path = self._folder / name
        try:
            return Sample(index, path.read_bytes(), label, str(path))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error


def _class_names(folder: Path) -> list[str]:
    """The class folders of one split in the order of their indices."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: expected train/<class>/*.JPEG and val/<class>/*.JPEG, or parquet files")
    names = sorted(entry.name for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{folder} holds no class folders: expected <class>/*.JPEG in it, one folder a class")
    if all(name.isascii() and name.isdecimal() for name in names):
        names.sort(key=int)
        for index, name in enumerate(names):
            if int(name) != index:
                raise UserError(
                    f"{folder}: folders named by numbers must be 0..{len(names) - 1}, their class indices; "
                    f"in place {index} is {name!r}"
                )
    return names


def _images(folder: Path) -> tuple[list[tuple[str, int]], int]:
    """Names and sizes of the images in ``folder``, sorted, and how many other entries there are."""
    images, others = [], 0
    for entry in _entries(folder):
        # Hidden files are what desktops leave behind (".DS_Store", "._n01440764_18.JPEG"), not images.
        if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith("."):
            try:
                images.append((entry.name, entry.stat().st_size))
            except OSError as error:
                raise UserError(f"cannot read {entry.path}: {error.strerror}") from error
        else:
            others += 1
    if not images:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    return sorted(images), others


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error


def _same_classes(train: list[str], val: list[str], folder: Path) -> None:
    if train != val:
        differences = [
            f"{len(only)} only in {where} ({', '.join(only[:3])}{', ...' if len(only) > 3 else ''})"
            for where, only in (("train", sorted({*train} - {*val})), ("val", sorted({*val} - {*train})))
            if only
        ]
        # As sets they can only be equal when numbers are written differently ("1" and "01").
        detail = "; ".join(differences) or "the same numbers written differently"
        raise UserError(f"{folder}: train has {len(train)} classes, val {len(val)}: {detail}")
