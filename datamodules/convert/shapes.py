"""Synthetic pictures for trying self-supervision and segmentation without a download: coloured shapes on textured
ground. Image shards hold one object an image, of 24 classes: six forms in four colours. Below OUT/ade20k are scenes of
several objects with masks in ADE20K's layout, of 30 classes: the objects and six textures of the ground; bars that hide
parts of them are unlabelled. All is drawn from --seed alone.
"""

import argparse
import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lapbench.datamodules.convert import pipeline
from lapbench.datamodules.convert.command import Command, add_out
from lapbench.datamodules.convert.formats import encode_png
from lapbench.datamodules.convert.journal import JOURNAL, Entry, Journal, must_agree
from lapbench.datamodules.convert.order import permutation
from lapbench.datamodules.convert.pairs import pair_files
from lapbench.datamodules.convert.progress import Bar, waiting
from lapbench.datamodules.layout import LAYOUT, Layout
from lapbench.datamodules.manifest import MODE, Manifest
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DATASET = "shapes (synthetic)"
SCENES = "ade20k"  # the folder of scenes below --out
FORMS = ("disc", "ring", "square", "triangle", "star", "cross")
COLORS = ("red", "yellow", "green", "blue")
TEXTURES = ("stripes", "checks", "dots", "waves", "bricks", "speckles")
OBJECT_CLASSES = tuple(f"{color} {form}" for form in FORMS for color in COLORS)
# Label i of a mask is class i - 1.
SHAPES_CLASSES = (*OBJECT_CLASSES, *(f"ground of {texture}" for texture in TEXTURES))
IMAGES = {"train": 2400, "test": 480}
SCENE_COUNTS = {"training": 400, "validation": 100}
IMAGE_SIZE, SCENE_SIZE = 64, 96
SHARD_SIZE = 800
VERSION = 1  # of the drawing: another number is another data set
QUALITY = 92


class Drawn(NamedTuple):
    """The two halves of the data set."""

    images: Manifest
    scenes: Layout


@dataclass(frozen=True)
class ShapesSource:
    """Images of one object as a `pipeline.Source`: image i shows class i modulo 24, the order is random."""

    seed: int = 0
    sizes: Mapping[str, int] = field(default_factory=lambda: IMAGES)
    dataset = DATASET
    classes = OBJECT_CLASSES
    origin = "lapbench data shapes"

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that decides the bytes, but for the versions of Pillow and its libraries."""
        return {"seed": self.seed, "size": IMAGE_SIZE, "images": dict(self.sizes), "version": VERSION}

    def samples(self, split: str, start: int) -> Iterator[pipeline.Sample]:
        """The samples of ``split`` from ``start`` on."""
        from lapbench.datamodules.convert.shapes_drawing import draw_object

        for index in permutation(self.sizes[split], f"lapbench shapes {self.seed} {split}")[start:]:
            label = index % len(OBJECT_CLASSES)
            form, color = divmod(label, len(COLORS))
            pixels = draw_object(_generator(self.seed, split, index), IMAGE_SIZE, FORMS[form], COLORS[color])
            yield pipeline.Sample(index, _encode_jpeg(pixels), label, f"{split} image {index}")


def convert(
    out: Path,
    seed: int = 0,
    images: Mapping[str, int] | None = None,
    scenes: Mapping[str, int] | None = None,
    progress: bool = False,
) -> tuple[Drawn, bool]:
    """Draw the data set into ``out``, or find it there; an interrupted drawing goes on.

    Args:
        out: A new or empty folder, or that of an earlier drawing with the same settings.
        seed: Seed of everything.
        images: Images in the splits ``train`` and ``test``; ``IMAGES`` when null.
        scenes: Scenes in the splits ``training`` and ``validation``; ``SCENE_COUNTS`` when null.
        progress: Show bars and notices on stderr.

    Returns:
        What ``out`` holds, and whether it was there already.

    Raises:
        UserError: ``out`` holds something else or cannot be written.
    """
    source = ShapesSource(seed, images or IMAGES)
    manifest, had_images = pipeline.convert(source, out, shard_size=SHARD_SIZE, progress=progress)
    layout, had_scenes = _draw_scenes(out / SCENES, seed, scenes or SCENE_COUNTS, progress)
    return Drawn(manifest, layout), had_images and had_scenes


def _draw_scenes(out: Path, seed: int, counts: Mapping[str, int], progress: bool) -> tuple[Layout, bool]:
    settings = {"seed": seed, "size": SCENE_SIZE, "scenes": dict(counts), "version": VERSION}
    layout = Layout(DATASET, len(SHAPES_CLASSES), counts, {"origin": "lapbench data shapes", **settings})
    if _is_finished(out, settings) and not (out / JOURNAL).exists():
        return layout, True
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {out}: {error.strerror}") from error
    with Journal(out, Entry.load, lambda: waiting(out, progress)) as journal:
        if not (finished := _is_finished(out, settings)):
            journal.begin(DATASET, settings)
            for left_over in out.glob("*/*/.*.tmp"):  # killed while files were being written
                left_over.unlink()
            for split, count in counts.items():
                with Bar(f"{DATASET} {split}", count, progress) as bar:
                    for index in range(count):
                        _draw_scene(out, seed, split, index)
                        bar.advance(1)
            layout.save(out)
        journal.remove()
    return layout, finished


def _is_finished(out: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the scenes are there; UserError if others are, or some are not."""
    if not (out / LAYOUT).is_file():
        return False
    layout = Layout.load(out)
    must_agree(f"{out} holds", layout.dataset, layout.source, DATASET, settings)
    return True


def _draw_scene(out: Path, seed: int, split: str, index: int) -> None:
    """Write one scene; its files appear under their names when they are whole, the image last."""
    from lapbench.datamodules.convert.shapes_drawing import draw_scene

    image_file, mask_file = (out / file for file in pair_files(f"{split}/{index:06d}"))
    if image_file.is_file():
        return
    image, labels = draw_scene(_generator(seed, split, index), SCENE_SIZE)
    write_atomically(mask_file, encode_png(labels), MODE)
    write_atomically(image_file, _encode_jpeg(image), MODE)


def _encode_jpeg(pixels: "NDArray[np.uint8]") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=QUALITY, subsampling=0)
    return stream.getvalue()


def _generator(seed: int, split: str, index: int) -> random.Random:
    return random.Random(f"lapbench shapes {seed} {split} {index}")


def _configure(parser: argparse.ArgumentParser) -> None:
    add_out(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of everything (default: %(default)s)")


def _run(arguments: argparse.Namespace) -> tuple[Drawn, bool]:
    return convert(arguments.out, arguments.seed, progress=True)


COMMAND = Command(
    "synthetic shapes: 2,880 images of 24 classes, 500 scenes with masks of 30 classes, no download",
    __doc__ or "",
    _configure,
    _run,
)
