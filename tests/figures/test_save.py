"""The files of a figure: valid, equal for equal data, whole or not there."""

import io
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import Image

from lapbench.errors import UserError
from lapbench.figures import load_figure, save_figure
from lapbench.figures.save import draw
from lapbench.results import files
from tests.figures.samples import SAMPLES, sample


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Every figure, saved once."""
    folder = tmp_path_factory.mktemp("figures")
    return {name: save_figure(folder, name, sample(name)) for name in SAMPLES}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_numbers_are_read_back_and_the_pictures_are_valid(name: str, saved: dict[str, list[Path]]) -> None:
    numbers, png, svg = saved[name]
    assert [path.name for path in saved[name]] == [f"{name}.json", f"{name}.png", f"{name}.svg"]
    assert load_figure(numbers) == sample(name)
    with Image.open(io.BytesIO(png.read_bytes())) as picture:
        picture.load()
        assert picture.width == 660  # a column at 200 dpi
        assert picture.height > 150
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


LABELS = {
    "accuracy": ["test top-1 accuracy (%)", "Laplacian heads per layer (of 4)", "0", "2"],
    "anova": ["within sequence", "within class", "between classes", "variance of tokens (%)", "20.0", "50.0"],
    "similarity": ["0L", "2L", "layer", "cosine similarity"],
    "spectrum": ["0L: 2.5", "2L: 2.5", "eigenvalue", "dotted: number of components with 99 % of the variance"],
    "collapse": ["NC1: within over between", "NC4: nearest mean", "class means", "classifier"],
    "pca": ["0L", "2L", "PC 1 (50.0 %)", "PC 2 (25.0 %)", "wren", "kite"],
    "feature_maps": ["image", "0L", "2L"],
    "simplex": ["0L", "2L", "class 3", "class 17", "class 42"],
    "sublayers": ["attention", "MLP", "attention heads alone", "0L", "2L"],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_vector_picture_has_its_words_as_text(name: str, saved: dict[str, list[Path]]) -> None:
    words = texts(saved[name][2].read_bytes())
    assert {*LABELS[name]} <= words
    if name == "pca":
        assert "owl" not in words  # of that class there is no token


def texts(svg: bytes) -> set[str]:
    root = ElementTree.fromstring(svg.decode())
    return {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize("name", ["similarity", "pca", "feature_maps"])
def test_equal_data_give_equal_bytes(name: str, saved: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 23)  # a user's own settings
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    again = draw(sample(name))
    assert [again["png"], again["svg"]] == [path.read_bytes() for path in saved[name][1:]]
    assert b"dc:date" not in again["svg"]
    assert matplotlib.rcParams["font.size"] == 23


def test_no_window_and_no_global_figure(saved: dict[str, list[Path]]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert saved
    assert pyplot is None or pyplot.get_fignums() == []


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the process die as it puts the named file in its place."""
    names: list[str] = []
    replace = files.os.replace

    def die(source: Any, target: Path) -> None:
        if Path(target).name in names:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", die)
    return names


def test_a_crash_leaves_the_old_picture_whole(tmp_path: Path, crash: list[str]) -> None:
    paths = save_figure(tmp_path, "similarity", sample("similarity"))
    before = [path.read_bytes() for path in paths]
    crash.append("similarity.png")
    newer = sample("similarity")
    newer["series"][0]["similarity"] = [0.5, 0.9]
    with pytest.raises(KeyboardInterrupt):
        save_figure(tmp_path, "similarity", newer)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert load_figure(paths[0]) == newer
    assert [path.read_bytes() for path in paths[1:]] == before[1:]


def test_what_cannot_be_drawn_leaves_all_files_as_they_were(saved: dict[str, list[Path]]) -> None:
    before = [path.read_bytes() for path in saved["collapse"]]
    mixed = sample("collapse")
    mixed["series"][1]["unit"] = "class token"
    message = r"different units of features cannot share a picture: sequence mean \(0L\), class token \(2L\)"
    with pytest.raises(UserError, match=message):
        save_figure(saved["collapse"][0].parent, "collapse", mixed)
    assert [path.read_bytes() for path in saved["collapse"]] == before


NOTHING: dict[str, dict[str, Any]] = {
    "anova": {"within_sequence": [None] * 2, "within_class": [None] * 2, "between_class": [None] * 2},
    "similarity": {"similarity": [None, None]},
    "spectrum": {"eigenvalues_mean": [0.0] * 4, "eigenvalues_std": None, "k_alpha": None, "k_alpha_std": None},
    "collapse": {key: None for key in SAMPLES["collapse"] if key != "unit"},
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_not_defined_is_said_without_a_warning(name: str) -> None:
    data = sample(name)
    data["series"][1].update(NOTHING[name])
    if name == "collapse":  # panels are left out if no run has them
        data["series"][0].update(NOTHING[name])
    words = " ".join(texts(draw(data)["svg"]))
    assert "not defined" in words
    assert "nan" not in words.lower().split()
