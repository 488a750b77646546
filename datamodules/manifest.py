"""manifest.json: what a converted data set folder holds (classes, splits, shards with counts and checksums).

A folder is a data set exactly when it has a manifest: converters write it last. Shards are plain tar files in
WebDataset convention; one sample is ``<key>.<image extension>`` and ``<key>.cls`` (the class index in ASCII).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from lapbench.errors import UserError
from lapbench.results.files import write_atomically

MANIFEST = "manifest.json"
FORMAT = 1
MODE = 0o644  # of the data's files, whoever wrote them: a data set is shared

# A shard's name is opened as a file of the folder, so it may hold nothing that leaves it: no separator, no drive or
# `pipe:` scheme (colon), no leading dot (hidden and temporary files, `..`).
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One tar file: its plain name inside the folder, its samples, its size in bytes and its SHA-256 (hex)."""

    file: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Offsets:
    """The file that says where a split's images are (see `offsets`): its plain name and its SHA-256 (hex)."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of one data set folder.

    ``classes[i]`` is the name of class index ``i``; ``splits`` maps a split's name to its shards in reading order;
    ``source`` says freely where the data came from (origin, checksum, settings). ``offsets`` has an entry for every
    split, or none at all: then the shards can be streamed but not read at random.
    """

    dataset: str
    classes: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]
    source: dict[str, Any] = field(default_factory=dict)
    offsets: dict[str, Offsets] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def split(self, name: str) -> tuple[Shard, ...]:
        """The shards of split ``name``; UserError naming the splits there are."""
        if name not in self.splits:
            raise UserError(f"data set {self.dataset!r} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    def samples(self, split: str) -> int:
        """The number of samples in ``split``."""
        return sum(shard.samples for shard in self.split(split))

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check ``folder/manifest.json``.

        Only the manifest is checked: whether the shards are there is for their reader to say.

        Raises:
            UserError: the folder or its manifest is missing or unreadable, or the manifest is malformed.
        """
        remedy = (
            f"convert a data set into it (`lapbench data --help`), or describe shards made elsewhere with "
            f"`lapbench data index {folder} --dataset NAME --split NAME=GLOB`"
        )
        content, path = read_content(Path(folder), remedy)
        return _checked(content, path)

    def save(self, folder: Path) -> None:
        """Write ``folder/manifest.json`` atomically: readers see the old one or the new one, never a part.

        Raises:
            UserError: the manifest would not load again, or the folder cannot be written.
        """
        self.check(folder)
        write_atomically(Path(folder) / MANIFEST, json.dumps(self.to_json(), indent=1) + "\n", MODE)

    def check(self, folder: Path) -> None:
        """UserError if the manifest would not load again from ``folder``."""
        _checked(self.to_json(), Path(folder) / MANIFEST)

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON-ready values, keys in the order of the file."""
        content = {
            "format": FORMAT,
            "dataset": self.dataset,
            "classes": list(self.classes),
            "source": self.source,
            "splits": {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()},
        }
        if self.offsets:
            content["offsets"] = {name: asdict(offsets) for name, offsets in self.offsets.items()}
        return content


def read_content(folder: Path, remedy: str) -> tuple[Any, Path]:
    """The decoded ``folder/manifest.json``, not yet checked, and its path.

    Raises:
        UserError: the folder or its manifest is missing (then ``remedy`` says what to do) or unreadable.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"no data folder {folder}: make it with `lapbench data DATASET --out {folder}`")
    if not path.is_file():
        raise UserError(f"no {MANIFEST} in {folder}: {remedy}")
    try:
        return json.loads(path.read_text(encoding="utf-8")), path
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {' '.join(str(error).split())}") from error


def is_plain_name(name: str) -> bool:
    """Whether ``name`` names a file inside the folder and nothing else (no ``/``, ``..``, ``pipe:``, hidden file)."""
    return _PLAIN_NAME.fullmatch(name) is not None


def is_sha256(value: Any) -> TypeGuard[str]:
    """Whether ``value`` is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _checked(content: Any, path: Path) -> Manifest:
    """Turn decoded JSON into a Manifest, or raise a UserError that names the offending entry."""

    def need(good: object, where: str, expected: str, got: Any) -> None:
        if not good:
            raise UserError(f"{path}: {where} must be {expected}, got {short(got)}")

    need(isinstance(content, dict), "the manifest", "an object", content)
    need(content.get("format") == FORMAT, "'format'", f"{FORMAT} (a data set of images)", content.get("format"))
    dataset, classes, splits = content.get("dataset"), content.get("classes"), content.get("splits")
    source, offsets = content.get("source", {}), content.get("offsets", {})
    need(isinstance(dataset, str) and dataset, "'dataset'", "a name", dataset)
    need(isinstance(classes, list) and classes, "'classes'", "a list of at least one name", classes)
    for name in classes:
        need(isinstance(name, str), "every class in 'classes'", "a string", name)
    need(isinstance(source, dict), "'source'", "an object", source)
    need(isinstance(splits, dict) and splits, "'splits'", "an object with at least one split", splits)
    # A shard listed twice would be read twice, and one listed in two splits would leak one into the other.
    seen: set[str] = set()
    checked = {}
    for name, shards in splits.items():
        need(is_plain_name(name), "a split's name", "letters, digits and _ . + = @ -", name)
        need(isinstance(shards, list) and shards, f"split {name!r}", "a list of at least one shard", shards)
        checked[name] = tuple(
            _checked_shard(shard, f"{path}: split {name!r}, shard {i}") for i, shard in enumerate(shards)
        )
        for shard in checked[name]:
            need(shard.file not in seen, f"split {name!r}", "shards that are listed once", shard.file)
            seen.add(shard.file)
    need(isinstance(offsets, dict), "'offsets'", "an object", offsets)
    need(not offsets or offsets.keys() == splits.keys(), "'offsets'", "of the same splits as 'splits'", [*offsets])
    checked_offsets = _checked_offsets(offsets, path)
    for name, entry in checked_offsets.items():
        need(entry.file not in seen, f"offsets of split {name!r}", "a file of its own", entry.file)
        seen.add(entry.file)
    return Manifest(dataset, tuple(classes), checked, source, checked_offsets)


def _checked_shard(content: Any, where: str) -> Shard:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must be an object, got {short(content)}")
    file, samples, size, sha256 = (content.get(key) for key in ("file", "samples", "bytes", "sha256"))
    if not isinstance(file, str) or not is_plain_name(file):
        raise UserError(f"{where}: 'file' must be a plain file name inside the folder, got {short(file)}")
    if type(samples) is not int or samples < 1:
        raise UserError(f"{where} ({file}): 'samples' must be a positive whole number, got {short(samples)}")
    if type(size) is not int or size < 1:
        raise UserError(f"{where} ({file}): 'bytes' must be a positive whole number, got {short(size)}")
    if not is_sha256(sha256):
        raise UserError(f"{where} ({file}): 'sha256' must be 64 hexadecimal digits, got {short(sha256)}")
    return Shard(file, samples, size, sha256)


def _checked_offsets(content: Mapping[str, Any], path: Path) -> dict[str, Offsets]:
    checked = {}
    for split, entry in content.items():
        where = f"{path}: offsets of split {split!r}"
        if not isinstance(entry, Mapping):
            raise UserError(f"{where} must be an object, got {short(entry)}")
        file, sha256 = entry.get("file"), entry.get("sha256")
        if not isinstance(file, str) or not is_plain_name(file):
            raise UserError(f"{where}: 'file' must be a plain file name inside the folder, got {short(file)}")
        if not is_sha256(sha256):
            raise UserError(f"{where}: 'sha256' must be 64 hexadecimal digits, got {short(sha256)}")
        checked[split] = Offsets(file, sha256)
    return checked


def short(value: Any) -> str:
    """``repr(value)`` cut to a length that fits an error line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
