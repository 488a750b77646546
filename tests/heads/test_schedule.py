"""Schedules: every form, names that read back, and what is refused."""

import pickle
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapbench.errors import UserError
from lapbench.heads import HeadKind, HeadSchedule


def table(schedule: HeadSchedule) -> list[str]:
    """A schedule as one string of codes for each layer."""
    return [" ".join(kind.code for kind in layer) for layer in schedule.layers]


@pytest.mark.parametrize(
    ("spec", "rows", "name"),
    [
        (0, ["A A A A"] * 3, "0L"),
        (2, ["A A L L"] * 3, "2L"),
        (4, ["L L L L"] * 3, "4L"),
        ("2", ["A A L L"] * 3, "2L"),
        (" 2L ", ["A A L L"] * 3, "2L"),
        ("2L+1D0.5", ["A L L D0.5"] * 3, "2L+1D0.5"),
        ("1D0.50+2L", ["A D0.5 L L"] * 3, "1D0.5+2L"),
        ("1L+2A", ["A L A A"] * 3, "1L+2A"),
        ([0, 2, 0], ["A A A A", "A A L L", "A A A A"], "2L@every2"),
        ([0, 1, 2], ["A A A A", "A A A L", "A A L L"], "0-2L"),
        ([4, 2, 0], ["L L L L", "A A L L", "A A A A"], "4-0L"),
        ([1, 1, 0], ["A A A L", "A A A L", "A A A A"], "1L@first2"),
        ([1, 3, 2], ["A A A L", "A L L L", "A A L L"], "1L_3L_2L"),
        (["1L", 0, "1S+1TL"], ["A A A L", "A A A A", "A A S TL"], "1L_0L_1S+1TL"),
        (
            [["laplacian", "attention", "shaped", "learned(laplacian)"], 1, "1H-1e-05"],
            ["L A S TL", "A A A L", "A A A H-1e-05"],
            "1L+1A+1S+1TL_1L_1H-1e-05",
        ),
        ({"laplacian": 2}, ["A A L L"] * 3, "2L"),
        ({"L": 1, "shaped": [1, 0, 2]}, ["A A S L", "A A A L", "A S S L"], "1S+1L_1L_2S+1L"),
        ({"laplacian": 1, "attention": 3}, ["A A A L"] * 3, "1L"),
        ({"laplacian": 1, "deescalated(0.5)": 1, "attention": 2}, ["A A D0.5 L"] * 3, "1D0.5+1L"),
        ({}, ["A A A A"] * 3, "0L"),
        ("0-2L", ["A A A A", "A A A L", "A A L L"], "0-2L"),
        ("0-3L", ["A A A A", "A A L L", "A L L L"], "0-3L"),  # 1.5 is rounded up
        ("3-0L", ["A L L L", "A A L L", "A A A A"], "3-0L"),
        ("2-2L", ["A A L L"] * 3, "2L"),
        ("0-2D-0.5", ["A A A A", "A A A D-0.5", "A A D-0.5 D-0.5"], "0-2D-0.5"),
        ("2L@first1", ["A A L L", "A A A A", "A A A A"], "2L@first1"),
        ("2L@first3", ["A A L L"] * 3, "2L"),
        ("2L@last1", ["A A A A", "A A A A", "A A L L"], "2L@last1"),
        ("2L@every1", ["A A L L"] * 3, "2L"),
        ("2L@every2", ["A A A A", "A A L L", "A A A A"], "2L@every2"),
        ("2L@every3", ["A A A A", "A A A A", "A A L L"], "2L@last1"),
        ("1TD0.5@last2", ["A A A A", "A A A TD0.5", "A A A TD0.5"], "1TD0.5@last2"),
        ("0L_2Lx2", ["A A A A", "A A L L", "A A L L"], "2L@last2"),
        ("1Lx1_3L_2L", ["A A A L", "A L L L", "A A L L"], "1L_3L_2L"),
        ("1D1e16x2_0L", ["A A A D1e16", "A A A D1e16", "A A A A"], "1D1e16@first2"),
    ],
    ids=str,
)
def test_forms(spec: object, rows: list[str], name: str) -> None:
    schedule = HeadSchedule.parse(spec, 3, 4)
    assert table(schedule) == rows
    assert schedule.name == name
    assert HeadSchedule.parse(name, 3, 4) == schedule


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("6L", [6] * 12),
        ("0-12L", [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]),  # 12 i / 11: 5.45 is 5, 6.55 is 7
        ("6L@first4", [6] * 4 + [0] * 8),
        ("6L@last4", [0] * 8 + [6] * 4),
        ("6L@every2", [0, 6] * 6),
        ("0L_2Lx10_0L", [0] + [2] * 10 + [0]),
    ],
)
def test_names_of_the_documentation(name: str, counts: list[int]) -> None:
    schedule = HeadSchedule.parse(name, 12, 12)
    assert [layer.count(HeadKind.parse("laplacian")) for layer in schedule.layers] == counts
    assert schedule == HeadSchedule.parse(counts, 12, 12)
    assert schedule.name == HeadSchedule.parse(counts, 12, 12).name == name
    assert schedule.count("laplacian") == schedule.count("L") == sum(counts)
    assert schedule.count("attention") == 144 - sum(counts)


