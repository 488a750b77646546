"""Head kinds: one family of operators, M = a I + b P + c C.

A head with values V (T x d_h) and row-stochastic attention P (T x T) outputs M V. I is the identity and C averages
uniformly over the positions that the attention mask allows. A new kind is one entry of ``KINDS``.

==================  ===================  =============================================================
kind                (a, b, c)            source
==================  ===================  =============================================================
attention           (0, 1, 0)            the baseline
laplacian           (1, -1, 0)           Laplacian heads, arXiv 2602.09297, eq. 3
deescalated(alpha)  (0, 1, -alpha)       Post-Norm collapse, arXiv 2608.09417, Corollary 3.3
shaped              (1, 1, -1)           shaped attention at initialisation, Noci et al. 2023
highpass(omega)     (0, 1+omega, -omega) AttnScale, Wang et al. 2022, arXiv 2203.05962
learned(kind)       trainable, per head  starts at that kind; open question at the end of arXiv 2602.09297
==================  ===================  =============================================================
"""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lapbench.errors import UserError


@dataclass(frozen=True)
class HeadKind:
    """What one head computes: M V with M = a I + b P + c C.

    Attributes:
        spec: Name as configs write it: ``laplacian``, ``deescalated(0.5)``, ``learned(shaped)``.
        code: Short form for schedule names: ``L``, ``D0.5``, ``TS``.
        a: Coefficient of the values themselves.
        b: Coefficient of the attention-weighted average.
        c: Coefficient of the uniform average.
        learned: True when a, b and c are trainable for each head and the numbers here are their start.
    """

    spec: str
    code: str
    a: float
    b: float
    c: float
    learned: bool = False

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c)."""
        return (self.a, self.b, self.c)

    @classmethod
    def parse(cls, text: object) -> "HeadKind":
        """Reads a kind: ``laplacian``, ``highpass(0.5)``, ``learned(laplacian)``, or a code: ``L``, ``H0.5``, ``TL``.

        Raises:
            UserError: The name is unknown, or its parameter is missing, not wanted or not a finite number.
        """
        if isinstance(text, HeadKind):
            return text
        if not isinstance(text, str):
            raise UserError(f"head kind: expected a name such as laplacian, got {text!r}")
        text = text.strip()
        return _parse_code(text) or _parse_spec(text)


ATTENTION = HeadKind("attention", "A", 0.0, 1.0, 0.0)
LAPLACIAN = HeadKind("laplacian", "L", 1.0, -1.0, 0.0)


def _number(value: float) -> str:
    """The shortest text that reads back as the same float, without a plus sign: 1, 0.5, 1e-05, 1e16."""
    return repr(value).removesuffix(".0").replace("e+", "e")


def _deescalated(alpha: float) -> HeadKind:
    return HeadKind(f"deescalated({_number(alpha)})", f"D{_number(alpha)}", 0.0, 1.0, -alpha)


def _highpass(omega: float) -> HeadKind:
    return HeadKind(f"highpass({_number(omega)})", f"H{_number(omega)}", 0.0, 1.0 + omega, -omega)


def _learned(start: HeadKind) -> HeadKind:
    if start.learned:
        raise UserError(f"head kind: learned({start.spec}) is learned twice; expected a fixed kind inside learned(...)")
    return HeadKind(f"learned({start.spec})", f"T{start.code}", *start.coefficients, learned=True)


class KindEntry(NamedTuple):
    """A row of ``KINDS``: the letter for schedule names, and a constant or what makes the kind from its parameter."""

    letter: str
    kind: HeadKind | None = None
    from_number: Callable[[float], HeadKind] | None = None
    from_kind: Callable[[HeadKind], HeadKind] | None = None


KINDS: dict[str, KindEntry] = {
    "attention": KindEntry("A", kind=ATTENTION),
    "laplacian": KindEntry("L", kind=LAPLACIAN),
    "deescalated": KindEntry("D", from_number=_deescalated),
    "shaped": KindEntry("S", kind=HeadKind("shaped", "S", 1.0, 1.0, -1.0)),
    "highpass": KindEntry("H", from_number=_highpass),
    "learned": KindEntry("T", from_kind=_learned),
}
_NAME_OF_LETTER = {entry.letter: name for name, entry in KINDS.items()}
_WRAPPERS = "".join(entry.letter for entry in KINDS.values() if entry.from_kind)
_LETTERS = "".join(entry.letter for entry in KINDS.values() if not entry.from_kind)
_NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?"
# What the codes of all kinds look like: L, D0.5, TS, TH-1e-05.
CODE_PATTERN = rf"[{_WRAPPERS}]?[{_LETTERS}](?:{_NUMBER})?"


def _parse_code(text: str) -> HeadKind | None:
    if re.fullmatch(CODE_PATTERN, text) is None:
        return None
    return _build(_NAME_OF_LETTER[text[0]], text[1:] or None, text)


def _parse_spec(text: str) -> HeadKind:
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if match is None or match[1] not in KINDS:
        near = difflib.get_close_matches((match[1] if match else text).lower(), KINDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"head kind: unknown kind {text!r}; expected one of {', '.join(KINDS)}{hint}")
    return _build(match[1], match[2], text)


def _build(name: str, parameter: str | None, text: str) -> HeadKind:
    entry = KINDS[name]
    if entry.kind is not None:
        if parameter is not None:
            raise UserError(f"head kind: {name} takes no parameter, got {text!r}")
        return entry.kind
    if parameter is None:
        example = "learned(laplacian)" if entry.from_kind else f"{name}(0.5)"
        raise UserError(f"head kind: {name} needs a parameter, for example {example}; got {text!r}")
    if entry.from_kind is not None:
        return entry.from_kind(HeadKind.parse(parameter))
    assert entry.from_number is not None
    try:
        value = float(parameter)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"head kind: {name} expects a finite number, got {parameter!r} in {text!r}")
    return entry.from_number(value)
