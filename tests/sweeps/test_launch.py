"""The launcher with a fake trainer: finished, failed, interrupted and killed runs, and what is left after each."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lapbench.errors import UserError
from lapbench.process import PARENT_VARIABLE, lock_folder
from lapbench.results.plan import Plan, read_plan
from lapbench.results.record import Record, read_record, write_record
from lapbench.sweeps.grid import load_sweep
from lapbench.sweeps.launch import dry_run, launch, main
from lapbench.sweeps.runner import THREAD_VARIABLES, child_environment, last_line

Start = Callable[[Path, Path, int], "subprocess.Popen[str]"]
IsAlive = Callable[[int], bool]
WaitUntil = Callable[[Callable[[], bool]], None]
FAKE = (sys.executable, str(Path(__file__).with_name("fake_fit.py")))
SWEEP = """
name: demo
base: [{base}]
axes:
  heads: {{key: model.init_args.backbone.heads, values: [0, 2]}}
  seed: {{key: seed_everything, values: [0, 1]}}
overrides: {overrides}
"""
FOLDERS = ["heads-0_seed-0", "heads-0_seed-1", "heads-2_seed-0", "heads-2_seed-1"]
# Score of the fake: 0.9 + 0.01 heads + 0.003 seed, so heads 0 has 90.00 and 90.30, deviation 0.30 / sqrt 2 = 0.21.
ROWS = ["0L          90.15 ± 0.21    2", "2L        **92.15 ± 0.21**  2  +2.00"]


def make_plan(folder: Path, **overrides: Any) -> Plan:
    return load_sweep(write_sweep(folder, **overrides)).plan()


def write_sweep(folder: Path, **overrides: Any) -> Path:
    (folder / "base.yaml").write_text("trainer: {max_epochs: 3}\n")
    path = folder / "demo.yaml"
    path.write_text(SWEEP.format(base=json.dumps(str(folder / "base.yaml")), overrides=json.dumps(overrides)))
    return path


def starts(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The processes that each folder has seen."""
    return {p.parent.name: [json.loads(line) for line in p.read_text().splitlines()] for p in out.glob("*/starts")}


def test_all_runs_finish_and_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(tmp_path), out, command=FAKE) == 0
    printed = capsys.readouterr().out
    for index, name in enumerate(FOLDERS, 1):
        assert f"[{index}/4] {name} finished: test/top1 9" in printed
        assert read_record(out / name).status == "finished"
    for row in ROWS:
        assert row.replace("**", "  ") in printed.replace("**", "  ").replace(" _", "  ").replace("_ ", "  ")
    assert (out / "table.txt").read_text() in printed
    assert "| 2L | **92.15 ± 0.21** | 2 | +2.00 |" in (out / "table.md").read_text()
    assert [run.folder for run in read_plan(out).runs] == FOLDERS
    assert "--model.init_args.backbone.heads=2" in (out / FOLDERS[2] / "log.txt").read_text()


def test_of_several_metrics_the_first_is_progress_and_all_are_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_sweep(tmp_path), tmp_path / "out"
    path.write_text(f"{path.read_text()}metric: [val/top1, test/top1]\n")
    assert launch(load_sweep(path).plan(), out, 2, command=FAKE) == 0
    assert f"{FOLDERS[0]} finished: val/top1 90.00 % in " in capsys.readouterr().out
    assert read_plan(out).metrics == ("val/top1", "test/top1")
    assert "| 2L | **92.15 ± 0.21** | 2 | +2.00 | **92.15 ± 0.21** | 2 | +2.00 |" in (out / "table.md").read_text()


