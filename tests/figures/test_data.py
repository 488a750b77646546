"""The data of figures: what is accepted, read back, merged and averaged."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lapbench.errors import UserError
from lapbench.figures import FIGURES, load_figure, merge, save_figure
from lapbench.figures.data import FIELDS, curve, grouped, problem
from tests.figures.samples import SAMPLES, sample


def test_every_figure_has_fields_and_a_sample() -> None:
    assert FIGURES.keys() == FIELDS.keys() == SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_every_field_is_needed_and_checked(name: str) -> None:
    data = sample(name)
    assert problem(data) is None
    for key in [*FIELDS[name], "label", "schedule", "laplacian_heads", "num_heads", "seed"]:
        missing, wrong = copy.deepcopy(data), copy.deepcopy(data)
        del missing["series"][0][key]
        assert problem(missing) == f"series 0: key {key!r} is missing, expected " + _expected(name, key)
        wrong["series"][0][key] = {"variance": 3}
        assert f"key {key!r} must be" in str(problem(wrong))


def _expected(name: str, key: str) -> str:
    common = {"label": "string", "schedule": "string", "laplacian_heads": "number or null"}
    return common.get(key, "integer or null") if key not in FIELDS[name] else FIELDS[name][key][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, "NaN", True])
def test_numbers_are_finite(value: Any) -> None:
    data = sample("similarity")
    data["series"][0]["similarity"][1] = value
    assert "key 'similarity' must be a list of number or nulls" in str(problem(data))


def test_lists_of_a_series_are_equally_long() -> None:
    data = sample("anova")
    data["series"][1]["within_class"].pop()
    assert problem(data) == (
        "series 1: lists of different lengths: layers 2, within_sequence 2, within_class 1, between_class 2"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"figure": "anove", "series": []}, "key 'figure' must be one of accuracy, .*, got 'anove'"),
        ({"figure": "anova"}, "key 'series' must be a list of at least one series, got None"),
        ({"figure": "anova", "series": []}, "at least one series"),
        ({"figure": "anova", "series": [3]}, "series 0 must be an object, got 3"),
    ],
)
def test_a_file_with_something_else_is_refused_by_its_path(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "anova.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{path} does not hold a figure: .*{message}"):
        load_figure(path)


def test_saving_refuses_what_loading_would(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data of figure anova: key 'series'"):
        save_figure(tmp_path, "anova", {"figure": "anova", "series": []})
    with pytest.raises(ValueError, match="expected the data of figure anova, got those of similarity"):
        save_figure(tmp_path, "anova", sample("similarity"))
    assert list(tmp_path.iterdir()) == []


def test_merge_keeps_the_order_and_refuses_mixtures() -> None:
    one, other = sample("anova"), sample("anova")
    assert merge([one, other])["series"] == one["series"] + other["series"]
    with pytest.raises(ValueError, match="expected the data of one figure, got anova, similarity"):
        merge([one, sample("similarity")])
    with pytest.raises(ValueError, match="got nothing"):
        merge([])


def test_groups_are_ordered_by_heads_then_name_with_references_last() -> None:
    base = sample("accuracy")["series"][0]
    names = [("10L", 10.0), ("untrained", 0.0), ("2L", 2.0), ("4L+2D0.5", 4.0), ("4L", 4.0), ("odd", None), ("0L", 0)]
    series = [{**base, "label": n, "laplacian_heads": h, "reference": n == "untrained"} for n, h in names]
    assert [g.label for g in grouped(series)] == ["0L", "2L", "4L", "4L+2D0.5", "10L", "odd", "untrained"]


def test_curves_are_averaged_entry_by_entry_without_what_is_not_defined() -> None:
    base = sample("similarity")["series"][0]
    values = [[0.1, 0.4, None], [0.3, None, None]]
    series = [{**base, "seed": i, "layers": [0, 1, 2], "similarity": v} for i, v in enumerate(values)]
    (group,) = grouped(series)
    first, second, third = curve(group, "similarity")
    assert first is not None
    assert second is not None
    assert (first.n, first.mean, first.std) == (2, pytest.approx(0.2), pytest.approx(math.sqrt(0.02)))
    assert (second.n, second.mean, second.std) == (1, 0.4, None)
    assert third is None
    assert group.first["seed"] == 0


def test_runs_of_other_depths_are_not_averaged() -> None:
    base = sample("similarity")["series"][0]
    series = [
        {**base, "seed": 0, "layers": [0, 1], "similarity": [0.1, 0.2]},
        {**base, "seed": 1, "layers": [0], "similarity": [0.1]},
    ]
    (group,) = grouped(series)
    with pytest.raises(UserError, match="cannot average runs of 0L: similarity has 1 and 2 entries"):
        curve(group, "similarity")
    with pytest.raises(UserError, match="cannot average runs of 0L: they differ in layers"):
        group.common("layers")
