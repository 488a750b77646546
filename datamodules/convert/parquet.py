"""ImageNet as parquet in the Hugging Face layout: ``train-*.parquet`` and ``validation-*.parquet`` (or ``val-*``).

Columns: ``image``, a struct of ``bytes`` and ``path``, and ``label``, an integer. Class names come from the
``huggingface`` entry of the schema's metadata if it is there, else they are the integers. Images are stored byte for
byte.

Order, train and val alike: all row groups of all files in a seeded random order; of these, as many in turn as make
256 MiB are read, and their rows are written in a seeded random order. The key of a sample is its row, counted over
the sorted files.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapbench.datamodules.convert.formats import shorten
from lapbench.datamodules.convert.order import permutation
from lapbench.datamodules.convert.pipeline import Sample
from lapbench.errors import UserError

PATTERNS = {"train": re.compile(r"train(-.*)?\.parquet"), "val": re.compile(r"(validation|val)(-.*)?\.parquet")}
BLOCK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _RowGroup:
    path: Path
    number: int
    first: int  # index of its first row in the split
    first_in_file: int
    rows: int
    size: int


def find(folder: Path) -> dict[str, list[Path]]:
    """The parquet files of each split in ``folder`` or its ``data``; empty if there are none at all."""
    for place in (folder, folder / "data"):
        names = sorted(path for path in place.glob("*.parquet") if path.is_file())
        found = {split: [path for path in names if rule.fullmatch(path.name)] for split, rule in PATTERNS.items()}
        if any(found.values()):
            return found
    return {}


class Parquet:
    """Parquet files as a `pipeline.Source`. Holds one block of row groups at a time."""

    dataset = "imagenet"

    def __init__(self, folder: Path, files: dict[str, list[Path]], block_bytes: int = BLOCK_BYTES) -> None:
        """Read the footers, and the labels if the classes have no names.

        Raises:
            UserError: a split without files, a file that is no whole parquet, or one with other columns or classes.
        """
        self.origin = str(folder.resolve())
        self._block_bytes = block_bytes
        self._groups: dict[str, list[_RowGroup]] = {}
        named: dict[Path, tuple[str, ...] | None] = {}
        digest = hashlib.sha256()
        for split, paths in files.items():
            if not paths:
                raise UserError(f"{folder} has no {split} files: expected train-*.parquet and validation-*.parquet")
            groups: list[_RowGroup] = []
            self._groups[split] = groups
            for path in paths:
                found, named[path], checksum = _footer(path, sum(group.rows for group in groups))
                groups += found
                digest.update(f"{path.name}\0{checksum}\n".encode())
        self.sizes = {split: sum(group.rows for group in groups) for split, groups in self._groups.items()}
        for split, size in self.sizes.items():
            if not size:
                raise UserError(f"{folder}: the {split} files have no rows")
        first = next(iter(named))
        for path, names in named.items():
            if names != named[first]:
                raise UserError(f"{path} has other class names than {first}")
        self.classes = named[first] or self._numbered()
        self.settings: dict[str, Any] = {
            "layout": "parquet",
            "footers_sha256": digest.hexdigest(),
            "block_bytes": block_bytes,
        }

    def samples(self, split: str, start: int) -> Iterator[Sample]:
        """The samples of ``split`` from ``start`` on; blocks before it are not read."""
        position = 0
        for number, block in enumerate(self._blocks(split)):
            size = sum(group.rows for group in block)
            if position + size > start:
                rows = [(group, table, row) for group in block for table in [_read(group)] for row in range(group.rows)]
                for drawn in permutation(size, f"lapbench imagenet {split} {number}")[max(start - position, 0) :]:
                    group, (images, labels), row = rows[drawn]
                    yield self._sample(group, images[row].as_py(), labels[row].as_py(), row)
                del rows  # before the next block is read
            position += size

    def _blocks(self, split: str) -> Iterator[list[_RowGroup]]:
        groups, block, size = self._groups[split], [], 0
        for index in permutation(len(groups), f"lapbench imagenet {split}"):
            block.append(groups[index])
            size += groups[index].size
            if size >= self._block_bytes:
                yield block
                block, size = [], 0
        if block:
            yield block

    def _sample(self, group: _RowGroup, image: Any, label: Any, row: int) -> Sample:
        place = f"{group.path}, row {group.first_in_file + row}"
        if type(label) is not int or not 0 <= label < len(self.classes):
            raise UserError(f"{place}: the label must be 0..{len(self.classes) - 1}, got {shorten(label)}")
        content = (image or {}).get("bytes")
        # Without bytes the row only names a file that is elsewhere: no image, like an empty one.
        return Sample(group.first + row, content or b"", label, place)

    def _numbered(self) -> tuple[str, ...]:
        """Classes "0", "1", ... up to the largest label in train."""
        largest = 0
        for group in self._groups["train"]:
            labels = read_columns(group.path, group.number, ["label"])[0].to_pylist()
            largest = max(largest, *(label for label in labels if type(label) is int), 0)
        return tuple(map(str, range(largest + 1)))


def read_footer(path: Path) -> tuple[Any, Any]:
    """Metadata and Arrow schema of a parquet file; UserError if it is not whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def read_columns(path: Path, number: int, columns: list[str]) -> list[Any]:
    """The ``columns`` of row group ``number``; UserError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table = file.read_row_group(number, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error, f", row group {number},") from error
    return [table.column(name) for name in columns]


def footer_sha256(path: Path, metadata: Any) -> str:
    """A checksum of what the footer says of the rows, and of the size of the file."""
    digest = hashlib.sha256()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        digest.update(f"{group.num_rows} {group.total_byte_size}\n".encode())
    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()


def _footer(path: Path, first: int) -> tuple[list[_RowGroup], tuple[str, ...] | None, str]:
    """Row groups, class names if given, and a checksum of what the footer says."""
    import pyarrow as pa

    metadata, schema = read_footer(path)
    image = schema.field("image").type if "image" in schema.names else None
    if image is None or not pa.types.is_struct(image) or image.get_field_index("bytes") < 0:
        raise UserError(f"{path}: expected a column 'image' of struct{{bytes, path}}, got {shorten(str(image))}")
    label = schema.field("label").type if "label" in schema.names else None
    if label is None or not pa.types.is_integer(label):
        raise UserError(f"{path}: expected a column 'label' of integers, got {shorten(str(label))}")
    groups, in_file = [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        groups.append(_RowGroup(path, number, first + in_file, in_file, group.num_rows, group.total_byte_size))
        in_file += group.num_rows
    return groups, _class_names(path, schema.metadata or {}), footer_sha256(path, metadata)


def _class_names(path: Path, metadata: dict[bytes, bytes]) -> tuple[str, ...] | None:
    if b"huggingface" not in metadata:
        return None
    try:
        label = json.loads(metadata[b"huggingface"])["info"]["features"]["label"]
        names = label.get("names")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the 'huggingface' metadata does not describe 'label': {error!r}") from error
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: the class names in the metadata must be a list of strings, got {shorten(names)}")
    return tuple(names)


def _read(group: _RowGroup) -> list[Any]:
    """Images and labels of one row group."""
    return read_columns(group.path, group.number, ["image", "label"])


def _unreadable(path: Path, error: Exception, part: str = "") -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{path}{part} is not readable as parquet (incomplete download?): {reason[:200]}")
