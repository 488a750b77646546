"""Sweep files: the runs that they become, and one clear line for each way of writing them wrong."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lapbench.config_files import find_config, load_yaml
from lapbench.errors import UserError
from lapbench.sweeps.grid import load_sweep
from lapbench.sweeps.sweep import as_argument, safe

HEADS = {"key": "model.init_args.backbone.heads", "values": [0, 2]}
SEED = {"key": "seed_everything", "values": [0, 1]}


def write(folder: Path, values: Any, name: str = "my.yaml") -> Path:
    (folder / "a.yaml").write_text("trainer: {max_epochs: 3}\n")
    (folder / "b.yaml").write_text("trainer: {max_epochs: 4}\n")
    path = folder / name
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_are_the_product_in_order(tmp_path: Path) -> None:
    values = {"base": ["a.yaml"], "axes": {"heads": HEADS, "seed": SEED}, "overrides": {"trainer.max_epochs": 60}}
    plan = load_sweep(write(tmp_path, values | {"name": "quick", "baseline": "0L", "metric": "test/top1"})).plan()
    assert (plan.name, plan.baseline, plan.metrics) == ("quick", "0L", ("test/top1",))
    assert plan.axes == {"heads": "schedule", "seed": "seed"}
    assert [run.folder for run in plan.runs] == ["heads-0_seed-0", "heads-0_seed-1", "heads-2_seed-0", "heads-2_seed-1"]
    assert plan.runs[2].labels == {"heads": "2", "seed": "0"}
    assert plan.runs[2].arguments == (
        "--config",
        "a.yaml",
        "--trainer.max_epochs=60",
        "--model.init_args.backbone.heads=2",
        "--seed_everything=0",
    )


def test_labelled_values_set_several_keys_and_add_configs(tmp_path: Path) -> None:
    data = {"small": {"config": "a.yaml"}, "big": {"config": ["a.yaml", "b.yaml"], "trainer.max_epochs": 300}}
    order = {"key": "data.order", "values": {"forward": [0, 1], "backward": [1, 0]}}
    plan = load_sweep(write(tmp_path, {"axes": {"data": {"values": data}, "order": order}})).plan()
    assert plan.axes == {"data": "column", "order": "column"}
    run = plan.runs[-1]
    assert run.folder == "data-big_order-backward"
    assert run.arguments == (
        *("--config", "a.yaml", "--config", "b.yaml"),
        "--trainer.max_epochs=300",
        "--data.order=[1, 0]",
    )
    assert set(run.configs) == {"a.yaml", "b.yaml"}
    assert set(plan.runs[0].configs) == {"a.yaml"}


def test_the_digest_of_a_config_follows_its_content_not_its_comments(tmp_path: Path) -> None:
    path = write(tmp_path, {"base": "a.yaml", "axes": {"seed": SEED}})
    first = load_sweep(path).plan().runs[0].configs["a.yaml"]
    (tmp_path / "a.yaml").write_text("# note\ntrainer:\n  max_epochs: 3\n")
    assert load_sweep(path).plan().runs[0].configs["a.yaml"] == first
    (tmp_path / "a.yaml").write_text("trainer: {max_epochs: 5}\n")
    assert load_sweep(path).plan().runs[0].configs["a.yaml"] != first


@pytest.mark.parametrize(
    ("written", "argument"),
    [
        ("1e-4", "1e-4"),
        ("0.1", "0.1"),
        ("true", "true"),
        ("null", "null"),
        (".inf", ".inf"),
        ("text", "text"),
        ("[0, {a: b}]", '[0, {"a": "b"}]'),
    ],
)
def test_values_as_arguments(written: str, argument: str) -> None:
    assert as_argument(yaml.safe_load(written)) == argument


def test_folder_names() -> None:
    assert safe("0.1") == "0.1"
    assert safe("runs/a b") == "runs-a-b"
    assert re.fullmatch(r"0-1-2-[0-9a-f]{8}", safe("[0, 1, 2]").lstrip("-"))
    assert safe("[0, 1, 2]") == safe("[0, 1, 2]") != safe("[0, 12]")
    assert re.fullmatch(r"x{24}-[0-9a-f]{8}", safe("x" * 25))


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(TEXT | st.integers() | st.lists(st.integers()), min_size=1, unique_by=as_argument))
def test_any_values_give_safe_folders_or_a_clear_collision(values: list[Any]) -> None:
    axis = {"key": "model.name", "values": values}
    sweep = load_sweep(write(Path.cwd(), {"base": "a.yaml", "axes": {"x": axis}}))
    names = {safe(as_argument(value)).casefold() for value in values}
    if len(names) < len(values):
        with pytest.raises(UserError, match="would share the folder"):
            sweep.plan()
        return
    runs = sweep.plan().runs
    folders = [run.folder for run in runs]
    assert all(re.fullmatch(r"x-[A-Za-z0-9.+-]+", folder) and len(folder) < 60 for folder in folders)
    assert [run.arguments[-1] for run in runs] == [f"--model.name={as_argument(value)}" for value in values]


def test_colliding_folders_are_refused(tmp_path: Path) -> None:
    for values in (["a b", "a/b"], ["A", "a"]):
        path = write(tmp_path, {"base": "a.yaml", "axes": {"x": {"key": "k", "values": values}}})
        with pytest.raises(UserError, match="would share the folder x-"):
            load_sweep(path).plan()


AXES = {"heads": HEADS, "seed": SEED}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"axis": AXES}, "unknown key 'axis': did you mean 'axes'?"),
        ({"axes": AXES, "wild": 1}, "unknown key 'wild': expected one of name, base, axes"),
        ({"axes": AXES, "base": ["a.yaml"], "name": "a/b"}, "key 'name': expected letters, digits"),
        ({"base": "a.yaml"}, "key 'axes': expected a mapping of at least one axis, got nothing"),
        ({"axes": {}}, "key 'axes': expected a mapping of at least one axis, got a mapping without entries"),
        ({"axes": [HEADS]}, "key 'axes': expected a mapping of at least one axis, got a list"),
        ({"axes": {"heads": [0, 2]}}, "axis 'heads': expected {key: ..., values: ...}"),
        ({"axes": {"heads": {"key": "k"}}}, "axis 'heads': expected {key: ..., values: ...}"),
        ({"axes": {"heads": HEADS | {"value": 1}}}, "axis 'heads': expected {key: ..., values: ...}"),
        ({"axes": {"heads": {"key": "k", "values": []}}}, "key 'values': expected a list or mapping of at least one"),
        ({"axes": {"heads": {"key": "k", "values": 3}}}, "key 'values': expected a list or mapping of at least one"),
        ({"axes": {"heads": {"key": "k", "values": [0, 2, 0]}}}, "key 'values': expected each value once, got 0 twice"),
        ({"axes": {"heads": {"key": "k", "values": [0, "0"]}}}, "key 'values': expected each value once, got 0 twice"),
        ({"axes": {"heads": {"values": [0, 2]}}}, "axis 'heads': a list of values needs a `key`"),
        ({"axes": {"a_b c": HEADS}}, "axis 'a_b c': expected a name of letters"),
        ({"axes": {"x": {"key": "--k", "values": [1]}}}, "axis 'x': expected a key of `lapbench fit`"),
        ({"axes": {"x": {"key": "run.dir", "values": [1]}}}, "key 'run.dir' cannot be set here"),
        ({"axes": {"x": {"key": "config", "values": [1]}}}, "key 'config' cannot be set here: use `base`"),
        ({"axes": {"x": {"values": {"a": "b"}}}}, "axis 'x': value 'a': expected a mapping of keys"),
        ({"axes": AXES, "overrides": {"seed_everything": 3}}, "key 'seed_everything': expected in one place, got axis"),
        ({"axes": AXES, "overrides": {"model.init_args": {}}}, "keys 'model.init_args.backbone.heads' and 'model.init"),
        ({"axes": {"a": SEED, "b": SEED}}, "key 'seed_everything': expected in one place, got axis 'b' and axis 'a'"),
        ({"axes": AXES, "overrides": [1]}, "key 'overrides': expected a mapping of keys to values, got a list"),
        ({"axes": AXES, "base": [3]}, "key 'base': expected a config or a list of configs, got [3]"),
        ({"axes": AXES, "metric": 3}, "key 'metric': expected a name or a list of names, got 3"),
        ({"axes": AXES, "metric": []}, "key 'metric': expected a name or a list of names, got []"),
        ({"axes": AXES, "metric": ["a", 3]}, "key 'metric': expected a name or a list of names, got ['a', 3]"),
        ({"axes": AXES, "metric": ["a", "b", "a"]}, "key 'metric': expected each metric once, got a twice"),
        ({"axes": AXES}, "key 'base': expected at least one config, got none"),
        ({"axes": AXES, "base": "c.yaml"}, "no config 'c.yaml': expected the path of a YAML file or a name"),
        (
            {"base": "a.yaml", "axes": {"x": {"key": "k", "values": ["a\0"]}}},
            "axis 'x': value 'a\\x00': a NUL character",
        ),
        ("a: [1\nb: 2\n", "line 2, column 2: not valid YAML"),
        ("name: a\nname: b\n", "line 2: key 'name' stands twice"),
        ("- 1\n", "expected a mapping with the keys name, base"),
        ("", "expected a mapping with the keys name, base"),
        ("name: !!python/object/apply:os.getcwd []\n", "not valid YAML: could not determine a constructor"),
    ],
)
def test_mistakes(tmp_path: Path, values: Any, message: str) -> None:
    path = write(tmp_path, values)
    with pytest.raises(UserError) as caught:
        load_sweep(path).plan()
    assert message in str(caught.value)
    assert str(path) in str(caught.value) or "no config" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sweeps_by_name(tmp_path: Path) -> None:
    for name in ("quickstart", "sweeps/quickstart"):
        assert load_sweep(name).name == "quickstart"
    assert find_config("sweeps/quickstart") == find_config("quickstart", below="sweeps")
    with pytest.raises(UserError, match=r"no config 'quickstrat': expected the path .* such as sweeps/quickstart$"):
        load_sweep("quickstrat")
    with pytest.raises(UserError, match=r"no config 'quickstart\.yaml': .* such as sweeps/quickstart$"):
        load_sweep("quickstart.yaml")
    write(tmp_path, {"base": "a.yaml", "axes": {"seed": SEED}}, name="quickstart")
    assert load_sweep("quickstart").name == "quickstart"
    assert len(load_sweep("quickstart").axes) == 1  # a file of that name goes first


def test_an_unreadable_config(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(UserError, match=r"latin\.yaml: byte 3 is not UTF-8"):
        load_yaml(tmp_path / "latin.yaml")


def test_shipped_quickstart() -> None:
    sweep = load_sweep("sweeps/quickstart")
    cells = list(itertools.product(*(axis.settings for axis in sweep.axes)))
    assert cells == [(heads, seed) for heads in ("0", "2", "4") for seed in ("0", "1", "2")]
    assert [axis.role for axis in sweep.axes] == ["schedule", "seed"]
    assert (sweep.base, sweep.baseline, sweep.metrics) == (("supervised/digits",), "0L", ("test/top1",))


def test_shipped_table1() -> None:
    sweep = load_sweep("sweeps/table1")
    labels = {axis.name: list(axis.settings) for axis in sweep.axes}
    assert labels == {
        "data": ["cifar10", "cifar100", "imagenet"],
        "drop-path": ["0.1", "0.3", "0.4"],
        "heads": ["0", "3", "6", "9", "11", "12"],
        "seed": ["0", "1", "2"],
    }
    assert {axis.name: axis.role for axis in sweep.axes} == {
        "data": "column",
        "drop-path": "column",
        "heads": "schedule",
        "seed": "seed",
    }


REFERENCES = {"untrained": {"trainer.max_epochs": 0}, "raw pixels": {"config": "b.yaml", "run.test": "none"}}


def test_references_are_further_values_of_the_axis_of_heads(tmp_path: Path) -> None:
    values = {"base": "a.yaml", "axes": {"heads": {**HEADS, "references": REFERENCES}, "seed": SEED}}
    plan = load_sweep(write(tmp_path, values | {"overrides": {"trainer.max_epochs": 60}})).plan()
    assert [run.reference for run in plan.runs] == [None] * 4 + ["untrained"] * 2 + ["raw pixels"] * 2
    untrained, pixels = plan.runs[4], plan.runs[7]
    assert (untrained.folder, pixels.folder) == ("heads-untrained_seed-0", "heads-raw-pixels_seed-1")
    # A reference goes before overrides, and leaves the heads as the config has them.
    assert untrained.arguments == ("--config", "a.yaml", "--trainer.max_epochs=0", "--seed_everything=0")
    assert pixels.arguments == (
        *("--config", "a.yaml", "--config", "b.yaml"),
        *("--trainer.max_epochs=60", "--run.test=none", "--seed_everything=1"),
    )
    assert plan.runs[2].arguments[2] == "--trainer.max_epochs=60"


def test_references_of_a_chain_are_chains(tmp_path: Path) -> None:
    stages = {"one": {"config": "b.yaml"}, "two": {"model.init_args.init_from": "{one}"}}
    values = {"base": "a.yaml", "stages": stages, "axes": {"heads": {**HEADS, "references": REFERENCES}}}
    runs = load_sweep(write(tmp_path, values)).plan().runs
    assert [(run.folder, run.reference) for run in runs[4:6]] == [
        ("heads-untrained/one", "untrained"),
        ("heads-untrained/two", "untrained"),
    ]
    assert runs[5].earlier == {"one": "heads-untrained/one"}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"seed": {**SEED, "references": REFERENCES}},
            "axis 'seed': key 'references': expected on the axis of heads only",
        ),
        (
            {"heads": {**HEADS, "references": ["untrained"]}},
            "key 'references': expected a mapping of label to settings",
        ),
        (
            {"heads": {**HEADS, "references": {}}},
            "key 'references': expected a mapping of label to settings, got a map",
        ),
        ({"heads": {**HEADS, "references": {"a": 1}}}, "key 'references': value 'a': expected a mapping of keys"),
        ({"heads": {**HEADS, "references": {"2": {}}}}, "expected each value once, got 2 twice"),
        ({"heads": {**HEADS, "reference": {"a": {}}}}, "expected {key: ..., values: ...}"),
        (
            {"heads": {**HEADS, "references": {"a": {"seed_everything": 1}}}, "seed": SEED},
            "key 'seed_everything': expected in one place, got reference 'a' and axis 'seed'",
        ),
    ],
)
def test_wrong_references_are_one_line(tmp_path: Path, axes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_sweep(write(tmp_path, {"base": "a.yaml", "axes": axes}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
