"""Head schedules: which kind each head of each layer has.

Forms that ``HeadSchedule.parse`` reads (L layers, H heads):

- ``6``: six Laplacian heads in every layer (arXiv 2602.09297, section 3); ``0`` is the baseline.
- ``[0, 2, 2, 0]``: Laplacian heads for each layer, exactly L numbers.
- ``[[attention, laplacian], ...]``: the whole table, L lists of H kinds; numbers and lists may be mixed.
- ``{laplacian: 6, "deescalated(0.5)": [2, 2, 0, 0]}``: counts for each kind, as a number or for each layer; the other
  heads are attention.
- a string: a schedule's name (below).

Names are short, safe in file names, and read back as the same schedule:

- ``6L`` uniform; ``4L+2D0.5`` a mixture, in this order at the end of each layer; the heads before are attention.
- ``6L@first4``, ``6L@last4``, ``6L@every2`` (layers 2, 4, 6, ... counted from 1).
- ``0-12L`` a linear ramp from the first to the last layer, rounded half up.
- ``48L@random7``: 48 Laplacian heads spread over all layers at random, seed 7.
- ``0L_2Lx10_0L``: layer by layer, ``x10`` repeats.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lapbench.errors import UserError
from lapbench.heads.kinds import ATTENTION, CODE_PATTERN, LAPLACIAN, HeadKind

Layer = tuple[HeadKind, ...]
HeadSpec = int | str | Sequence[object] | Mapping[str, object]

_TERM = re.compile(rf"([0-9]+)({CODE_PATTERN})")
_RAMP = re.compile(rf"([0-9]+)-([0-9]+)({CODE_PATTERN})")
_PLACED = re.compile(rf"([0-9]+)({CODE_PATTERN})@(first|last|every|random)([0-9]+)")


@dataclass(frozen=True)
class HeadSchedule:
    """An immutable L x H table of head kinds.

    Attributes:
        layers: For each layer, the kinds of its heads in order. Laplacian heads stand last.
        given_name: Name of a random schedule; its seed cannot be read off the table.
    """

    layers: tuple[Layer, ...]
    given_name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.layers or not self.layers[0] or len({len(layer) for layer in self.layers}) != 1:
            raise UserError(f"head schedule: expected layers of one equal number of heads, got {self.layers!r}")

    @classmethod
    def parse(cls, spec: object, num_layers: int, num_heads: int) -> "HeadSchedule":
        """Reads any of the forms above for a model of ``num_layers`` x ``num_heads``.

        Raises:
            UserError: Wrong length, a count outside 0..H, a bool, a float, or an unknown kind. Nothing is ever
                truncated or clamped.
        """
        if isinstance(spec, HeadSchedule):
            if (spec.num_layers, spec.num_heads) != (num_layers, num_heads):
                raise UserError(
                    f"head schedule: expected {num_layers} layers x {num_heads} heads, "
                    f"got {spec.num_layers} x {spec.num_heads}"
                )
            return spec
        if isinstance(spec, str):
            return _from_name(spec.strip(), num_layers, num_heads)
        if isinstance(spec, Mapping):
            return cls(_from_mapping(spec, num_layers, num_heads))
        if isinstance(spec, Sequence):
            _check_length(len(spec), num_layers, "heads")
            return cls(tuple(_layer(entry, num_heads, f"layer {i}") for i, entry in enumerate(spec)))
        return cls((_layer(spec, num_heads, "every layer"),) * num_layers)

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Number of heads H of each layer."""
        return len(self.layers[0])

    @property
    def name(self) -> str:
        """The first of the names above that fits; ``parse(name, L, H)`` gives an equal schedule."""
        if self.given_name is not None:
            return self.given_name
        return next(self._candidate_names())

    def count(self, spec: str) -> int:
        """Number of heads of the kind ``spec`` in the whole table."""
        kind = HeadKind.parse(spec)
        return sum(layer.count(kind) for layer in self.layers)

    def _candidate_names(self) -> Iterator[str]:
        runs = [(name, len(list(group))) for name, group in groupby(map(_layer_name, self.layers))]
        if len(runs) == 1:
            yield runs[0][0]
        kinds = {kind for layer in self.layers for kind in layer} - {ATTENTION}
        if len(kinds) == 1:
            kind = kinds.pop()
            counts = [layer.count(kind) for layer in self.layers]
            for text in (*self._placements(counts, kind), f"{counts[0]}-{counts[-1]}{kind.code}"):
                if _from_name(text, self.num_layers, self.num_heads) == self:
                    yield text
        yield "_".join(name if repeats == 1 else f"{name}x{repeats}" for name, repeats in runs)

    @staticmethod
    def _placements(counts: list[int], kind: HeadKind) -> Iterator[str]:
        filled = [i for i, n in enumerate(counts) if n]
        term = f"{max(counts)}{kind.code}"
        yield f"{term}@first{len(filled)}"
        yield f"{term}@last{len(filled)}"
        yield f"{term}@every{filled[0] + 1}"


