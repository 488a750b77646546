"""The data of a figure: ``{"figure": NAME, "series": [...]}``, one series for each run. What they hold, and groups.

A series of any figure has ``label``, ``schedule``, ``laplacian_heads`` (mean number per layer, or None), ``num_heads``
(or None) and ``seed`` (or None), may have ``reference`` (True for what others are compared with, such as raw pixels),
and has its figure's ``FIELDS``. Layers are numbered from 0, None stands for what is not defined, and NaN never occurs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapbench.errors import UserError
from lapbench.results.cells import natural
from lapbench.results.files import read_json
from lapbench.results.statistics import Summary, summarize

Series = dict[str, Any]
Figures = dict[str, Any]

Check = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Check) -> Check:
    return f"{check[0]} or null", lambda value: value is None or check[1](value)


def _list(check: Check, length: int | None = None) -> Check:
    what = f"a list of {check[0]}s" if length is None else f"{length} x {check[0]}"
    return (
        what,
        lambda value: isinstance(value, (list, tuple)) and length in (None, len(value)) and all(map(check[1], value)),
    )


_INT: Check = ("integer", _is_int)
_NUMBER: Check = ("number", _is_number)
_TEXT: Check = ("string", _is_text)
_NUMBER_OR_NONE = _or_none(_NUMBER)
_INTS = _list(_INT)
_CURVE = _list(_NUMBER_OR_NONE)
_POINTS = _list(_list(_NUMBER, 2))
_KIND_KEYS = ("variance", "mean_shift")
_KIND: Check = (
    "object with variance and mean_shift",
    lambda value: isinstance(value, dict) and all(_or_none(_CURVE)[1](value.get(key)) for key in _KIND_KEYS),
)
_KINDS: Check = (
    "object of head kinds",
    lambda value: isinstance(value, dict) and all(map(_KIND[1], value.values())),
)

COLLAPSE = (
    "nc1",
    "nc2_equinorm_means",
    "nc2_equiangular_means",
    "nc2_equinorm_classifier",
    "nc2_equiangular_classifier",
    "nc3",
    "nc4",
)

_COMMON: dict[str, Check] = {
    "label": _TEXT,
    "schedule": _TEXT,
    "laplacian_heads": _NUMBER_OR_NONE,
    "num_heads": _or_none(_INT),
    "seed": _or_none(_INT),
}

FIELDS: dict[str, dict[str, Check]] = {
    "accuracy": {"metric": _TEXT, "value": _NUMBER},
    "anova": {
        "layers": _INTS,
        "within_sequence": _or_none(_CURVE),
        "within_class": _CURVE,
        "between_class": _CURVE,
    },
    "similarity": {"layers": _INTS, "similarity": _CURVE},
    "spectrum": {
        "eigenvalues_mean": _list(_NUMBER),
        "eigenvalues_std": _or_none(_CURVE),
        "alpha": _NUMBER,
        "k_alpha": _NUMBER_OR_NONE,
        "k_alpha_std": _NUMBER_OR_NONE,
    },
    "collapse": {"unit": _TEXT, **dict.fromkeys(COLLAPSE, _NUMBER_OR_NONE)},
    "pca": {
        "points": _POINTS,
        "classes": _INTS,
        "class_names": _or_none(_list(_TEXT)),
        "explained": _list(_NUMBER_OR_NONE, 2),
    },
    "feature_maps": {"images": _list(_TEXT), "maps": _list(_list(_list(_list(_NUMBER, 3)))), "keys": _list(_TEXT)},
    "simplex": {
        "points": _POINTS,
        "classes": _INTS,
        "chosen": _list(_INT, 3),
        "vertices": _list(_list(_NUMBER, 2), 3),
    },
    "sublayers": {
        "layers": _INTS,
        "before_attention": _CURVE,
        "after_attention": _CURVE,
        "after_mlp": _CURVE,
        "by_kind": _KINDS,
    },
}
"""By figure, the fields of a series beside those that all have."""

_EQUALLY_LONG: dict[str, tuple[str, ...]] = {
    "anova": ("layers", "within_sequence", "within_class", "between_class"),
    "similarity": ("layers", "similarity"),
    "spectrum": ("eigenvalues_mean", "eigenvalues_std"),
    "pca": ("points", "classes"),
    "feature_maps": ("images", "maps", "keys"),
    "simplex": ("points", "classes"),
    "sublayers": ("layers", "before_attention", "after_attention", "after_mlp"),
}


def problem(data: Any) -> str | None:
    """What is wrong with the data of a figure, in a few words; None if nothing is."""
    name = data.get("figure") if isinstance(data, dict) else None
    if name not in FIELDS:
        return f"key 'figure' must be one of {', '.join(FIELDS)}, got {_shorten(name)}"
    series = data.get("series")
    if not isinstance(series, list) or not series:
        return f"key 'series' must be a list of at least one series, got {_shorten(series)}"
    for index, each in enumerate(series):
        if not isinstance(each, dict):
            return f"series {index} must be an object, got {_shorten(each)}"
        for key, (expected, accepts) in (_COMMON | FIELDS[name]).items():
            if key not in each:
                return f"series {index}: key {key!r} is missing, expected {expected}"
            if not accepts(each[key]):
                return f"series {index}: key {key!r} must be {expected}, got {_shorten(each[key])}"
        lengths = {key: len(each[key]) for key in _EQUALLY_LONG.get(name, ()) if each[key] is not None}
        if len({*lengths.values()}) > 1:
            return f"series {index}: lists of different lengths: " + ", ".join(f"{k} {n}" for k, n in lengths.items())
    return None


def _shorten(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def load_figure(path: Path) -> Figures:
    """The data that `save_figure` wrote. UserError: unreadable, not JSON, or not the data of a figure."""
    data = read_json(path)
    if wrong := problem(data):
        raise UserError(f"{path} does not hold a figure: {wrong}")
    return data


def merge(parts: Iterable[Figures]) -> Figures:
    """The series of several runs in one picture, in the order given.

    Raises:
        ValueError: no parts, or parts of different figures.
    """
    parts = list(parts)
    if len(names := {part["figure"] for part in parts}) != 1:
        raise ValueError(f"expected the data of one figure, got {', '.join(sorted(names)) or 'nothing'}")
    return {"figure": parts[0]["figure"], "series": [series for part in parts for series in part["series"]]}


@dataclass(frozen=True)
class Group:
    """The series of one label: the same heads, other seeds."""

    label: str
    laplacian_heads: float | None
    num_heads: int | None
    reference: bool
    members: tuple[Series, ...]

    @property
    def first(self) -> Series:
        """That of the lowest seed, for what cannot be averaged."""
        return min(self.members, key=lambda series: math.inf if series["seed"] is None else series["seed"])

    def common(self, key: str) -> Any:
        """The value that all members share. UserError: they do not."""
        values = [series[key] for series in self.members]
        if any(value != values[0] for value in values):
            raise UserError(
                f"cannot average runs of {self.label}: they differ in {key}; expected equal models and data"
            )
        return values[0]


def grouped(series: Sequence[Series]) -> list[Group]:
    """The series by label, ordered by the number of Laplacian heads, then label; references last."""
    labels: dict[str, list[Series]] = {}
    for each in series:
        labels.setdefault(each["label"], []).append(each)
    groups = [
        Group(
            label,
            members[0]["laplacian_heads"],
            members[0]["num_heads"],
            bool(members[0].get("reference")),
            tuple(members),
        )
        for label, members in labels.items()
    ]
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[bool, float, list[str | int]]:
    heads = math.inf if group.laplacian_heads is None else group.laplacian_heads
    return group.reference, heads, natural(group.label)


def over_seeds(values: Iterable[float | None]) -> Summary | None:
    """Mean and SD (ddof 1) of the values that are defined; None if none is."""
    defined = [value for value in values if value is not None]
    return summarize(defined) if defined else None


def curve(group: Group, key: str) -> list[Summary | None]:
    """`over_seeds` of a list, entry by entry. UserError: lists of different lengths."""
    lists = [series[key] for series in group.members if series[key] is not None]
    if len({len(values) for values in lists}) > 1:
        raise UserError(
            f"cannot average runs of {group.label}: {key} has {' and '.join(sorted({str(len(v)) for v in lists}))} "
            "entries; expected models of one depth and width"
        )
    return [over_seeds(values) for values in zip(*lists, strict=True)]
