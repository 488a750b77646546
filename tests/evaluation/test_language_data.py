"""Questions from local files: layouts, and what is wrong with files, columns and rows, in one line each."""

import json
from pathlib import Path
from typing import Any

import language_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lapbench.errors import UserError
from lapbench.evaluation.language_data import DATA_SETS, load_questions

ROWS = language_rows.ROWS
# As the repositories on the hub lie.
HUB = {
    "arc_easy": "ai2_arc/ARC-Easy/test-00000-of-00001.parquet",
    "arc_challenge": "ai2_arc/ARC-Challenge/test-00000-of-00001.parquet",
    "mmlu": "mmlu/all/test-00000-of-00001.parquet",
    "gsm8k": "gsm8k/main/test-00000-of-00001.parquet",
    "humaneval": "openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
}


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("task", DATA_SETS)
def test_plain_files_and_copies_of_the_hub_hold_the_same_questions(task: str, tmp_path: Path) -> None:
    plain = load_questions(task, language_rows.write(tmp_path / "plain", {task: ROWS[task]}))
    write_parquet(tmp_path / "hub" / HUB[task], ROWS[task])
    (tmp_path / "hub" / HUB[task].partition("/")[0] / "README.md").touch()
    assert load_questions(task, tmp_path / "hub") == plain
    assert len(plain.rows) == len(ROWS[task])
    assert set(plain.rows[0]) == set(DATA_SETS[task].columns)


def test_mmlu_may_lie_in_a_folder_for_each_subject(tmp_path: Path) -> None:
    for row in ROWS["mmlu"]:
        own = [other for other in ROWS["mmlu"] if other["subject"] == row["subject"]]
        write_parquet(tmp_path / "mmlu" / row["subject"] / "test-00000-of-00001.parquet", own)
    assert load_questions("mmlu", tmp_path).rows == ROWS["mmlu"]


def test_the_hash_is_that_of_the_questions(tmp_path: Path) -> None:
    one = load_questions("gsm8k", language_rows.write(tmp_path / "one", {"gsm8k": ROWS["gsm8k"]}))
    other = load_questions("gsm8k", language_rows.write(tmp_path / "other", {"gsm8k": ROWS["gsm8k"][:1]}))
    assert one.sha256 != other.sha256


def test_missing_folders_and_splits_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task mmlu: expected a folder .* one of mmlu/all, mmlu, mmlu/\*"):
        load_questions("mmlu", tmp_path)
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu/dev.jsonl").touch()
    with pytest.raises(UserError, match=r"task mmlu: .*mmlu has no files of the split 'test': .*dev.jsonl"):
        load_questions("mmlu", tmp_path)
    (tmp_path / "mmlu/test.jsonl").touch()
    with pytest.raises(UserError, match=r"task mmlu: expected questions, got none"):
        load_questions("mmlu", tmp_path)


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("arc_easy", without(ROWS["arc_easy"][0], "answerKey"), "'answerKey' must be one of the labels A, B, C, D"),
        ("arc_easy", {**ROWS["arc_easy"][0], "choices": ["a", "b"]}, "'choices' must be an object"),
        (
            "arc_easy",
            language_rows.arc("Which?", [str(i) for i in range(11)], "A", "ABCDEFGHIJK"),
            "takes 2 to 10 choices, got 11",
        ),
        ("mmlu", {**ROWS["mmlu"][0], "answer": 4}, r"'answer' must be the number of a choice, 0..3"),
        ("mmlu", {**ROWS["mmlu"][0], "choices": ["a", "b"]}, "'choices' must be 4, got 2"),
        ("mmlu", without(ROWS["mmlu"][0], "subject"), "'subject' must be a text, got None"),
        ("gsm8k", {**ROWS["gsm8k"][0], "answer": "seven"}, "'answer' must end in a line like"),
        ("humaneval", {**ROWS["humaneval"][0], "test": None}, "'test' must be a text, got None"),
        ("humaneval", {**ROWS["humaneval"][0], "entry_point": "a b"}, "must be the name of a function"),
    ],
)
def test_rows_of_another_form_are_named(task: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = language_rows.write(tmp_path, {task: [ROWS[task][1], row]})
    with pytest.raises(UserError, match=rf"test.jsonl, line 2: .*{message}"):
        load_questions(task, folder)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / HUB["gsm8k"], ROWS["gsm8k"])
    whole = file.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"test-00000-of-00001.parquet") as error:
            load_questions("gsm8k", tmp_path)
        assert "\n" not in str(error.value)
    write_parquet(file, [without(row, "question") for row in ROWS["gsm8k"]])
    with pytest.raises(UserError, match=r"parquet: expected a column 'question', got 'answer'"):
        load_questions("gsm8k", tmp_path)
    plain = tmp_path / "arc_easy/test.jsonl"
    plain.parent.mkdir()
    plain.write_text(json.dumps(ROWS["arc_easy"][0]) + "\n{")
    with pytest.raises(UserError, match=r"test.jsonl, line 2: not JSON"):
        load_questions("arc_easy", tmp_path)


def test_without_a_folder_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(*arguments: Any, **named: Any) -> Any:
        asked.append((arguments, named))
        return datasets.Dataset.from_list(ROWS["arc_easy"])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_questions("arc_easy", None).rows) == len(ROWS["arc_easy"])
    assert asked == [(("allenai/ai2_arc", "ARC-Easy"), {"split": "test"})]

    def unreachable(*arguments: Any, **named: Any) -> Any:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"cannot load allenai/ai2_arc from the Hugging Face hub \(no route\); name a"):
        load_questions("arc_easy", None)
