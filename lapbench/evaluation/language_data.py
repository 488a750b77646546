"""The rows of the language evaluations: from local files in the data sets' schemas, or from the hub."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lapbench.datamodules.conversations import LETTERS
from lapbench.datamodules.convert import chat_schemas
from lapbench.datamodules.convert.rows import Row, find_files, read_rows
from lapbench.errors import UserError

SPLIT = "test"


class Questions(NamedTuple):
    """The test questions of a data set, all checked, and a hash of them."""

    rows: list[dict[str, Any]]
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """Where the test questions of a task are.

    Attributes:
        hub: Repository and configuration on the hub.
        folders: Where they may be below ``data_dir``, the first one that is there counts; ``*`` stands for any folder.
        columns: What a row must have.
        check: Raises UserError that says what is wrong with a row.
    """

    hub: tuple[str, str]
    folders: tuple[str, ...]
    columns: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], object]


def _check_mmlu(row: Mapping[str, Any]) -> None:
    chat_schemas.mmlu(row)
    if len(row["choices"]) != 4:
        raise UserError(f"'choices' must be 4, got {len(row['choices'])}")
    _check_strings(row, "subject")


def _check_humaneval(row: Mapping[str, Any]) -> None:
    _check_strings(row, *HUMANEVAL.columns)
    if not row["entry_point"].isidentifier():
        raise UserError(f"'entry_point' must be the name of a function, got {row['entry_point']!r:.40}")


def _check_strings(row: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UserError(f"{name!r} must be a text, got {row.get(name)!r:.40}")


_ARC = ("question", "choices", "answerKey")
HUMANEVAL = DataSet(
    ("openai/openai_humaneval", "openai_humaneval"),
    ("humaneval", "openai_humaneval/openai_humaneval", "openai_humaneval"),
    ("task_id", "prompt", "test", "entry_point"),
    _check_humaneval,
)
DATA_SETS = {
    "arc_easy": DataSet(
        ("allenai/ai2_arc", "ARC-Easy"), ("arc_easy", "ai2_arc/ARC-Easy", "ARC-Easy"), _ARC, chat_schemas.arc
    ),
    "arc_challenge": DataSet(
        ("allenai/ai2_arc", "ARC-Challenge"),
        ("arc_challenge", "ai2_arc/ARC-Challenge", "ARC-Challenge"),
        _ARC,
        chat_schemas.arc,
    ),
    "mmlu": DataSet(
        ("cais/mmlu", "all"), ("mmlu/all", "mmlu", "mmlu/*"), ("question", "choices", "answer", "subject"), _check_mmlu
    ),
    "gsm8k": DataSet(("openai/gsm8k", "main"), ("gsm8k/main", "gsm8k"), ("question", "answer"), chat_schemas.gsm8k),
    "humaneval": HUMANEVAL,
}


def load_questions(task: str, data_dir: Path | None) -> Questions:
    """The test questions of ``task``.

    Args:
        task: A key of ``DATA_SETS``.
        data_dir: Folder that holds one for each task, with ``test.jsonl``, ``test.parquet`` or ``test-*.parquet``:
            named like the task, or a copy of the hub's repository. None loads from the hub.

    Raises:
        UserError: No such folder or files, a file that cannot be read, a missing column, a row of another form; or
            the hub cannot be reached.
    """
    data_set = DATA_SETS[task]
    rows = []
    digest = hashlib.sha256()
    source = _from_hub(task, data_set) if data_dir is None else _from_files(task, data_set, data_dir)
    for place, values in source:
        row = {name: values.get(name) for name in data_set.columns}
        try:
            data_set.check(row)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        if "choices" in row and len(_texts(row["choices"])) > len(LETTERS):
            raise UserError(f"{place}: 'choices' must be at most {len(LETTERS)}, got {len(_texts(row['choices']))}")
        digest.update(json.dumps(row, sort_keys=True).encode())
        rows.append(row)
    if not rows:
        raise UserError(f"task {task}: expected questions, got none in {data_dir or data_set.hub[0]}")
    return Questions(rows, digest.hexdigest())


def _texts(choices: Any) -> list[str]:
    texts: list[str] = choices["text"] if isinstance(choices, dict) else choices
    return texts


def _from_files(task: str, data_set: DataSet, data_dir: Path) -> Iterator[Row]:
    if not data_dir.is_dir():
        raise UserError(f"data_dir {data_dir}: no such folder")
    folders: list[Path] = []
    for pattern in data_set.folders:
        found = sorted(path for path in data_dir.glob(pattern) if path.is_dir())
        # A folder of folders holds no files of its own.
        folders = [path for path in found if any(child.is_file() for child in path.iterdir())]
        if folders:
            break
    if not folders:
        expected = ", ".join(data_set.folders)
        raise UserError(f"task {task}: expected a folder with its files in {data_dir}: one of {expected}")
    for folder in folders:
        try:
            files = find_files([str(folder)], SPLIT, SPLIT)
        except UserError as error:
            raise UserError(f"task {task}: {str(error).removeprefix('--source ')}") from error
        for file in files:
            yield from read_rows(file, data_set.columns)


def _from_hub(task: str, data_set: DataSet) -> Iterator[Row]:
    import datasets

    repository, name = data_set.hub
    try:
        rows = datasets.load_dataset(repository, name, split=SPLIT)
    except Exception as error:  # the library and those below it have many
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"task {task}: cannot load {repository} from the Hugging Face hub ({reason}); name a folder with local "
            "files as data_dir"
        ) from error
    for number, values in enumerate(rows):
        yield Row(f"{repository}/{name}, row {number}", values)
