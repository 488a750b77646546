"""Head kinds: the table of coefficients, names, codes, and what is refused."""

import dataclasses

import pytest

from lapbench.errors import UserError
from lapbench.heads import HeadKind
from lapbench.heads.kinds import KINDS


@pytest.mark.parametrize(
    ("spec", "code", "coefficients"),
    [
        ("attention", "A", (0, 1, 0)),
        ("laplacian", "L", (1, -1, 0)),
        ("deescalated(0.5)", "D0.5", (0, 1, -0.5)),
        ("deescalated(1)", "D1", (0, 1, -1)),
        ("deescalated(-0.25)", "D-0.25", (0, 1, 0.25)),
        ("shaped", "S", (1, 1, -1)),
        ("highpass(0.5)", "H0.5", (0, 1.5, -0.5)),
        ("highpass(1e-05)", "H1e-05", (0, 1.00001, -0.00001)),
        ("deescalated(1e16)", "D1e16", (0, 1, -1e16)),
        ("learned(attention)", "TA", (0, 1, 0)),
        ("learned(laplacian)", "TL", (1, -1, 0)),
        ("learned(shaped)", "TS", (1, 1, -1)),
        ("learned(deescalated(-0.5))", "TD-0.5", (0, 1, 0.5)),
    ],
)
def test_table(spec: str, code: str, coefficients: tuple[float, float, float]) -> None:
    kind = HeadKind.parse(spec)
    assert (kind.spec, kind.code, kind.coefficients) == (spec, code, coefficients)
    assert kind.learned == spec.startswith("learned")
    assert HeadKind.parse(code) == kind
    assert HeadKind.parse(kind.spec) == kind
    assert HeadKind.parse(f"  {spec} ") == kind
    assert HeadKind.parse(kind) is kind


@pytest.mark.parametrize("number", ["0.5", ".5", "0.50", " 0.5", "5e-1"])
def test_equal_parameters_make_equal_kinds(number: str) -> None:
    assert HeadKind.parse(f"deescalated({number})") == HeadKind.parse("deescalated(0.5)")


def test_a_learned_kind_differs_from_its_start() -> None:
    assert HeadKind.parse("learned(laplacian)") != HeadKind.parse("laplacian")
    assert HeadKind.parse("learned(TS)".replace("TS", "S")) == HeadKind.parse("learned(shaped)")


def test_kinds_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeadKind.parse("laplacian").a = 2.0  # type: ignore[misc]


def test_letters_are_unique_capitals() -> None:
    letters = [entry.letter for entry in KINDS.values()]
    assert len(set(letters)) == len(letters)
    assert all(len(letter) == 1 and letter.isupper() for letter in letters)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("laplacain", "unknown kind 'laplacain'; expected one of attention, laplacian, .* \\(did you mean laplacian"),
        ("Laplacian", "unknown kind 'Laplacian'; .* \\(did you mean laplacian"),
        ("Highpass(0.5)", "unknown kind .* \\(did you mean highpass"),
        ("", "unknown kind ''"),
        ("X", "unknown kind 'X'"),
        ("D0.5.5", "unknown kind"),
        ("shaped(2)", "shaped takes no parameter, got 'shaped\\(2\\)'"),
        ("attention()", "attention takes no parameter"),
        ("L2", "laplacian takes no parameter, got 'L2'"),
        ("deescalated", "needs a parameter, for example deescalated\\(0.5\\)"),
        ("D", "deescalated needs a parameter"),
        ("learned", "needs a parameter, for example learned\\(laplacian\\)"),
        ("highpass()", "highpass expects a finite number, got ''"),
        ("highpass(one)", "highpass expects a finite number, got 'one' in 'highpass\\(one\\)'"),
        ("highpass(nan)", "finite number"),
        ("deescalated(inf)", "finite number"),
        ("deescalated(1e999)", "finite number"),
        ("learned(learned(laplacian))", "learned twice"),
        ("learned(laplacain)", "unknown kind 'laplacain'"),
        (6, "expected a name such as laplacian, got 6"),
        (None, "expected a name such as laplacian, got None"),
    ],
)
def test_refused(text: object, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        HeadKind.parse(text)
    assert "\n" not in str(caught.value)
