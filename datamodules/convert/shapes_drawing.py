"""Draws the images of ``lapbench data shapes``: coloured shapes on textured ground, with masks.

Everything is drawn from Python's generator, whose ``random`` promises the same numbers in every version.
"""

import colorsys
import math
import random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from lapbench.datamodules.convert.shapes import COLORS, FORMS, OBJECT_CLASSES, TEXTURES

Floats = NDArray[np.float32]
Points = list[tuple[float, float]]

HUES = {"red": 0.0, "yellow": 0.145, "green": 0.36, "blue": 0.61}
LEAST = 0.6  # of an object stays visible; what is outside of the image does not count
FINE = 4  # masks are drawn this many times as large, for smooth edges


def draw_object(rng: random.Random, size: int, form: str, color: str) -> NDArray[np.uint8]:
    """One object, often partly hidden: uint8 [size, size, 3]."""
    image = _ground(rng, size, rng.choice(TEXTURES))
    place = [size * rng.uniform(0.36, 0.64) for _ in range(2)]
    cover = _form(rng, size, form, size * rng.uniform(0.2, 0.36), place)
    image = _laid_over(image, cover, _color(rng, color))
    bar = _bar(rng, size)
    if rng.random() < 0.5 and _visible(cover, cover, bar) >= LEAST:
        image = _laid_over(image, bar, _grey(rng))
    return _photographed(rng, image)


