"""record.json: round trip, atomic writing, and one clear line for each way in which it can be broken."""

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapbench.errors import UserError
from lapbench.results import files
from lapbench.results.record import Record, load_records, read_record, write_record

RECORD = Record(
    task="ImageClassification",
    data="Digits",
    backbone="vit",
    schedule="2L",
    seed=0,
    status="finished",
    metrics={"test/top1": 0.9583},
    progress={"epoch": 60, "max_epochs": 60, "step": 1380, "max_steps": None},
    parameters=205770,
    throughput=3000.5,
    wall_time=41.25,
    started="2026-01-02T03:04:05+00:00",
    finished="2026-01-02T03:04:46+00:00",
    versions={"torch": "2.14.1"},
    checkpoint="last",
    notes={"damaged_images": {"count": 3, "samples": ["shard a.tar, sample 7: truncated"]}},
)


def test_a_record_reads_back_equal_and_names_its_folder(tmp_path: Path) -> None:
    write_record(tmp_path / "new" / "run", RECORD)
    record = read_record(tmp_path / "new" / "run")
    assert record == RECORD
    assert record.folder == tmp_path / "new" / "run"
    assert os.listdir(tmp_path / "new" / "run") == ["record.json"]


def test_the_file_is_what_the_schema_says(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    value = json.loads((tmp_path / "record.json").read_text())
    assert value["format"] == 1
    assert value["schedule"] == "2L"
    assert value["metrics"] == {"test/top1": 0.9583}
    assert value["progress"] == {"epoch": 60, "max_epochs": 60, "step": 1380, "max_steps": None}
    assert value["error"] is None
    assert value["notes"] == {"damaged_images": {"count": 3, "samples": ["shard a.tar, sample 7: truncated"]}}
    assert "folder" not in value


def test_a_record_from_before_there_were_notes_is_read(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    path = tmp_path / "record.json"
    value = json.loads(path.read_text())
    del value["notes"]
    path.write_text(json.dumps(value))
    assert read_record(tmp_path) == dataclasses.replace(RECORD, notes={})


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**63), 2**63)))
def test_any_metrics_survive_strict_json(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_record(folder, dataclasses.replace(RECORD, metrics=metrics))

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    json.loads((folder / "record.json").read_text(encoding="utf-8"), parse_constant=refuse)
    read = read_record(folder).metrics
    assert read.keys() == metrics.keys()
    for name, value in metrics.items():
        assert read[name] == value or (math.isnan(read[name]) and math.isnan(value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("schedule"), "key 'schedule' is missing, expected a string"),
        (lambda v: v.pop("format"), "key 'format' is missing, expected 1"),
        (lambda v: v.update(format=2), "unknown format 2, expected 1"),
        (lambda v: v.update(format=True), "unknown format True, expected 1"),
        (lambda v: v.update(seed="0"), "key 'seed' must be an integer or null, got '0'"),
        (lambda v: v.update(seed=True), "key 'seed' must be an integer or null, got True"),
        (lambda v: v.update(status="done"), "key 'status' must be one of running, finished, failed, interrupted"),
        (lambda v: v.update(metrics={"test/top1": "high"}), "key 'metrics' must be an object of numbers"),
        (lambda v: v.update(metrics=[0.9]), "key 'metrics' must be an object of numbers, got [0.9]"),
        (lambda v: v.update(progress={"epoch": 0.5}), "key 'progress' must be an object of integers or nulls"),
        (lambda v: v.update(notes=["x"]), "key 'notes' must be an object, got ['x']"),
        (lambda v: v.update(extra=1), "unknown key 'extra'"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, change: Any, message: str) -> None:
    write_record(tmp_path, RECORD)
    path = tmp_path / "record.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        load_records(tmp_path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 1,\n "task"', "is not valid JSON: Expecting ':' delimiter at line 2, column 8"),
        (b"", "is not valid JSON: Expecting value at line 1, column 1"),
        (b"[1]", ": expected a JSON object, got list"),
        (b'{"task": "\xff"}', "is not valid JSON: byte 10 is not UTF-8"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b"[" * 200_000, "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_records(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_records_are_found_in_depth_and_sorted(tmp_path: Path) -> None:
    for name in ("b/c", "a", "b/a"):
        write_record(tmp_path / name, RECORD)
    assert [record.folder for record in load_records(tmp_path)] == [tmp_path / "a", tmp_path / "b/a", tmp_path / "b/c"]


def test_a_directory_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no record\.json in"):
        load_records(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_records(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a directory"):
        load_records(tmp_path / "file")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_previous_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write_record(tmp_path, RECORD)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(UserError, match="No space left on device; the file written before is intact"):
        write_record(tmp_path, dataclasses.replace(RECORD, seed=1))
    assert read_record(tmp_path) == RECORD
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_record(tmp_path / "file" / "run", RECORD)


def test_a_real_full_disk(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    write_record(tmp_path, RECORD)
    # The temporary file's name is fixed for a process, so it can be made to lie on a full device.
    (tmp_path / f".record.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        write_record(tmp_path, dataclasses.replace(RECORD, seed=1))
    assert read_record(tmp_path) == RECORD


def test_a_record_of_the_wrong_type_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="key 'seed' must be an integer or null"):
        write_record(tmp_path, dataclasses.replace(RECORD, seed=0.5))  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