def test_a_second_sweep_runs_nothing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plan = tmp_path / "out", make_plan(tmp_path)
    launch(plan, out, command=FAKE)
    before = starts(out), (out / "table.txt").read_text()
    capsys.readouterr()
    assert launch(plan, out, command=(sys.executable, "-c", "raise SystemExit('must not run')")) == 0
    assert (starts(out), (out / "table.txt").read_text()) == before
    assert "4 of them already finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        ("fail", "train/loss is nan at step 7"),
        ("crash", "exit status 3: RuntimeError: CUDA out of memory"),
        ("bad-input", "lr: expected a number, got 'x'"),
        ("killed", "killed by SIGKILL"),
        ("again-always", "interrupted 3 times in a row without coming further"),
        ("unfinished", "exit status 0, but its record says running"),
        ("evaluation", "evaluation linear: out of memory"),
    ],
)
def test_a_failed_run_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], behavior: str, reason: str
) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(tmp_path, behavior=f"{behavior}@heads-0_seed-1"), out, jobs=2, command=FAKE) == 1
    printed = capsys.readouterr().out
    end = printed[printed.index("1 of 4 runs failed:") :]
    assert f"  heads-0_seed-1: {reason}\n    log: {out / 'heads-0_seed-1' / 'log.txt'}\n" in end
    assert "[4/4]" in printed
    assert "90.00 (1/2 seeds)" in end or "running" in end or behavior == "evaluation"
    others = [read_record(out / name).status for name in FOLDERS if name != "heads-0_seed-1"]
    assert others == ["finished"] * 3


def test_a_failed_evaluation_is_tried_again_though_the_run_has_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plan = tmp_path / "out", make_plan(tmp_path, behavior="evaluation@heads-0_seed-1")
    assert launch(plan, out, command=FAKE) == 1
    assert read_record(out / FOLDERS[1]).status == "finished"
    assert "90.15 ± 0.21" in capsys.readouterr().out  # its training counts in the table
    assert "heads-0_seed-1: try again\n" in dry_run(plan, out)
    crash = (sys.executable, "-c", "raise SystemExit('no space left')")
    assert launch(plan, out, command=crash) == 1
    assert "heads-0_seed-1: exit status 1: no space left\n" in capsys.readouterr().out
    assert launch(plan, out, command=FAKE) == 0
    assert {name: len(found) for name, found in starts(out).items()} == dict(zip(FOLDERS, (1, 2, 1, 1), strict=True))
    assert launch(plan, out, command=crash) == 0


def test_a_run_interrupted_in_one_evaluation_after_the_other_comes_further(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(tmp_path, behavior="again-evaluating@heads-0_seed-1"), out, command=FAKE) == 0
    assert len(starts(out)["heads-0_seed-1"]) == 6


def test_an_old_error_is_not_blamed_for_a_new_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plan = tmp_path / "out", make_plan(tmp_path, behavior="fail@heads-0_seed-1")
    launch(plan, out, command=FAKE)
    capsys.readouterr()
    crash = (sys.executable, "-c", "raise SystemExit('no space left')")
    assert launch(plan, out, command=crash) == 1
    assert "heads-0_seed-1: exit status 1: no space left\n" in capsys.readouterr().out


def test_a_failed_run_is_tried_again_by_the_next_sweep(tmp_path: Path) -> None:
    out, plan = tmp_path / "out", make_plan(tmp_path)
    broken = (sys.executable, "-c", "raise SystemExit(1)")
    assert launch(plan, out, command=broken) == 1
    assert launch(plan, out, command=FAKE) == 0
    assert {name: len(found) for name, found in starts(out).items()} == dict.fromkeys(FOLDERS, 1)


def test_an_interrupted_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert launch(make_plan(tmp_path, behavior="again-once@seed-1"), out, command=FAKE) == 0
    assert {name: len(found) for name, found in starts(out).items()} == dict(zip(FOLDERS, (1, 2, 1, 2), strict=True))
    assert (out / "heads-0_seed-1" / "epochs").read_text() == "0\n1\n2\n"
    assert "heads-0_seed-1 was interrupted" in capsys.readouterr().out


def test_jobs_run_at_once_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "out"
    before = time.monotonic()
    assert launch(make_plan(tmp_path, epoch_seconds=0.5), out, jobs=4, command=FAKE) == 0
    assert time.monotonic() - before < 4 * 3 * 0.5  # one after another takes more than 6 s
    found = [start for run in starts(out).values() for start in run]
    assert [start["OMP_NUM_THREADS"] for start in found] == ["2"] * 4
    assert [start["LAPBENCH_PARENT_PID"] for start in found] == [str(start["pid"]) for start in found]