def _layer_name(layer: Layer) -> str:
    runs = [(kind, len(list(group))) for kind, group in groupby(layer)]
    if runs[0][0] == ATTENTION:  # leading attention heads are what a name leaves out
        runs = runs[1:] or [(LAPLACIAN, 0)]
    return "+".join(f"{n}{kind.code}" for kind, n in runs)


def _check_length(got: int, num_layers: int, where: str) -> None:
    if got != num_layers:
        raise UserError(f"{where}: expected {num_layers} entries (one for each layer), got {got}")


def _count(value: object, num_heads: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"heads of {where}: expected a whole number in 0..{num_heads}, got {value!r}")
    if not 0 <= value <= num_heads:
        raise UserError(f"heads of {where}: expected 0..{num_heads} (the model has {num_heads} heads), got {value}")
    return value


def _fill(terms: Sequence[tuple[int, HeadKind]], num_heads: int, where: str) -> Layer:
    """Puts the terms at the end of a layer, attention before them."""
    terms = [term for term in terms if term[0]]
    total = sum(n for n, _ in terms)
    if total > num_heads:
        raise UserError(
            f"heads of {where}: expected at most {num_heads} (the model has {num_heads} heads), got {total}"
        )
    if total < num_heads and terms and terms[0][1] == ATTENTION:
        raise UserError(
            f"heads of {where}: expected {num_heads} in all, as the attention heads are counted too, got {total}"
        )
    return (ATTENTION,) * (num_heads - total) + tuple(kind for n, kind in terms for _ in range(n))


def _layer(entry: object, num_heads: int, where: str) -> Layer:
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        if len(entry) != num_heads:
            raise UserError(f"heads of {where}: expected {num_heads} kinds (one for each head), got {len(entry)}")
        return tuple(map(HeadKind.parse, entry))
    if isinstance(entry, str):
        return _layer_from_name(entry, num_heads, where)
    return _fill([(_count(entry, num_heads, where), LAPLACIAN)], num_heads, where)


def _from_mapping(spec: Mapping[str, object], num_layers: int, num_heads: int) -> tuple[Layer, ...]:
    counts: dict[HeadKind, list[int]] = {}
    for key, value in spec.items():
        kind = HeadKind.parse(key)
        if kind in counts:
            raise UserError(f"heads: {kind.spec} is given twice")
        if isinstance(value, Sequence) and not isinstance(value, str):
            _check_length(len(value), num_layers, f"heads of kind {kind.spec}")
            counts[kind] = [_count(n, num_heads, f"kind {kind.spec}, layer {i}") for i, n in enumerate(value)]
        else:
            counts[kind] = [_count(value, num_heads, f"kind {kind.spec}")] * num_layers
    # Laplacian heads take the last positions of a layer, as in the authors' code.
    kinds = sorted(counts, key=lambda kind: (kind == LAPLACIAN) - (kind == ATTENTION))
    return tuple(_fill([(counts[k][i], k) for k in kinds], num_heads, f"layer {i}") for i in range(num_layers))


