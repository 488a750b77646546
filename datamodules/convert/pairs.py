"""Checks of images and their masks, pair by pair: what has a ``layout.json`` has passed them."""

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.layout import SUFFIXES, list_files, pair_names
from lapbench.errors import UserError

THREADS = 8  # decoding releases Python's lock, and small files are slow to open on network file systems


def check_layout(folder: Path, num_classes: int, progress: bool = False) -> dict[str, int]:
    """Decode and check every pair in ``folder``, which may have its ``layout.json`` or not.

    Args:
        folder: With ``images/SPLIT/NAME.jpg`` and ``annotations/SPLIT/NAME.png``.
        num_classes: The largest label there may be.
        progress: Show bars on stderr.

    Returns:
        The number of images in each split.

    Raises:
        UserError: a missing folder, files that do not pair, or what `check_pair` says of a pair.
    """

    def check(name: str) -> None:
        image, mask = (read_file(folder / file) for file in pair_files(name))
        check_pair(image, mask, num_classes, f"{folder}: ", name)

    names = pair_names(list_files(folder), str(folder))
    each_pair(check, names, "checking", progress)
    return {split: len(members) for split, members in names.items()}


def each_pair(
    function: Callable[[str], None], names: Mapping[str, Sequence[str]], label: str, progress: bool = False
) -> None:
    """Call ``function("SPLIT/NAME")`` for every pair, some at once; the first error in order ends it."""
    for split, members in names.items():
        with Bar(f"{label} {split}", len(members), progress) as bar, ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(function, [f"{split}/{member}" for member in members]):
                    bar.advance(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def pair_files(name: str) -> tuple[str, str]:
    """The names of image and mask of the pair ``SPLIT/NAME``, below the layout's root."""
    image, mask = (f"{kind}/{name}{suffix}" for kind, suffix in SUFFIXES.items())
    return image, mask


def read_file(path: Path) -> bytes:
    """The bytes of ``path``, or a UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def check_pair(image: bytes, mask: bytes, num_classes: int, where: str, name: str) -> None:
    """See that both can be decoded and are of one size, the mask has one channel of 8 bits, and its labels are right.

    Args:
        image: The image file's bytes.
        mask: The mask file's bytes.
        num_classes: The largest label there may be; the smallest is 0.
        where: Begins messages.
        name: ``SPLIT/NAME``, for messages.

    Raises:
        UserError: naming the file, and the label where that is wrong.
    """
    import numpy as np  # here and not above: `lapbench data` must start at once
    from PIL import Image

    from lapbench.datamodules.decoding import DAMAGE, decode_image

    image_file, mask_file = (f"{where}{file}" for file in pair_files(name))
    try:
        height, width = decode_image(image).shape[:2]
    except UserError as error:
        raise UserError(f"{image_file}: {error}") from error
    try:
        decoded = Image.open(io.BytesIO(mask), formats=["PNG"])
        decoded.load()
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise UserError(f"{mask_file} is no intact PNG file ({len(mask)} bytes)") from error
    if decoded.mode not in ("L", "P"):
        raise UserError(f"{mask_file}: a mask must have one channel of 8 bits, got mode {decoded.mode}")
    if decoded.size != (width, height):
        got = "{} x {}".format(*decoded.size)
        raise UserError(f"{mask_file}: expected the size of its image, {width} x {height}, got {got}")
    labels = np.asarray(decoded)
    if labels.max() > num_classes:
        row, column = np.argwhere(labels > num_classes)[0]
        raise UserError(
            f"{mask_file}: labels must be 0..{num_classes}, got {labels[row, column]} (row {row}, column {column})"
        )
