"""SPLIT.index.npy: where in its shard each image of a split lies, so that any sample can be read on its own.

One row of 20 bytes for each sample, in the manifest's order: where the headers of the image's tar member begin
(extended ones included), their length, the image's length, all in bytes, and the label. The manifest has the file's
SHA-256: an index that is not the one of this manifest is noticed before it is used.

Writing needs no numpy, because ``lapbench data`` starts faster without it.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapbench.datamodules.manifest import MODE, Manifest, Offsets
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# A member's size is read into memory at once: a header that claims more is damage or an attack.
MAX_MEMBER_BYTES = 1 << 28
MAX_HEADER_BYTES = 1 << 16

_ROW = struct.Struct("<QIII")
_DTYPE = "[('start', '<u8'), ('headers', '<u4'), ('size', '<u4'), ('label', '<u4')]"


def row(start: int, headers: int, size: int, label: int, where: str) -> bytes:
    """One sample's row; UserError, beginning with ``where``, for a member that no reader would take."""
    if size > MAX_MEMBER_BYTES:
        raise UserError(f"{where}: expected an image of at most {MAX_MEMBER_BYTES} bytes, got {size}")
    if headers > MAX_HEADER_BYTES:
        raise UserError(f"{where}: expected at most {MAX_HEADER_BYTES} bytes of headers, got {headers}")
    return _ROW.pack(start, headers, size, label)


def save_indexed(folder: Path, manifest: Manifest, rows: Mapping[str, bytes]) -> Manifest:
    """Write the rows of every split, and then the manifest with what it has to know of them; returns that manifest.

    Raises:
        UserError: the manifest would not load again, or the folder cannot be written.
    """
    contents = {split: _npy_header(len(rows[split]) // _ROW.size) + rows[split] for split in manifest.splits}
    offsets = {
        split: Offsets(f"{split}.index.npy", hashlib.sha256(content).hexdigest()) for split, content in contents.items()
    }
    manifest = replace(manifest, offsets=offsets)
    manifest.check(folder)  # before any file is replaced
    for split, content in contents.items():
        write_atomically(folder / offsets[split].file, content, MODE)
    manifest.save(folder)
    return manifest


def check_offsets(folder: Path, manifest: Manifest, split: str) -> Path:
    """The file with the offsets of ``split``, after a look at every byte of it (20 MB for a million samples).

    Raises:
        UserError: the manifest has none, or the file is missing, damaged, or of another manifest.
    """
    remedy = f"make it with `lapbench data index {folder}`"
    if split not in manifest.offsets:
        raise UserError(
            f"{folder} has no index of its samples: {remedy}, or set the data's `reader` to stream, which needs none"
        )
    path = folder / manifest.offsets[split].file
    header = _npy_header(manifest.samples(split))
    try:
        with path.open("rb") as stream:
            head = stream.read(len(header))
            found = hashlib.sha256(head)
            while piece := stream.read(1 << 20):
                found.update(piece)
    except OSError as error:
        raise UserError(f"cannot read the index {path}: {error.strerror}; {remedy}") from error
    if found.hexdigest() != manifest.offsets[split].sha256:
        raise UserError(f"the index {path} is stale or damaged, its SHA-256 is not the manifest's: {remedy}")
    samples = manifest.samples(split)
    if head != header or path.stat().st_size != len(header) + samples * _ROW.size:
        raise UserError(f"the index {path} is not one of the manifest's {samples} samples: {remedy}")
    return path


def open_offsets(path: Path) -> "npt.NDArray[np.void]":
    """Map the rows into memory; processes that do so share the pages."""
    import numpy as np

    rows: np.ndarray[Any, np.dtype[np.void]] = np.load(path, mmap_mode="r", allow_pickle=False)
    return rows


def _npy_header(rows: int) -> bytes:
    """The header of version 1.0 of numpy's format: magic, length, a dictionary padded to 64 bytes."""
    text = f"{{'descr': {_DTYPE}, 'fortran_order': False, 'shape': ({rows},), }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii")