def _layer_from_name(text: str, num_heads: int, where: str) -> Layer:
    terms = []
    for part in text.split("+"):
        match = _TERM.fullmatch(part)
        if match is None:
            raise UserError(
                f"heads of {where}: cannot read {text!r}; expected for example 6L or 4L+2D0.5 (for all layers also 6, "
                "0-12L, 6L@last4, 48L@random7 or 0L_2Lx10_0L)"
            )
        terms.append((int(match[1]), HeadKind.parse(match[2])))
    return _fill(terms, num_heads, where)


def _from_name(text: str, num_layers: int, num_heads: int) -> HeadSchedule:
    if re.fullmatch(r"[0-9]+", text):  # a number that arrives as text, from a command line
        return HeadSchedule((_layer(int(text), num_heads, "every layer"),) * num_layers)
    if match := _RAMP.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        _count(max(first, last), num_heads, repr(text))
        if num_layers == 1 and first != last:
            raise UserError(f"heads {text!r}: a ramp needs at least 2 layers, the model has 1")
        steps = max(num_layers - 1, 1)
        # Half up, in whole numbers: round() would send both 0.5 and 1.5 to an even neighbour.
        counts = [first + (2 * (last - first) * i + steps) // (2 * steps) for i in range(num_layers)]
        return _counted(counts, match[3], num_heads)
    if match := _PLACED.fullmatch(text):
        return _placed(int(match[1]), match[2], match[3], int(match[4]), num_layers, num_heads, text)
    if "_" not in text and "x" not in text:
        return HeadSchedule((_layer_from_name(text, num_heads, "every layer"),) * num_layers)
    layers: list[Layer] = []
    length = 0  # counted apart from the list, so that a huge repeat builds no huge list
    for part in text.split("_"):
        name, times, repeats = part.partition("x")
        if times and not re.fullmatch(r"[1-9][0-9]{0,8}", repeats):
            raise UserError(f"heads: cannot read {part!r} in {text!r}; expected a repeat such as 2Lx10")
        length += int(repeats or 1)
        layers += [_layer_from_name(name, num_heads, f"layer {len(layers)}")] * min(int(repeats or 1), num_layers)
    _check_length(length, num_layers, f"heads {text!r}")
    return HeadSchedule(tuple(layers))


def _counted(counts: Sequence[int], code: str, num_heads: int) -> HeadSchedule:
    kind = HeadKind.parse(code)
    return HeadSchedule(tuple(_fill([(n, kind)], num_heads, f"layer {i}") for i, n in enumerate(counts)))


def _placed(n: int, code: str, where: str, number: int, num_layers: int, num_heads: int, text: str) -> HeadSchedule:
    if where == "random":
        if n > num_layers * num_heads:
            raise UserError(f"heads {text!r}: expected at most {num_layers * num_heads} heads in all, got {n}")
        cells = random.Random(number).sample(range(num_layers * num_heads), n)
        per_layer = Counter(cell // num_heads for cell in cells)
        schedule = _counted([per_layer[i] for i in range(num_layers)], code, num_heads)
        return HeadSchedule(schedule.layers, given_name=f"{n}{HeadKind.parse(code).code}@random{number}")
    if not 1 <= number <= num_layers:
        raise UserError(f"heads {text!r}: expected 1..{num_layers} after @{where} (the model's layers), got {number}")
    _count(n, num_heads, repr(text))
    chosen = {
        "first": range(number),
        "last": range(num_layers - number, num_layers),
        "every": range(number - 1, num_layers, number),
    }[where]
    return _counted([n if i in chosen else 0 for i in range(num_layers)], code, num_heads)