@pytest.mark.parametrize(
    ("spec", "num_layers", "name"),
    [
        (3, 1, "3L"),
        ("3-3L", 1, "3L"),
        ([0], 1, "0L"),
        ([0, 2], 2, "2L@last1"),
        ("0-2L", 2, "2L@last1"),
        ([2, 0], 2, "2L@first1"),
        ([1, 2], 2, "1-2L"),
        ([1, 1], 2, "1L"),
        ("0-1L", 4, "1L@last2"),  # a ramp of one step
        ([1, 1, 2, 2], 4, "1-2L"),
    ],
)
def test_few_layers(spec: object, num_layers: int, name: str) -> None:
    schedule = HeadSchedule.parse(spec, num_layers, 4)
    assert schedule.name == name
    assert HeadSchedule.parse(name, num_layers, 4) == schedule


KINDS = st.recursive(
    st.one_of(
        st.sampled_from(["attention", "laplacian", "shaped"]),
        st.builds(
            "{}({!r})".format,
            st.sampled_from(["deescalated", "highpass"]),
            st.one_of(
                st.floats(allow_nan=False, allow_infinity=False),
                st.sampled_from([0.5, -0.5, 1.0, -0.0, 1e-05, -1e-05, 1e16, 1e22, 5e-324, 1.7976931348623157e308]),
            ),
        ),
    ),
    lambda fixed: fixed.map("learned({})".format),
    max_leaves=2,
).filter(lambda spec: spec.count("learned") < 2)


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    """Tables of few kinds, as layers that repeat, so that every form of name comes up."""
    num_heads = draw(st.integers(1, 5))
    palette = draw(st.lists(KINDS, min_size=1, max_size=3))
    layer = st.lists(st.sampled_from([*palette, "attention"]), min_size=num_heads, max_size=num_heads)
    ordered = st.integers(0, num_heads).map(lambda n: ["attention"] * (num_heads - n) + [palette[0]] * n)
    layers = draw(st.lists(st.one_of(layer, ordered), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(layers), min_size=1, max_size=8))


@given(tables())
def test_names_read_back(spec: list[list[str]]) -> None:
    schedule = HeadSchedule.parse(spec, len(spec), len(spec[0]))
    assert [[kind.spec for kind in layer] for layer in schedule.layers] == [
        [HeadKind.parse(head).spec for head in layer] for layer in spec
    ]
    again = HeadSchedule.parse(schedule.name, len(spec), len(spec[0]))
    assert again == schedule
    assert again.name == schedule.name
    assert re.fullmatch(r"[A-Za-z0-9_+.@-]+", schedule.name)
    assert schedule.name[0].isdigit()  # no hidden file, no option


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_names_of_counts_read_back(counts: list[int]) -> None:
    schedule = HeadSchedule.parse(counts, len(counts), 6)
    assert HeadSchedule.parse(schedule.name, len(counts), 6) == schedule