def draw_scene(rng: random.Random, size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Three to seven objects and up to two bars: the image uint8 [size, size, 3] and its labels uint8 [size, size].

    Label 0 are the bars, then come the objects in the order of their classes, then the textures of the ground.
    """
    texture = rng.randrange(len(TEXTURES))
    image = _ground(rng, size, TEXTURES[texture])
    labels = np.full((size, size), 1 + len(OBJECT_CLASSES) + texture, np.uint8)
    things = [1 + rng.randrange(len(OBJECT_CLASSES)) for _ in range(rng.randint(3, 7))] + [0] * rng.randint(0, 2)
    rng.shuffle(things)
    objects: list[tuple[Floats, Floats]] = []  # the whole object, and what can be seen of it
    for label in things:
        if label:
            form, color = divmod(label - 1, len(COLORS))
            place = [size * rng.uniform(0.1, 0.9) for _ in range(2)]
            cover = _form(rng, size, FORMS[form], size * rng.uniform(0.12, 0.25), place)
            paint = _color(rng, COLORS[color])
        else:
            cover, paint = _bar(rng, size), _grey(rng)
        if all(_visible(whole, seen, cover) >= LEAST for whole, seen in objects):
            objects = [(whole, seen * (1 - cover)) for whole, seen in objects] + [(cover, cover)] * (label > 0)
            image = _laid_over(image, cover, paint)
            labels[cover >= 0.5] = label
    return _photographed(rng, image), labels


def _ground(rng: random.Random, size: int, texture: str) -> Floats:
    """Two dull colours in a pattern of random angle and period: [size, size, 3] in 0..1."""
    angle, period = rng.uniform(0, math.pi), size * rng.uniform(0.12, 0.25)
    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    along = (columns * math.cos(angle) + rows * math.sin(angle)) / period + rng.random()
    across = (rows * math.cos(angle) - columns * math.sin(angle)) / period + rng.random()
    turn = 2 * np.float32(math.pi)
    if texture == "stripes":
        height = np.sin(turn * along)
    elif texture == "checks":
        height = 2 * np.sin(turn * along) * np.sin(turn * across)
    elif texture == "dots":
        height = np.cos(turn * along) + np.cos(turn * across) - 1
    elif texture == "waves":
        height = np.sin(turn * (along + 0.3 * np.sin(turn * across / 2)))
    elif texture == "bricks":
        shifted = along / 2 + 0.5 * (np.floor(across) % 2)
        joint = np.minimum(2 * np.abs(shifted % 1 - 0.5), np.abs(across % 1 - 0.5) * 1.15)
        height = 4 * (0.42 - joint)
    else:
        grain = Image.frombytes("L", (size // 3, size // 3), rng.randbytes((size // 3) ** 2))
        height = np.asarray(grain.resize((size, size), Image.Resampling.BICUBIC), np.float32) / 64 - 2
    share = np.clip(0.5 + 1.5 * height, 0, 1)[..., None]
    dark = rng.uniform(0.2, 0.55)
    colors = [
        np.array(colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.05, 0.3), value), np.float32)
        for value in (dark, dark + rng.uniform(0.2, 0.4))
    ]
    ground: Floats = colors[0] * (1 - share) + colors[1] * share
    return ground


def _form(rng: random.Random, size: int, form: str, radius: float, place: list[float]) -> Floats:
    """How much of each pixel a form covers: [size, size] in 0..1; turned and squeezed at random."""
    outlines = {
        "disc": lambda: [_circle(40)],
        "ring": lambda: [_circle(40), _circle(40, 0.55)],
        "square": lambda: [_circle(4)],
        "triangle": lambda: [_circle(3)],
        "star": lambda: [_star(5, 0.42)],
        "cross": lambda: [_cross(0.3)],
    }[form]()
    angle, squeeze = rng.uniform(0, 2 * math.pi), rng.uniform(0.75, 1)
    lean = rng.uniform(0, math.pi)  # the direction of the squeeze
    return _covered(size, [[_moved(point, angle, squeeze, lean, radius, place) for point in o] for o in outlines])


def _bar(rng: random.Random, size: int) -> Floats:
    """A straight bar from edge to edge."""
    angle, half = rng.uniform(0, math.pi), size * rng.uniform(0.03, 0.08)
    place = [size * rng.uniform(0.25, 0.75) for _ in range(2)]
    corners = [(2.0 * size, half), (2.0 * size, -half), (-2.0 * size, -half), (-2.0 * size, half)]
    return _covered(size, [[_moved(corner, angle, 1, 0, 1, place) for corner in corners]])


def _circle(corners: int, radius: float = 1.0) -> Points:
    """A regular polygon."""
    turns = [2 * math.pi * i / corners for i in range(corners)]
    return [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns]


def _star(points: int, inner: float) -> Points:
    outer = _circle(2 * points)
    return [(x, y) if i % 2 == 0 else (inner * x, inner * y) for i, (x, y) in enumerate(outer)]


def _cross(half: float) -> Points:
    arm = [(1.0, -half), (1.0, half), (half, half)]
    return [
        (x * math.cos(t) - y * math.sin(t), x * math.sin(t) + y * math.cos(t))
        for t in (0, math.pi / 2, math.pi, 3 * math.pi / 2)
        for x, y in arm
    ]


def _moved(
    point: tuple[float, float], angle: float, squeeze: float, lean: float, radius: float, place: list[float]
) -> tuple[float, float]:
    """The point turned by ``angle``, squeezed along ``lean``, enlarged and put at its place, in fine pixels."""
    x, y = point
    x, y = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    along, across = x * math.cos(lean) + y * math.sin(lean), y * math.cos(lean) - x * math.sin(lean)
    along *= squeeze
    x, y = along * math.cos(lean) - across * math.sin(lean), along * math.sin(lean) + across * math.cos(lean)
    return FINE * (place[0] + radius * x), FINE * (place[1] + radius * y)


def _covered(size: int, outlines: list[Points]) -> Floats:
    """The first outline less the second, if there is one."""
    fine = Image.new("L", (FINE * size, FINE * size))
    canvas = ImageDraw.Draw(fine)
    for outline, level in zip(outlines, (255, 0), strict=False):
        canvas.polygon(outline, fill=level)
    covered: Floats = np.asarray(fine.reduce(FINE), np.float32) / np.float32(255)
    return covered


def _laid_over(image: Floats, cover: Floats, color: Floats) -> Floats:
    result: Floats = image + cover[..., None] * (color - image)
    return result


def _visible(whole: Floats, seen: Floats, above: Floats) -> float:
    """The share of a whole object that stays visible when ``above`` is laid over it."""
    return float((seen * (1 - above)).sum() / whole.sum())


def _color(rng: random.Random, name: str) -> Floats:
    hue = (HUES[name] + rng.uniform(-0.035, 0.035)) % 1
    return np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.6, 0.95), rng.uniform(0.55, 0.95)), np.float32)


def _grey(rng: random.Random) -> Floats:
    return np.full(3, rng.uniform(0.05, 0.95), np.float32)


def _photographed(rng: random.Random, image: Floats) -> NDArray[np.uint8]:
    """Uneven light and the noise of a sensor."""
    size = len(image)
    angle, strength = rng.uniform(0, 2 * math.pi), rng.uniform(0, 0.3)
    rows, columns = (np.mgrid[:size, :size].astype(np.float32) + 0.5) / size - 0.5
    light = rng.uniform(0.85, 1.15) + strength * (columns * math.cos(angle) + rows * math.sin(angle))
    noise = np.frombuffer(rng.randbytes(2 * image.size), np.uint8).reshape(2, *image.shape).sum(axis=0, dtype=np.int16)
    levels = 255 * image * light[..., None] + (noise - 255) * np.float32(rng.uniform(0.02, 0.08))
    result: NDArray[np.uint8] = levels.round().clip(0, 255).astype(np.uint8)
    return result
