"""scikit-learn's bundled 8 x 8 digits: the embedded default, with nothing to download.

Pixels are 0..16 in the source and ``(v * 255 + 8) // 16`` in the PNGs, which spreads them over 0..255 and is undone
exactly by ``(p * 16 + 127) // 255``. The split is fixed: stratified, 20 % of each class for test (largest remainders
make it 360 of 1797), drawn by a seeded hash of the index. Samples keep the source's order within each split.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapbench.datamodules.convert import pipeline
from lapbench.datamodules.convert.command import Command, add_out
from lapbench.datamodules.convert.formats import encode_png
from lapbench.datamodules.convert.order import permutation
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEST_SIZE = 360
SHARD_SIZE = 512
CHECKSUM = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


class DigitsSource:
    """The digits as a `pipeline.Source`; scikit-learn is imported when the first sample is asked for."""

    dataset = "digits"
    classes = tuple("0123456789")
    sizes = {"train": 1797 - TEST_SIZE, "test": TEST_SIZE}  # noqa: RUF012
    settings: dict[str, Any] = {"sha256": CHECKSUM, "split": "stratified, seeded, 360 test"}  # noqa: RUF012
    origin = "scikit-learn load_digits"

    def samples(self, split: str, start: int) -> Iterator[pipeline.Sample]:
        """The samples of ``split`` from ``start`` on."""
        images, labels = load()
        for index in split_indices(labels)[split][start:]:
            image = encode_png(to_bytes(images[index]))
            yield pipeline.Sample(index, image, labels[index], f"digit {index}")


def load() -> "tuple[NDArray[np.uint8], list[int]]":
    """Images [1797, 8, 8] with values 0..16, and labels; UserError if they are not the ones that are expected."""
    import numpy as np
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    got = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if got != CHECKSUM:
        raise UserError(f"scikit-learn's digits have SHA-256 {got}, expected {CHECKSUM}: install another scikit-learn")
    return images, labels.tolist()


def to_bytes(values: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    """Grey levels 0..16 spread over 0..255."""
    import numpy as np

    return ((values.astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)


def split_indices(labels: list[int]) -> dict[str, list[int]]:
    """The indices of ``train`` and ``test``, each ascending."""
    order = permutation(len(labels), "lapbench digits")
    members = {label: [i for i in order if labels[i] == label] for label in sorted(set(labels))}
    # Largest remainders: whole quotas first, then one more for the classes with the largest remainder.
    quota = {label: divmod(len(which) * TEST_SIZE, len(labels)) for label, which in members.items()}
    left = TEST_SIZE - sum(whole for whole, _ in quota.values())
    raised = sorted(quota, key=lambda label: (-quota[label][1], label))[:left]
    test = {i for label, which in members.items() for i in which[: quota[label][0] + (label in raised)]}
    return {"train": [i for i in range(len(labels)) if i not in test], "test": sorted(test)}


def convert(out: Path, progress: bool = False) -> Manifest:
    """Write the digits to ``out``, or find them there; safe when several processes do so at once.

    Raises:
        UserError: ``out`` holds something else or cannot be written.
    """
    return pipeline.convert(DigitsSource(), Path(out), shard_size=SHARD_SIZE, progress=progress)[0]


def _run(arguments: argparse.Namespace) -> tuple[Manifest, bool]:
    return pipeline.convert(DigitsSource(), arguments.out, shard_size=SHARD_SIZE, progress=True)


COMMAND = Command(
    "scikit-learn's bundled 8 x 8 digits: 1797 grey images, 10 classes, no download", __doc__ or "", add_out, _run
)
