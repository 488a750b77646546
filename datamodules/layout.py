"""The folder layout of ADE20K: ``images/SPLIT/NAME.jpg``, each with its mask ``annotations/SPLIT/NAME.png``.

Masks are 8-bit PNGs of one channel and of their image's size: 0 is unlabelled, 1..K are the classes. A folder is a data
set exactly when it has a ``layout.json``: who writes one has checked every pair. Imports no torch.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lapbench.datamodules.manifest import MODE, short
from lapbench.errors import UserError
from lapbench.results.files import read_json, write_atomically

LAYOUT = "layout.json"
FORMAT = 1
SPLITS = ("training", "validation")
SUFFIXES = {"images": ".jpg", "annotations": ".png"}


@dataclass(frozen=True)
class Layout:
    """What a folder of this layout holds.

    ``num_classes`` is K, ``images`` the number of images in each split; ``source`` says freely where they came from.
    """

    dataset: str
    num_classes: int
    images: Mapping[str, int]
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "Layout":
        """Read ``folder/layout.json``, and see that every image that it counts and its mask are there by name.

        Raises:
            UserError: no folder, no such file or a malformed one, or other files than it counts.
        """
        path = folder / LAYOUT
        if not path.is_file():
            missing = f"no {LAYOUT} in {folder}" if folder.is_dir() else f"no data folder {folder}"
            raise UserError(
                f"{missing}: make it with `lapbench data ade20k --source PATH --out {folder}` or `lapbench data shapes`"
            )
        layout = cls._checked(read_json(path), path)
        for split, names in pair_names(list_files(folder), str(folder)).items():
            if len(names) != layout.images[split]:
                raise UserError(
                    f"{folder}: expected {layout.images[split]} images in {split} as in {LAYOUT}, got {len(names)}"
                )
        return layout

    def save(self, folder: Path) -> None:
        """Write ``folder/layout.json`` atomically."""
        write_atomically(folder / LAYOUT, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", MODE)

    @classmethod
    def _checked(cls, content: dict[str, Any], path: Path) -> "Layout":
        def need(good: object, where: str, expected: str, got: Any) -> None:
            if not good:
                raise UserError(f"{path}: {where} must be {expected}, got {short(got)}")

        need(content.get("format") == FORMAT, "'format'", f"{FORMAT}", content.get("format"))
        dataset: Any = content.get("dataset")
        classes: Any = content.get("num_classes")
        images: Any = content.get("images")
        source: Any = content.get("source", {})
        need(isinstance(dataset, str) and dataset, "'dataset'", "a name", dataset)
        need(type(classes) is int and 1 <= classes <= 254, "'num_classes'", "1..254", classes)
        need(isinstance(images, dict) and {*images} == {*SPLITS}, "'images'", f"of {' and '.join(SPLITS)}", images)
        for split, count in images.items():
            need(type(count) is int and count > 0, f"'images' of {split}", "a positive whole number", count)
        need(isinstance(source, dict), "'source'", "an object", source)
        return cls(dataset, classes, images, source)


def list_files(folder: Path) -> list[str]:
    """The files of the four folders of images and masks, ``images/training/NAME.jpg`` and so on, sorted.

    Hidden files and those of other names count for nothing.

    Raises:
        UserError: one of the folders is missing or cannot be read.
    """
    names = []
    try:
        for part in (f"{kind}/{split}" for kind in SUFFIXES for split in SPLITS):
            with os.scandir(folder / part) as entries:
                names += [f"{part}/{entry.name}" for entry in entries if entry.is_file()]
    except OSError as error:
        raise UserError(f"cannot read the folder {folder / part}: {error.strerror}") from error
    return sorted(name for name in names if is_part(name))


def is_part(name: str) -> bool:
    """Whether ``name`` is that of an image or mask, below the layout's root."""
    kind, _, file = name.partition("/")
    split, _, file = file.partition("/")
    plain = "/" not in file and not file.startswith(".")
    return plain and kind in SUFFIXES and split in SPLITS and file.endswith(SUFFIXES[kind])


def pair_names(files: Iterable[str], where: str) -> dict[str, list[str]]:
    """The names of each split without suffix, sorted.

    Args:
        files: ``images/training/NAME.jpg`` and so on, of which each passes `is_part`.
        where: The root of them, for messages.

    Raises:
        UserError: a split without images, an image without its mask, or the reverse.
    """
    found: dict[tuple[str, str], set[str]] = {(kind, split): set() for kind in SUFFIXES for split in SPLITS}
    for name in files:
        kind, split, file = name.split("/")
        found[kind, split].add(file.removesuffix(SUFFIXES[kind]))
    for split in SPLITS:
        for kind, other in (("images", "annotations"), ("annotations", "images")):
            if not found[kind, split]:
                raise UserError(f"{where}: no {kind}/{split}/*{SUFFIXES[kind]}")
            if alone := sorted(found[kind, split] - found[other, split]):
                more = f" (nor {len(alone) - 1} others theirs)" if len(alone) > 1 else ""
                raise UserError(
                    f"{where}: {kind}/{split}/{alone[0]}{SUFFIXES[kind]} has no "
                    f"{other}/{split}/{alone[0]}{SUFFIXES[other]}{more}"
                )
    return {split: sorted(found["images", split]) for split in SPLITS}