@given(st.integers(0, 6), st.integers(0, 6), st.integers(2, 12))
def test_ramps_are_rounded_half_up(first: int, last: int, num_layers: int) -> None:
    schedule = HeadSchedule.parse(f"{first}-{last}L", num_layers, 6)
    counts = [layer.count(HeadKind.parse("L")) for layer in schedule.layers]
    exact = [first + (last - first) * i / (num_layers - 1) for i in range(num_layers)]
    assert (counts[0], counts[-1]) == (first, last)
    assert all(-0.5 - 1e-9 < e - n <= 0.5 for n, e in zip(counts, exact, strict=True))
    assert all(n > e for n, e in zip(counts, exact, strict=True) if e % 1 == 0.5)


def test_random_is_reproducible_and_puts_laplacian_heads_last() -> None:
    schedule = HeadSchedule.parse("48L@random7", 12, 12)
    assert schedule.name == "48L@random7"
    assert schedule == HeadSchedule.parse("48L@random7", 12, 12)
    assert schedule != HeadSchedule.parse("48L@random8", 12, 12)
    assert schedule.count("laplacian") == 48
    assert HeadSchedule.parse("048L@random07", 12, 12).name == "48L@random7"
    attention = HeadKind.parse("attention")
    for layer in schedule.layers:
        assert list(layer) == sorted(layer, key=lambda kind: kind != attention)
    counts = [layer.count(HeadKind.parse("L")) for layer in schedule.layers]
    assert len(set(counts)) > 1
    assert HeadSchedule.parse(counts, 12, 12) == schedule  # the table is what counts, not how it came about
    assert pickle.loads(pickle.dumps(schedule)).name == "48L@random7"


def test_the_random_draw_is_fixed() -> None:
    """Runs of last year and of today have the same heads."""
    schedule = HeadSchedule.parse("6L@random0", 3, 4)
    assert [layer.count(HeadKind.parse("L")) for layer in schedule.layers] == [2, 3, 1]


def test_a_schedule_is_its_own_spec() -> None:
    schedule = HeadSchedule.parse("1-3L", 4, 4)
    assert HeadSchedule.parse(schedule, 4, 4) is schedule
    with pytest.raises(UserError, match="expected 12 layers x 4 heads, got 4 x 4"):
        HeadSchedule.parse(schedule, 12, 4)
    assert (schedule.num_layers, schedule.num_heads) == (4, 4)
    assert len({schedule, HeadSchedule.parse([1, 2, 2, 3], 4, 4)}) == 1  # 1.67 and 2.33: hashes follow equality


