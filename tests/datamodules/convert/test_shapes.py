"""The synthetic shapes: two layouts of one renderer, equal bytes for a seed, and pictures that are what they say."""

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapbench.datamodules.builtin import Shapes
from lapbench.datamodules.convert import COMMANDS, main, shapes, shapes_drawing
from lapbench.datamodules.convert.pairs import check_layout
from lapbench.datamodules.convert.shapes import COLORS, FORMS, OBJECT_CLASSES, SHAPES_CLASSES, TEXTURES
from lapbench.datamodules.layout import Layout
from lapbench.errors import UserError

IMAGES = {"train": 48, "test": 24}
SCENES = {"training": 12, "validation": 5}


def convert(out: Path, seed: int = 0) -> tuple[shapes.Drawn, bool]:
    return shapes.convert(out, seed, IMAGES, SCENES)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes") / "out"
    convert(out)
    return out


def test_both_layouts(drawn: Path, read_shards: Any) -> None:
    assert len(SHAPES_CLASSES) == len(set(SHAPES_CLASSES)) == 30
    for split, count in IMAGES.items():
        samples = read_shards(drawn, split)
        assert sorted(int(key) for key, *_ in samples) == list(range(count))
        assert set(Counter(label for *_, label in samples).values()) == {count // 24}
        for key, extension, image, label in samples:
            assert extension == "jpg"
            assert label == int(key) % 24
            assert Image.open(io.BytesIO(image)).size == (64, 64)
    assert check_layout(drawn / "ade20k", len(SHAPES_CLASSES)) == SCENES
    layout = Layout.load(drawn / "ade20k")
    assert (layout.dataset, layout.num_classes, layout.images) == ("shapes (synthetic)", 30, SCENES)
    masks = [np.asarray(Image.open(path)) for path in sorted((drawn / "ade20k/annotations").glob("*/*.png"))]
    labels = Counter(np.concatenate([mask.ravel() for mask in masks]).tolist())
    assert 0.01 < labels[0] / labels.total() < 0.2
    assert max(labels) <= 30
    for mask in masks:
        found = set(np.unique(mask).tolist()) - {0}
        assert len({label for label in found if label > 24}) == 1  # one ground
        assert 1 <= len({label for label in found if label <= 24}) <= 7


def test_a_seed_decides_every_byte(drawn: Path, tmp_path: Path) -> None:
    convert(tmp_path / "same")
    assert everything(tmp_path / "same") == everything(drawn)
    convert(tmp_path / "other", seed=1)
    same = [name for name, content in everything(tmp_path / "other").items() if everything(drawn).get(name) == content]
    assert same == []


def test_a_finished_one_is_left_alone(drawn: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in drawn.rglob("*")}
    result, already = convert(drawn)
    assert already
    assert result.scenes == Layout.load(drawn / "ade20k")
    assert {path: path.stat().st_mtime_ns for path in drawn.rglob("*")} == times
    with pytest.raises(UserError, match=r"holds shapes \(synthetic\) with seed 0, now it is 1: choose another --out"):
        convert(drawn, seed=1)


@pytest.mark.parametrize("kills", [5, 60, 75, 86])
def test_an_interrupted_one_goes_on(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    """Killed at a picture of the training or test shards, or of the scenes."""
    left = kills
    generator = shapes._generator

    def dies(*arguments: Any) -> random.Random:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return generator(*arguments)

    monkeypatch.setattr(shapes, "_generator", dies)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "out")
    assert not (tmp_path / "out/ade20k/layout.json").exists()
    left = -1
    _, already = convert(tmp_path / "out")
    assert not already
    assert everything(tmp_path / "out") == everything(drawn)
    # Scenes that were drawn before are not drawn again.
    assert kills < 72 or -left - 1 == sum(SCENES.values()) - (kills - 72)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(notes.txt\) and no conversion"):
        convert(tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shapes, "IMAGES", IMAGES)
    monkeypatch.setattr(shapes, "SCENE_COUNTS", SCENES)
    out = tmp_path / "s"
    for beginning in ("", "already converted: "):
        assert main(["shapes", "--out", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(
            f"{beginning}shapes (synthetic): 48 train + 24 test images of 24 classes in 2 shards"
        )
        assert lines[1] == (
            f"shapes (synthetic): 12 training + 5 validation images with masks of 30 classes in {out}/ade20k"
        )
        assert lines[2:] == [f"next: lapbench fit --config ssl/shapes --data.init_args.data_dir {out}"]
    assert "synthetic" in COMMANDS["shapes"].summary


def hues(pixels: np.ndarray[Any, Any], cover: np.ndarray[Any, Any]) -> Counter[str]:
    """The colours of the covered pixels, by their strongest channels."""
    red, green, blue = pixels[cover].astype(int).T
    yellow = (np.minimum(red, green) > blue + 40) & (np.abs(red - green) < 0.45 * np.maximum(red, green))
    names = np.select(
        [yellow, (red > green) & (red > blue), green >= blue, blue > green], ["yellow", "red", "green", "blue"], "none"
    )
    return Counter(names.tolist())


def test_colours_and_labels_fit_together() -> None:
    """In most of an object's labelled pixels its colour is seen."""
    right = total = 0
    for number in range(12):
        image, labels = shapes_drawing.draw_scene(random.Random(number), 96)
        for label in set(np.unique(labels).tolist()) & set(range(1, 25)):
            color = OBJECT_CLASSES[label - 1].split()[0]
            seen = hues(image, labels == label)
            right, total = right + seen[color], total + seen.total()
    assert right / total > 0.9


def test_forms_differ_in_shape_and_not_in_colour() -> None:
    """How much of its circle a form fills tells the forms apart; the colour of its pixels does not."""
    fills = {}
    for form in FORMS:
        covers = [shapes_drawing._form(random.Random(i), 96, form, 30, [48, 48]) for i in range(20)]
        assert len({cover.tobytes() for cover in covers}) == 20
        # Squeezing makes a form smaller in one direction: at most by 3/4.
        fills[form] = max(cover.sum() for cover in covers) / (np.pi * 30**2)
    expected = {
        "disc": 1.0,
        "ring": 1 - 0.55**2,
        "square": 2 / np.pi,
        "triangle": 3 * 3**0.5 / 4 / np.pi,
        "star": 10 * 0.42 * np.sin(np.pi / 5) / 2 / np.pi,
        "cross": (4 * 2 * 0.3 - 4 * 0.3**2) / np.pi,
    }
    for form, fill in fills.items():
        assert 0.9 * expected[form] < fill < 1.03 * expected[form], form


def test_every_ground_has_a_pattern_of_its_own() -> None:
    grounds = {texture: shapes_drawing._ground(random.Random(3), 64, texture) for texture in TEXTURES}
    assert len({ground.tobytes() for ground in grounds.values()}) == len(TEXTURES)
    for ground in grounds.values():
        assert ground.shape == (64, 64, 3)
        assert 0 <= ground.min() < ground.max() <= 1
        assert ground.std(axis=(0, 1)).max() > 0.02


def test_at_least_six_tenths_of_an_object_stay_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    covers: list[Any] = []
    laid_over = shapes_drawing._laid_over
    monkeypatch.setattr(
        shapes_drawing, "_laid_over", lambda *arguments: covers.append(arguments[1]) or laid_over(*arguments)
    )
    hidden = 0
    for number in range(30):
        covers.clear()
        shapes_drawing.draw_object(random.Random(number), 64, random.Random(number).choice(FORMS), COLORS[0])
        if len(covers) == 2:
            share = (covers[0] * (1 - covers[1])).sum() / covers[0].sum()
            assert share >= 0.6
            hidden += share < 0.99
    assert hidden > 3


def test_the_data_module_draws_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "IMAGES", IMAGES)
    monkeypatch.setattr(shapes, "SCENE_COUNTS", SCENES)
    data = Shapes(str(tmp_path / "s"), batch_size=48)
    data.prepare_data()
    data.prepare_data()
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (48, 3, 64, 64)
    assert sorted(labels.tolist()) == sorted(list(range(24)) * 2)
    values = data.normalize(images)
    assert values.mean().item() == pytest.approx(0, abs=0.25)
    assert values.std().item() == pytest.approx(1, abs=0.25)
