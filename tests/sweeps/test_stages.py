"""Sweeps whose cells are chains of runs: their order, what waits for what, and mistakes in the file."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lapbench.errors import UserError
from lapbench.results.plan import Plan, read_plan
from lapbench.results.record import Record, read_record, write_record
from lapbench.results.table import main as table
from lapbench.sweeps.grid import load_sweep
from lapbench.sweeps.launch import dry_run, launch, main
from lapbench.sweeps.runner import fit_command

FAKE = (sys.executable, str(Path(__file__).with_name("fake_fit.py")))
FROM = "model.init_args.init_from"
STAGES = {
    "pretrain": {"config": "pre.yaml", "bonus": 0.1},
    "midtrain": {"config": "mid.yaml", "bonus": 0.2, FROM: "{pretrain}"},
    "sft": {"config": ["mid.yaml", "sft.yaml"], "bonus": 0.3, FROM: "{midtrain}"},
}
CELLS = ["heads-0_seed-0", "heads-0_seed-1"]
FOLDERS = [f"{cell}/{stage}" for cell in CELLS for stage in STAGES]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "pre", "mid", "sft"):
        (tmp_path / f"{name}.yaml").write_text("trainer: {max_epochs: 3}\n")


def write(stages: Any = STAGES, overrides: dict[str, Any] | None = None, **values: Any) -> Path:
    axes = {
        "heads": {"key": "model.init_args.backbone.heads", "values": [0]},
        "seed": {"key": "seed_everything", "values": [0, 1]},
    }
    values = {"name": "demo", "base": "base.yaml", "axes": axes, "stages": stages, "metric": "test/top1"} | values
    path = Path("demo.yaml").absolute()
    path.write_text(yaml.safe_dump(values | {"overrides": overrides or {}}, sort_keys=False))
    return path


def make_plan(stages: Any = STAGES, **overrides: Any) -> Plan:
    return load_sweep(write(stages, overrides)).plan()


def started(out: Path) -> dict[str, int]:
    """How many processes each run's folder has seen."""
    return {path.parent.relative_to(out).as_posix(): len(path.read_text().splitlines()) for path in out.rglob("starts")}


def once(*folders: str) -> dict[str, int]:
    return dict.fromkeys(folders, 1)


def test_each_cell_is_a_chain(tmp_path: Path) -> None:
    plan = make_plan(epochs=2)
    assert [run.folder for run in plan.runs] == FOLDERS
    assert plan.stages == ("pretrain", "midtrain", "sft")
    sft = plan.runs[2]
    assert (sft.stage, sft.labels) == ("sft", {"heads": "0", "seed": "0"})
    assert sft.earlier == {"pretrain": FOLDERS[0], "midtrain": FOLDERS[1]}
    assert plan.runs[3].earlier == {}
    assert sft.arguments == (
        *("--config", "base.yaml", "--config", "mid.yaml", "--config", "sft.yaml"),
        *("--epochs=2", "--bonus=0.3", f"--{FROM}={{midtrain}}"),
        *("--model.init_args.backbone.heads=0", "--seed_everything=0"),
    )
    assert fit_command(["fit"], Path("out"), sft)[:3] == ["fit", "--run.dir", f"out/{FOLDERS[2]}"]
    assert f"--{FROM}={tmp_path}/out/{FOLDERS[1]}" in fit_command(["fit"], Path("out"), sft)


def test_a_reference_may_be_part_of_a_string_and_name_any_earlier_stage(tmp_path: Path) -> None:
    stages = {"a": {}, "b": {FROM: "{a}"}, "c": {"weights": "{a}/x.ckpt:{b}", "pattern": "{d:.2f}"}}
    command = fit_command([], Path("out"), make_plan(stages).runs[2])
    assert f"--weights={tmp_path}/out/{CELLS[0]}/a/x.ckpt:{tmp_path}/out/{CELLS[0]}/b" in command
    assert "--pattern={d:.2f}" in command