def test_a_malformed_table_is_refused() -> None:
    laplacian = HeadKind.parse("laplacian")
    for layers in ((), ((),), ((laplacian,), (laplacian, laplacian))):
        with pytest.raises(UserError, match="one equal number of heads"):
            HeadSchedule(layers)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (5, "heads of every layer: expected 0..4 .the model has 4 heads., got 5"),
        (-1, "expected 0..4 .*, got -1"),
        (True, "expected a whole number in 0..4, got True"),
        (2.0, "expected a whole number in 0..4, got 2.0"),
        (None, "expected a whole number in 0..4, got None"),
        ([1, 2], "heads: expected 3 entries .one for each layer., got 2"),
        ([1, 2, 3, 4], "expected 3 entries .*, got 4"),
        ([], "expected 3 entries .*, got 0"),
        ([1, 2, 5], "heads of layer 2: expected 0..4 .*, got 5"),
        ([1, False, 2], "heads of layer 1: expected a whole number in 0..4, got False"),
        ([1, 2.0, 2], "heads of layer 1: expected a whole number in 0..4, got 2.0"),
        ([1, ["laplacian"] * 3, 1], "heads of layer 1: expected 4 kinds .one for each head., got 3"),
        ([1, [1, 1, 0, 0], 1], "head kind: expected a name such as laplacian, got 1"),
        ([1, ["laplacain"] * 4, 1], "unknown kind 'laplacain'"),
        ([1, "5L", 1], "heads of layer 1: expected at most 4 .*, got 5"),
        ([1, "laplacian", 1], "heads of layer 1: cannot read 'laplacian'; expected for example 6L"),
        ("5L", "heads of every layer: expected at most 4 .*, got 5"),
        ("3L+2S", "expected at most 4 .*, got 5"),
        ("5", "expected 0..4 .*, got 5"),
        ("", "cannot read ''"),
        ("6X", "cannot read '6X'"),
        ("-1L", "cannot read '-1L'"),
        ("2.0", "cannot read '2.0'"),
        ("2L2", "laplacian takes no parameter, got 'L2'"),
        ("2D", "deescalated needs a parameter"),
        ("2TTL", "cannot read '2TTL'"),
        ("2L+", "cannot read '2L\\+'"),
        ("laplacian", "cannot read 'laplacian'"),
        ("0-5L", "heads of '0-5L': expected 0..4 .*, got 5"),
        ("0-4L@last2", "cannot read"),
        ("2L@first0", "heads '2L@first0': expected 1..3 after @first .the model's layers., got 0"),
        ("2L@last4", "expected 1..3 after @last .*, got 4"),
        ("2L@every4", "expected 1..3 after @every .*, got 4"),
        ("5L@last1", "heads of '5L@last1': expected 0..4 .*, got 5"),
        ("2L@middle2", "cannot read"),
        ("13L@random1", "heads '13L@random1': expected at most 12 heads in all, got 13"),
        ("2L@random", "cannot read"),
        ("2L_1L", "heads '2L_1L': expected 3 entries .*, got 2"),
        ("2Lx4", "expected 3 entries .*, got 4"),
        ("2Lx999999999", "expected 3 entries .*, got 999999999"),
        ("2Lx0_1Lx3", "cannot read '2Lx0' in '2Lx0_1Lx3'; expected a repeat such as 2Lx10"),
        ("2Lx_1Lx2", "cannot read '2Lx'"),
        ("2L__1L", "heads of layer 1: cannot read ''"),
        ("2A", "expected 4 in all, as the attention heads are counted too, got 2"),
        ("2A+1L", "expected 4 in all, as the attention heads are counted too, got 3"),
        ({"laplacian": 5}, "heads of kind laplacian: expected 0..4 .*, got 5"),
        ({"laplacian": 3, "shaped": [0, 0, 2]}, "heads of layer 2: expected at most 4 .*, got 5"),
        ({"laplacian": [1, 2]}, "heads of kind laplacian: expected 3 entries .*, got 2"),
        ({"laplacian": [1, 2, -1]}, "heads of kind laplacian, layer 2: expected 0..4 .*, got -1"),
        ({"laplacian": True}, "heads of kind laplacian: expected a whole number in 0..4, got True"),
        ({"laplacian": "2"}, "heads of kind laplacian: expected a whole number in 0..4, got '2'"),
        ({"laplacian": 1, "L": 2}, "laplacian is given twice"),
        ({"laplacain": 1}, "unknown kind 'laplacain'"),
        ({"attention": 2, "laplacian": 1}, "heads of layer 0: expected 4 in all, .*, got 3"),
        ({1: 2}, "expected a name such as laplacian, got 1"),
    ],
    ids=str,
)
def test_refused_naming_expected_and_given(spec: object, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        HeadSchedule.parse(spec, 3, 4)
    assert "\n" not in str(caught.value)


def test_a_ramp_needs_two_layers() -> None:
    with pytest.raises(UserError, match="heads '1-3L': a ramp needs at least 2 layers, the model has 1"):
        HeadSchedule.parse("1-3L", 1, 4)


@pytest.mark.parametrize("counts", [(0, 1, 2), range(3)], ids=str)
def test_any_sequence_is_a_list(counts: Sequence[int]) -> None:
    assert HeadSchedule.parse(counts, 3, 4) == HeadSchedule.parse([0, 1, 2], 3, 4)