def test_the_share_of_cores_is_at_least_one_and_the_users_own_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert child_environment(5, {})["MKL_NUM_THREADS"] == "1"
    assert child_environment(5, {"MKL_NUM_THREADS": "7"})["MKL_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in child_environment(1, {})
    assert child_environment(1, {PARENT_VARIABLE: "1"})[PARENT_VARIABLE] == str(os.getpid())


def test_a_changed_sweep_keeps_what_is_the_same_and_refuses_what_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(make_plan(tmp_path), out, command=FAKE)
    sweep = tmp_path / "demo.yaml"
    original = sweep.read_text()

    sweep.write_text(original.replace("[0, 1]", "[1, 2]"))  # seed 0 goes, seed 2 comes
    assert launch(load_sweep(sweep).plan(), out, command=FAKE) == 0
    assert {name: len(found) for name, found in starts(out).items()} == dict.fromkeys(
        [*FOLDERS, "heads-0_seed-2", "heads-2_seed-2"], 1
    )
    assert [run.folder for run in read_plan(out).retired] == ["heads-0_seed-0", "heads-2_seed-0"]
    assert "Left out, as the sweep's plan does not hold them" in (out / "table.txt").read_text()

    changed = original.replace("overrides: {}", "overrides: {epochs: 5}")
    sweep.write_text(changed)  # also for seed 0, which comes back
    message = r"heads-0_seed-0 holds a run with other settings: nothing then, --epochs=5 now; use another --out"
    with pytest.raises(UserError, match=message):
        launch(load_sweep(sweep).plan(), out, command=FAKE)
    with pytest.raises(UserError, match=message):
        dry_run(load_sweep(sweep).plan(), out)

    sweep.write_text(original)
    (tmp_path / "base.yaml").write_text("# only a comment\ntrainer: {max_epochs: 3}\n")
    assert launch(load_sweep(sweep).plan(), out, command=FAKE) == 0
    (tmp_path / "base.yaml").write_text("trainer: {max_epochs: 4}\n")
    with pytest.raises(UserError, match=r"the content of config .*base\.yaml has changed since"):
        launch(load_sweep(sweep).plan(), out, command=FAKE)


def test_a_run_made_by_someone_else_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_record(out / FOLDERS[0], Record("FakeTask", "Digits", "vit", "0L", 0))
    with pytest.raises(UserError, match="holds a run that this sweep did not make"):
        launch(make_plan(tmp_path), out, command=FAKE)


def test_a_corrupt_record_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    out, plan = tmp_path / "out", make_plan(tmp_path)
    launch(plan, out, command=FAKE)
    (out / FOLDERS[1] / "record.json").write_text("{")
    with pytest.raises(UserError, match=r"heads-0_seed-1.record\.json is not valid JSON"):
        launch(plan, out, command=FAKE)


def test_two_sweeps_on_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with lock_folder(out, "a test"), pytest.raises(UserError, match="another `lapbench sweep` is at work in") as caught:
        launch(make_plan(tmp_path), out, command=FAKE)
    assert "\n" not in str(caught.value)
    assert launch(make_plan(tmp_path), out, command=FAKE) == 0


def test_an_out_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make"):
        launch(make_plan(tmp_path), tmp_path / "file" / "out", command=FAKE)


def test_dry_run_prints_commands_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, out = write_sweep(tmp_path, behavior="fail@heads-0_seed-1", text="two words"), tmp_path / "a b"
    before = sorted(tmp_path.rglob("*"))
    assert main([str(sweep), "--out", str(out), "--dry-run"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"demo: 4 runs in {out} (4 run)\n[1/4] heads-0_seed-0: run\n    {sys.executable} -m lapbench fit"
    )
    assert f"--run.dir '{out}/heads-2_seed-1' --config {tmp_path}/base.yaml" in printed
    assert "'--text=two words' --model.init_args.backbone.heads=2 --seed_everything=1\n" in printed

    plan = load_sweep(write_sweep(tmp_path, behavior="fail@heads-0_seed-1")).plan()
    launch(plan, out, command=FAKE)
    record = read_record(out / FOLDERS[3])
    write_record(out / FOLDERS[3], Record("FakeTask", "Digits", "vit", "2L", 1, progress=record.progress))
    planned = dry_run(plan, out)
    assert "(2 skip, finished, 1 try again, 1 resume)" in planned
    assert "heads-2_seed-1: resume" in planned


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5"])
def test_bad_number_of_jobs(tmp_path: Path, jobs: str) -> None:
    with pytest.raises(UserError, match=r"--jobs: expected a whole number of at least 1, got"):
        main([str(write_sweep(tmp_path)), f"--jobs={jobs}"])


def test_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"old\nnew \xff\x1b[31m red\x1b[0m\r\n\n  \n")
    assert last_line(log, 4) == "new � red"
    assert last_line(log, log.stat().st_size) == ""


# ---- the sweep as a process of its own, ended from outside ----


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launch(make_plan(folder), folder / "out", command=FAKE) == 0
    return (folder / "out" / "table.txt").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize("seed", range(2))
def test_sigkill_at_any_moment_ends_with_the_same_table(
    tmp_path: Path, uninterrupted: str, seed: int, start_sweep: Start, is_alive: IsAlive, wait_until: WaitUntil
) -> None:
    sweep, out = write_sweep(tmp_path, epoch_seconds=0.1), tmp_path / "out"
    draw = random.Random(seed)
    finished: dict[str, tuple[int, int]] = {}
    for attempt in range(9):
        process = start_sweep(sweep, out, 1 + seed % 2)
        if attempt < 8:
            time.sleep(draw.uniform(0.1, 1.2))
            process.kill()
        output, _ = process.communicate()
        pids = [start["pid"] for run in starts(out).values() for start in run]
        wait_until(lambda pids=pids: not any(is_alive(pid) for pid in pids))  # no orphans
        for name, (inode, count) in finished.items():  # finished runs are not touched again
            assert ((out / name / "record.json").stat().st_ino, len(starts(out)[name])) == (inode, count)
        for name in FOLDERS:
            if (out / name / "record.json").exists() and read_record(out / name).status == "finished":
                finished[name] = (out / name / "record.json").stat().st_ino, len(starts(out)[name])
    assert process.returncode == 0, output
    assert (out / "table.txt").read_text() == uninterrupted


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_runs_die_with_a_killed_sweep(
    tmp_path: Path, start_sweep: Start, is_alive: IsAlive, wait_until: WaitUntil
) -> None:
    out = tmp_path / "out"
    process = start_sweep(write_sweep(tmp_path, epoch_seconds=60), out, 2)
    wait_until(lambda: len(starts(out)) == 2)
    pids = [start["pid"] for run in starts(out).values() for start in run]
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))  # by themselves they would take minutes


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_runs_save_and_says_what_is_left(
    tmp_path: Path, number: int, status: int, start_sweep: Start, wait_until: WaitUntil
) -> None:
    out = tmp_path / "out"
    process = start_sweep(write_sweep(tmp_path, epoch_seconds=0.5), out, 2)
    wait_until(lambda: len(starts(out)) == 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == status, output
    assert "waiting for heads-0_seed-0, heads-0_seed-1 to save and stop" in output
    assert "Stopped: 4 of 4 runs are unfinished (heads-0_seed-" in output
    assert [read_record(out / name).status for name in FOLDERS[:2]] == ["interrupted"] * 2
    assert sorted(starts(out)) == FOLDERS[:2]


def test_a_second_signal_kills(tmp_path: Path, start_sweep: Start, wait_until: WaitUntil) -> None:
    out = tmp_path / "out"
    process = start_sweep(write_sweep(tmp_path, epoch_seconds=60), out, 1)
    wait_until(lambda: len(starts(out)) == 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_a_run_whose_parent_is_already_gone_does_not_start(tmp_path: Path) -> None:
    code = "from lapbench.process import die_with_parent; die_with_parent(); print('went on')"
    environment = {**os.environ, PARENT_VARIABLE: "999999"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is gone" in done.stderr
    assert done.stdout == ""


def test_references_run_as_the_others_and_stand_below_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, epochs=1)
    axis = "values: [0, 2], references: {better: {bonus: 0.95}}"
    path.write_text(path.read_text().replace("values: [0, 2]", axis))
    plan = load_sweep(path).plan()
    out = tmp_path / "out"
    assert "heads-better_seed-1: run" in dry_run(plan, out, FAKE)
    assert launch(plan, out, command=FAKE) == 0
    printed = capsys.readouterr().out
    assert "6 runs in" in printed
    row = next(line for line in printed.splitlines() if line.startswith("better"))
    assert row.split() == ["better", "95.05", "±", "0.07", "2"]
    assert "neither ranked nor compared: better" in printed
    assert launch(load_sweep(path).plan(), out, command=FAKE) == 0
    assert {len(found) for found in starts(out).values()} == {1}
