"""What stands in the pictures: heights, whiskers, bands and lines equal the statistics of the runs."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from lapbench.errors import UserError
from lapbench.figures import FIGURES
from lapbench.figures.data import grouped
from lapbench.figures.style import GREY, MARKERS, looks, settings
from tests.figures.samples import sample, series

VALUES = {"0L": (0.90, 0.92, 0.94), "2L": (0.95,), "4L": (0.91, 0.97)}


@pytest.fixture(autouse=True)
def _look() -> Iterator[None]:
    with settings():
        yield


def runs(name: str, key: str, values: dict[str, tuple[Any, ...]], **fields: Any) -> dict[str, Any]:
    """A run for each value, with the seeds 0, 1, ..."""
    every = [
        series(name, label, seed, **{key: v}, **fields) for label, vs in values.items() for seed, v in enumerate(vs)
    ]
    return {"figure": name, "series": every}


def draw(data: dict[str, Any]) -> Any:
    return FIGURES[data["figure"]](data)


def whiskers(axes: Any) -> list[tuple[float, float, float]]:
    """(x, middle, half length) of each whisker."""
    found = []
    for container in axes.containers:
        if hasattr(container, "has_yerr"):
            for segment in container.lines[2][0].get_segments():
                (x, low), (_, high) = segment
                found.append((x, (low + high) / 2, (high - low) / 2))
    return found


def test_accuracy_is_the_mean_with_a_whisker_of_one_sd_and_each_seed_behind() -> None:
    axes = draw(runs("accuracy", "value", VALUES)).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3 and line.get_linestyle() == "-"]
    assert list(lines[0].get_ydata()) == pytest.approx([92, 95, 94])
    expected = [(0, 92, 2), (2, 94, math.sqrt(18))]  # one seed has no whisker
    assert [pytest.approx(w) for w in whiskers(axes)] == expected
    dots = [
        tuple(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "None" and line.get_marker() == "o"
    ]
    assert dots == [pytest.approx([100 * v for v in vs]) for vs in VALUES.values()]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "2", "4"]


def test_references_are_lines_and_far_ones_are_named_instead() -> None:
    data = runs("accuracy", "value", VALUES)
    near = series("accuracy", "untrained", reference=True, value=0.89)
    far = series("accuracy", "raw pixels", reference=True, value=0.10)
    figure = draw({**data, "series": [far, near, *data["series"]]})
    flat = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [0, 1]]
    assert [line.get_ydata()[0] for line in flat] == [pytest.approx(89)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["raw pixels: 10.00 (outside)", "untrained: 89.00"]
    low, high = figure.axes[0].get_ylim()
    assert 85 < low < 89
    assert 98 < high < 101


def test_anova_bars_are_stacked_means_with_whiskers_at_their_tops() -> None:
    data = {
        "figure": "anova",
        "series": [
            series("anova", "0L", 0, within_sequence=[0.9, 0.1], within_class=[0.0, 0.5], between_class=[0.1, 0.4]),
            series("anova", "0L", 1, within_sequence=[0.9, 0.3], within_class=[0.0, 0.5], between_class=[0.1, 0.2]),
            series("anova", "2L", 0, within_sequence=[0.9, 0.2], within_class=[0.0, 0.2], between_class=[0.1, 0.6]),
        ],
    }
    axes = draw(data).axes[0]
    bars = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in axes.patches]
    first = [(0, 0, 20), (0, 20, 50), (0, 70, 30)]
    second = [(1, 0, 20), (1, 20, 20), (1, 40, 60)]
    assert bars == [pytest.approx(bar) for bar in first + second]
    assert [w[1:] for w in whiskers(axes)] == [pytest.approx((20, 100 * math.sqrt(0.02))), pytest.approx((70, 0))]


def test_two_levels_have_two_parts_and_are_not_mixed_with_three() -> None:
    two = [series("anova", label, within_sequence=None) for label in ("0L", "2L")]
    assert len(draw({"figure": "anova", "series": two}).axes[0].patches) == 4
    message = "anova: runs with three levels .* cannot share a picture: 4L has three, 0L two"
    with pytest.raises(UserError, match=message):
        draw({"figure": "anova", "series": [*two, series("anova", "4L")]})


def test_a_band_is_one_sd_and_one_seed_has_none() -> None:
    values = {"0L": ([0.1, 0.5], [0.3, 0.5]), "2L": ([0.6, 0.7],)}
    axes = draw(runs("similarity", "similarity", values)).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [pytest.approx([0.2, 0.5]), [0.6, 0.7]]
    (band,) = axes.collections
    heights = sorted({round(y, 9) for x, y in band.get_paths()[0].vertices if x == 0})
    assert heights == pytest.approx([0.2 - math.sqrt(0.02), 0.2 + math.sqrt(0.02)])


def test_a_layer_without_a_value_is_a_gap() -> None:
    data = runs("similarity", "similarity", {"0L": ([None, 0.5],)})
    (line,) = draw(data).axes[0].lines
    assert math.isnan(line.get_ydata()[0])
    assert line.get_ydata()[1] == 0.5


def test_the_spectrum_leaves_out_rounding_and_marks_k() -> None:
    data = runs("spectrum", "k_alpha", {"0L": (2.0, 3.0)}, eigenvalues_mean=[8.0, 2.0, 0.5, 1e-16])
    figure = draw(data)
    decay, mark, point = figure.axes[0].lines
    assert (list(decay.get_xdata()), list(decay.get_ydata())) == ([1, 2, 3], [8, 2, 0.5])
    assert list(mark.get_xdata()) == [2.5, 2.5]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (2.5, pytest.approx(1.0))  # half-way down a log axis
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["0L: 2.5"]


def test_sublayers_are_ratios_by_panel() -> None:
    figure = draw(sample("sublayers"))
    found = {axes.get_title(): list(axes.lines[1].get_ydata()) for axes in figure.axes if axes.get_title()}
    assert found == {
        "attention": pytest.approx([0.8, 0.75]),
        "MLP": pytest.approx([1.5, 1.2]),
        "attention heads alone": pytest.approx([1.1, 0.6]),
    }


def test_collapse_panels_are_those_that_a_run_has() -> None:
    gone = dict.fromkeys(("nc2_equinorm_classifier", "nc2_equiangular_classifier", "nc3", "nc4"))
    figure = draw(runs("collapse", "nc1", {"0L": (3.0, 5.0), "2L": (1.0,)}, **gone))
    titles = [axes.get_title() for axes in figure.axes if axes.axison]
    assert titles == ["NC1: within over between", "NC2: equal norms", "NC2: equal angles"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [4, 1]
    assert whiskers(figure.axes[0]) == [pytest.approx((0, 4, math.sqrt(2)))]
    assert "not defined: NC3, NC4" in figure.get_suptitle()
    assert not figure.legends


def test_clouds_show_one_seed_and_at_most_eight_schedules() -> None:
    many = [series("pca", f"{n}L", seed) for n in range(13) for seed in (1, 0)]
    figure = draw({"figure": "pca", "series": many})
    titles = [f"{n}L (seed 0)" for n in (0, 2, 3, 5, 7, 9, 10, 12)]
    assert [axes.get_title() for axes in figure.axes] == titles
    assert figure.get_suptitle() == "8 of 13 schedules"


def test_feature_maps_stand_beside_the_image_that_all_runs_have() -> None:
    one, other = series("feature_maps", "0L"), series("feature_maps", "2L")
    for key in ("images", "maps"):
        other[key] = other[key] * 2
    other["keys"] = ["val/8", "val/3"]
    figure = draw({"figure": "feature_maps", "series": [one, other]})
    assert [axes.get_title() for axes in figure.axes] == ["image", "0L", "2L"]
    other["keys"] = ["val/8", "val/9"]
    with pytest.raises(UserError, match="the runs of 0L and 2L have no image in common"):
        draw({"figure": "feature_maps", "series": [one, other]})


def test_a_broken_image_is_named() -> None:
    data = {"figure": "feature_maps", "series": [series("feature_maps", images=["R0lGOD"])]}
    with pytest.raises(UserError, match="image val/3 of 0L is not a base64 PNG"):
        draw(data)


def test_a_schedule_has_one_colour_whatever_stands_beside_it() -> None:
    def colors(*labels: str) -> dict[str, Any]:
        return looks(grouped([series("accuracy", label) for label in labels]))

    assert colors("0L", "2L", "4L")["2L"] == colors("2L")["2L"]
    assert colors("4L+2D0.5", "2S")["2S"].color == colors("2S")["2S"].color
    shades = [look.color for look in colors("0L", "1L", "2L", "3L", "4L").values()]
    assert len({*shades}) == 5
    twins = looks(grouped([series("accuracy", n, laplacian_heads=2.0) for n in ("6L@first4", "6L@last4")]))
    first, last = twins.values()
    assert first.color == last.color
    assert (first.dash, first.marker) != (last.dash, last.marker)
    assert last.marker in MARKERS
    assert looks(grouped([series("accuracy", "untrained", reference=True)]))["untrained"].color == GREY