@pytest.mark.parametrize("jobs", [1, 2])
def test_chains_run_in_order_and_the_table_shows_the_last_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(), out, jobs, FAKE) == 0  # the fake insists on a finished run to start from
    printed = capsys.readouterr().out
    assert f"demo: 6 runs (2 x pretrain, midtrain, sft) in {out}\n" in printed
    assert started(out) == once(*FOLDERS)
    if jobs == 1:
        for index, name in enumerate(FOLDERS, 1):
            assert f"[{index}/6] {name} finished: test/top1" in printed
    else:  # one for each chain: no stage starts early, and none waits for the other chain
        ends = {name: (out / name / "record.json").stat().st_mtime_ns for name in FOLDERS}
        assert ends[FOLDERS[3]] < ends[FOLDERS[2]]
    # 0.1 + 0.2 + 0.3, and 0.003 for each stage of seed 1.
    assert "0L          60.45 ± 0.64    2" in printed
    assert "on the test split of Digits, after stage sft; " in printed
    assert "Incomplete" not in printed
    assert "Left out" not in printed


def test_a_finished_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plan = tmp_path / "out", make_plan()
    launch(plan, out, command=FAKE)
    assert read_plan(out) == plan
    before = (out / "table.txt").read_text()
    assert launch(plan, out, command=(sys.executable, "-c", "raise SystemExit('must not run')")) == 0
    assert "6 of them already finished" in capsys.readouterr().out
    assert (out / "table.txt").read_text() == before

    assert table(["out", "--stage", "pretrain"]) == 0
    printed = capsys.readouterr().out
    assert "10.15 ± 0.21" in printed
    assert "after stage pretrain;" in printed
    with pytest.raises(UserError, match=r"no stage 'pretrian' in sweep demo: did you mean pretrain\?"):
        table(["out", "--stage", "pretrian"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_later_stages_of_a_failed_run_wait_and_are_tried_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    out = tmp_path / "out"
    plan = make_plan(behavior=f"fail@{FOLDERS[0]}")
    assert launch(plan, out, jobs, FAKE) == 1
    printed = capsys.readouterr().out
    assert f"{FOLDERS[0]} FAILED: train/loss is nan at step 7 (see {out / FOLDERS[0] / 'log.txt'}); " in printed
    assert "not run, as they start from it: midtrain, sft\n" in printed
    assert "1 of 6 runs failed:" in printed
    assert f"2 later stages wait for them: {FOLDERS[1]}, {FOLDERS[2]}.\nStart the sweep again" in printed
    assert started(out) == once(FOLDERS[0], *FOLDERS[3:])
    assert "Incomplete: of 2 runs 1 not started." in printed
    assert "Waiting for an earlier stage: 1 (1 failed).\n" in printed
    assert f"failed: {out / FOLDERS[0]}: train/loss is nan at step 7\n" in printed

    assert launch(plan, out, jobs, FAKE) == 1
    assert started(out) == once(FOLDERS[0], *FOLDERS[3:]) | {FOLDERS[0]: 2}
    write_record(out / FOLDERS[0], Record("FakeTask", "Digits", "vit", "0L", 0, "finished", {"test/top1": 0.1}))
    assert launch(plan, out, jobs, FAKE) == 0
    assert started(out) == once(*FOLDERS) | {FOLDERS[0]: 2}


def test_a_failed_evaluation_of_an_earlier_stage_keeps_the_chain_waiting(tmp_path: Path) -> None:
    out, plan = tmp_path / "out", make_plan(behavior=f"evaluation@{FOLDERS[1]}")
    assert launch(plan, out, command=FAKE) == 1
    assert started(out) == once(*FOLDERS[:2], *FOLDERS[3:])
    assert launch(plan, out, command=FAKE) == 0
    assert started(out) == once(*FOLDERS) | {FOLDERS[1]: 2}


def test_an_interrupted_stage_goes_on_before_the_next_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(behavior=f"again-once@{FOLDERS[1]}"), out, command=FAKE) == 0
    assert started(out) == once(*FOLDERS) | {FOLDERS[1]: 2}
    assert (out / FOLDERS[1] / "epochs").read_text() == "0\n1\n2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_killed_between_stages_goes_on_with_the_next(
    tmp_path: Path,
    number: signal.Signals,
    start_sweep: Callable[[Path, Path, int], "subprocess.Popen[str]"],
    is_alive: Callable[[int], bool],
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    out, sweep = tmp_path / "out", write(overrides={"epoch_seconds": 0.5})
    process = start_sweep(sweep, out, 2)
    wait_until(lambda: "epochs" in {path.name for path in (out / CELLS[0]).glob("midtrain/*")})
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    pids = [json.loads(line)["pid"] for path in out.rglob("starts") for line in path.read_text().splitlines()]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    first = (out / FOLDERS[0] / "record.json").read_bytes()
    assert not (out / FOLDERS[2]).exists()

    process = start_sweep(sweep, out, 2)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (out / FOLDERS[0] / "record.json").read_bytes() == first
    again = started(out)
    assert (again[FOLDERS[0]], again[FOLDERS[1]], again[FOLDERS[2]]) == (1, 2, 1)
    assert "60.45 ± 0.64" in output


def test_a_change_of_a_stage_makes_it_and_later_ones_stale(tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(make_plan(), out, command=FAKE)
    changed = STAGES | {"midtrain": STAGES["midtrain"] | {"bonus": 0.25}}
    with pytest.raises(UserError) as caught:
        launch(make_plan(changed), out, command=FAKE)
    assert str(caught.value) == (
        f"{out / FOLDERS[1]} holds a run with other settings: --bonus=0.2 then, --bonus=0.25 now; use another --out, "
        f"or move that folder and {FOLDERS[2]} away to run them anew"
    )
    for cell in CELLS:
        (out / cell / "midtrain").rename(tmp_path / f"{cell}-midtrain")
    stale = rf"{FOLDERS[2]} holds a run that started from {FOLDERS[1]}, which is no longer there; .* anew from midtrain"
    with pytest.raises(UserError, match=stale):
        launch(make_plan(changed), out, command=FAKE)
    without_sft = {name: changed[name] for name in ("pretrain", "midtrain")}
    with pytest.raises(UserError, match=stale):  # else it would look as if it belonged to the new one when it returns
        launch(make_plan(without_sft), out, command=FAKE)
    for cell in CELLS:
        (out / cell / "sft").rename(tmp_path / f"{cell}-sft")
    assert launch(make_plan(changed), out, command=FAKE) == 0
    assert started(out) == once(*FOLDERS)
    assert read_record(out / FOLDERS[2]).metrics["test/top1"] == pytest.approx(0.65)


def test_a_changed_config_of_the_last_stage_leaves_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(make_plan(), out, command=FAKE)
    (tmp_path / "sft.yaml").write_text("trainer: {max_epochs: 5}\n")
    with pytest.raises(UserError, match=rf"{FOLDERS[2]} holds .* config sft\.yaml has changed since; .*move that fold"):
        launch(make_plan(), out, command=FAKE)


def test_a_stage_that_comes_or_goes_in_between(tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(make_plan(), out, command=FAKE)
    more = {"pretrain": STAGES["pretrain"], "extra": {FROM: "{pretrain}"}} | STAGES
    with pytest.raises(
        UserError, match=r"midtrain holds .*: the stages before it were pretrain then, are pretrain, ex"
    ):
        launch(make_plan(more), out, command=FAKE)
    assert launch(make_plan(STAGES | {"dpo": {FROM: "{sft}"}}), out, command=FAKE) == 0
    assert started(out) == once(*FOLDERS, f"{CELLS[0]}/dpo", f"{CELLS[1]}/dpo")


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    plan = make_plan(behavior=f"fail@{FOLDERS[1]}")
    assert launch(plan, tmp_path / "out", command=FAKE) == 1
    (tmp_path / "out").rename(tmp_path / "moved")
    planned = dry_run(plan, tmp_path / "moved")
    assert "(4 skip, finished, 1 try again, 1 run)" in planned
    assert f"--{FROM}={tmp_path}/moved/{FOLDERS[0]}" in planned


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write()), "--out", "out", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("demo: 6 runs (2 x pretrain, midtrain, sft) in out (6 run)\n[1/6] heads-0_seed-0/pretr")
    assert f"[3/6] {FOLDERS[2]}: run\n" in printed
    assert f"--run.dir out/{FOLDERS[2]} --config base.yaml --config mid.yaml --config sft.yaml" in printed
    assert f"--{FROM}={tmp_path}/out/{FOLDERS[1]} " in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "key 'stages': expected a mapping of at least one stage, got a list"),
        ({}, "key 'stages': expected a mapping of at least one stage, got a mapping without entries"),
        (None, "key 'stages': expected a mapping of at least one stage, got nothing"),
        ({"a b": {}}, "stage 'a b': expected a name of letters"),
        ({1: {}}, "stage 1: expected a name of letters"),
        ({"a": None}, "stage 'a': expected a mapping of keys (and `config`), got nothing"),
        ({"a": {"config": 3}}, "stage 'a': key 'config': expected a config or a list of configs, got 3"),
        ({"a": {"run.dir": "x"}}, "stage 'a': key 'run.dir' cannot be set here"),
        ({"a": {"k": "x\0"}}, "stage 'a': value 'x\\x00': a NUL character"),
        ({"a": {}, "A": {FROM: "{a}"}}, "stages 'a' and 'A' would share the folder A"),
        ({"a": {"k": "{a}"}}, "stage 'a': key 'k': {a}: expected no reference, as no stage comes before the first"),
        ({"pre": {}, "b": {"k": "{per}/x"}}, "stage 'b': key 'k': {per}: no earlier stage: did you mean {pre}?"),
        ({"pre": {}, "b": {"k": "{b}"}}, "key 'k': {b}: no earlier stage: expected one of pre"),
        ({"a": {}, "b": {"k": "{c}"}, "c": {"k": "{a}"}}, "key 'k': {c}: no earlier stage: expected one of a"),
        ({"a": {}, "b": {"k": 1}}, "stage 'b': expected a key that refers to an earlier stage, such as"),
        ({"a": {}, "b": {"k": {"a": None}}}, "key 'k': {a} is not replaced by a folder here: expected a string, in"),
        ({"a": {}, "b": {"k": [{"l": "{a}"}]}}, "key 'k': {a} is not replaced by a folder here"),
        ({"a": {"seed_everything": 3}}, "key 'seed_everything': expected in one place, got stages and axis 'seed'"),
        ({"a": {"trainer.max_epochs": 3}}, "key 'trainer.max_epochs': expected in one place, got stages and overrides"),
    ],
)
def test_mistakes(stages: Any, message: str) -> None:
    path = write(stages, {"trainer.max_epochs": 2})
    with pytest.raises(UserError) as caught:
        load_sweep(path).plan()
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_references_where_they_are_not_replaced() -> None:
    with pytest.raises(
        UserError, match=r"key 'overrides': key 'k': \{pretrain\} is not replaced .*: write it in the s"
    ):
        make_plan(k="x/{pretrain}")
    axes = {"x": {"key": "k", "values": ["{pretrain}"]}}
    with pytest.raises(UserError, match=r"axis 'x': value '\{pretrain\}': key 'k': \{pretrain\} is not replaced"):
        load_sweep(write(axes=axes))


def test_a_stage_without_any_config() -> None:
    with pytest.raises(UserError, match="key 'base': expected at least one config, got none"):
        load_sweep(write({"a": {"config": "pre.yaml"}, "b": {FROM: "{a}"}}, base=[])).plan()
    assert len(load_sweep(write(base=[])).plan().runs) == 6
