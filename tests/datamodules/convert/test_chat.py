"""SmolTalk, MMLU, GSM8K and ARC to conversation JSONL: what a row becomes, and what is said of one that is damaged."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lapbench.datamodules.conversations import read_conversations, render
from lapbench.datamodules.convert.chat import convert_chat
from lapbench.datamodules.convert.chat_schemas import SCHEMAS
from lapbench.datamodules.convert.tokenizer import train_tokenizer

TALK = {
    "messages": [{"role": "user", "content": "Hi <|bos|>"}, {"role": "assistant", "content": "Hello 😀"}],
    "source": "smol-magpie",
}
MMLU = {"question": "2 + 2?", "choices": ["3", "4", "5", "22"], "answer": 1, "subject": "math"}
ARC = {
    "id": "1",
    "question": "Which is hot?",
    "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
GSM = {
    "question": "How many?",
    "answer": "Half is 48/2 = <<48/2=24>>24.\nAll is <<48+24=72>>72.\n#### 72",
}
ROWS = {"smoltalk": TALK, "mmlu-auxiliary": MMLU, "arc": ARC, "gsm8k": GSM}


def write(path, rows, row_group_size=2):
    """Rows as parquet or JSONL, by the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def converted(lapbench, tmp_path):
    """Converts rows: ``converted("arc", rows, "--skip-invalid")`` returns the outcome and the lines written."""

    def run(name, rows, *options, file="train.parquet"):
        out = tmp_path / "out.jsonl"
        outcome = lapbench("data", name, "--source", write(tmp_path / file, rows), "--out", out, *options)
        return outcome, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else None

    return run


def turns(user, assistant):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


@pytest.mark.parametrize("file", ["train.parquet", "train.jsonl"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_become_conversations(converted, tmp_path, name, file):
    outcome, lines = converted(name, [ROWS[name]] * 5, file=file)
    assert outcome.status == 0
    assert lines is not None
    assert outcome.out.startswith(f"{name}: 5 conversations (")
    assert "left out" not in outcome.out
    letters = "Answer with the letter of the correct choice only."
    expected = {
        "smoltalk": TALK["messages"],
        "mmlu-auxiliary": turns(f"2 + 2?\n\nA. 3\nB. 4\nC. 5\nD. 22\n\n{letters}", "B"),
        "arc": turns(f"Which is hot?\n\nA. ice\nB. fire\nC. snow\n\n{letters}", "B"),
        "gsm8k": turns(
            "How many?",
            [
                {"type": "text", "text": "Half is 48/2 = "},
                {"type": "python", "text": "48/2"},
                {"type": "python_output", "text": "24"},
                {"type": "text", "text": "24.\nAll is "},
                {"type": "python", "text": "48+24"},
                {"type": "python_output", "text": "72"},
                {"type": "text", "text": "72.\n#### 72"},
            ],
        ),
    }
    assert lines == [{"messages": expected[name], "source": name}] * 5
    assert len(list(read_conversations(tmp_path / "out.jsonl"))) == 5


def test_gsm8k_without_calculations(converted):
    _, lines = converted("gsm8k", [GSM], "--calculations", "remove")
    assert lines[0]["messages"] == turns("How many?", "Half is 48/2 = 24.\nAll is 72.\n#### 72")


def test_a_gsm8k_answer_is_rendered_with_its_calculations(tmp_path):
    tokenizer = train_tokenizer([], 265, tmp_path / "tokenizer.json")
    [rendered] = render([SCHEMAS["gsm8k"].messages(GSM)], tokenizer)
    assert (
        "<|assistant_start|>Half is 48/2 = <|python_start|>48/2<|python_end|><|output_start|>24<|output_end|>24.\nAll"
        in tokenizer.decode(rendered.tokens)
    )


def test_auxiliary_questions_inside_a_struct(converted):
    for file in ("train.parquet", "train2.jsonl"):
        _, lines = converted("mmlu-auxiliary", [{"train": MMLU}], file=file)
        assert lines[0]["messages"][1] == {"role": "assistant", "content": "B"}


def test_smoltalk_with_system_messages(converted):
    blank, system = ({"role": "system", "content": content} for content in (" ", "Be brief."))
    rows = [{"messages": [message, *TALK["messages"]]} for message in (blank, system)]
    _, lines = converted("smoltalk", rows)
    assert [line["messages"] for line in lines] == [TALK["messages"], [system, *TALK["messages"]]]


def test_a_folder_in_the_hub_s_layout(lapbench, tmp_path):
    for part in range(2):
        write(tmp_path / f"data/auxiliary_train-0000{part}-of-00002.parquet", [MMLU | {"answer": part}])
    write(tmp_path / "data/test-00000-of-00001.parquet", [MMLU | {"answer": 3}])
    for options, answers in (((), ["A", "B"]), (("--split", "test"), ["D"])):
        out = tmp_path / f"{len(options)}.jsonl"
        assert lapbench("data", "mmlu-auxiliary", "--source", tmp_path, "--out", out, *options).status == 0
        assert [messages[1]["content"] for messages in read_conversations(out)] == answers
    outcome = lapbench("data", "mmlu-auxiliary", "--source", tmp_path, "--out", tmp_path / "x", "--split", "dev")
    assert outcome.status == 2
    assert "has no files of the split 'dev': expected dev-*.parquet or dev.jsonl, got ['0.jsonl'" in outcome.err


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("smoltalk", {"messages": None}, "'messages' must be a list of objects, got None"),
        ("smoltalk", {"messages": TALK["messages"][1:]}, "message 1: expected role 'user' (the roles alternate)"),
        ("smoltalk", {"messages": TALK["messages"][:1]}, "expected at least one assistant turn, got none"),
        ("smoltalk", {"messages": []}, "'messages' must be a list of at least one message"),
        ("mmlu-auxiliary", {"question": " "}, "'question' must be a text, got ' '"),
        ("mmlu-auxiliary", {"answer": 4}, "'answer' must be the number of a choice, 0..3, got 4"),
        ("mmlu-auxiliary", {"answer": None}, "'answer' must be the number of a choice, 0..3, got None"),
        ("mmlu-auxiliary", {"choices": None}, "'choices' must be a list of strings, got None"),
        ("mmlu-auxiliary", {"choices": ["one"], "answer": 0}, "takes 2 to 10 choices, got 1"),
        ("arc", {"answerKey": "B"}, "'answerKey' must be one of the labels 1, 2, 3, got 'B'"),
        ("arc", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "a label for each text, got 2 texts and 1 labels"),
        ("arc", {"choices": None}, "'choices' must be an object of 'text' and 'label', got None"),
        ("gsm8k", {"answer": "It is 72."}, "'answer' must end in a line like '#### 72', got 'It is 72.'"),
        ("gsm8k", {"answer": "<<24>>24\n#### 24"}, "expected a calculation like <<48/2=24>>, got <<24>>"),
        ("gsm8k", {"question": None}, "'question' must be a text, got None"),
    ],
)
def test_an_invalid_row_stops_the_conversion_or_is_left_out(converted, tmp_path, name, change, message):
    rows = [ROWS[name], ROWS[name], ROWS[name] | change, ROWS[name]]
    outcome, lines = converted(name, rows)
    assert outcome.status == 2
    assert lines is None
    assert outcome.err.count("lapbench: error:") == 1
    error = outcome.err.rpartition("lapbench: error: ")[2]
    assert error.startswith(f"{tmp_path / 'train.parquet'}, row 2")
    assert message in error
    assert error.endswith("(--skip-invalid leaves such rows out)\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
    outcome, lines = converted(name, rows, "--skip-invalid")
    assert outcome.status == 0
    assert len(lines) == 3
    assert f"invalid rows left out: 1; the first is {tmp_path / 'train.parquet'}, row 2" in outcome.out


def test_files_that_are_not_what_they_should_be(lapbench, tmp_path):
    good = write(tmp_path / "good.parquet", [GSM] * 8)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-20])
    damaged = tmp_path / "damaged.parquet"
    content = bytearray(good.read_bytes())
    content[8:300] = bytes(292)
    damaged.write_bytes(content)
    other = write(tmp_path / "other.parquet", [ARC])
    inner = write(tmp_path / "inner.parquet", [{"train": {"question": "a"}}])
    line = tmp_path / "line.jsonl"
    line.write_text(f"{json.dumps(GSM)}\n{{")
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("3\n")
    empty = write(tmp_path / "empty.jsonl", [])
    text = tmp_path / "text.txt"
    text.write_text("hello")
    for source, message, name in (
        (cut, "cut.parquet is not readable as parquet (incomplete download?)", "gsm8k"),
        (damaged, "damaged.parquet, row group 0, is not readable as parquet", "gsm8k"),
        (other, "other.parquet: expected a column 'answer', got 'id, question, choices, answerKey'", "gsm8k"),
        (inner, "inner.parquet: expected a column 'train.choices', got 'train'", "mmlu-auxiliary"),
        (line, "line.jsonl, line 2: not JSON: Expecting property name", "gsm8k"),
        (numbers, "numbers.jsonl, line 1: expected an object, got 3", "gsm8k"),
        (empty, "empty.jsonl: they have no rows", "gsm8k"),
        (text, "text.txt: expected a file of .parquet or .jsonl", "gsm8k"),
        (tmp_path / "none.parquet", "none.parquet: no such file", "gsm8k"),
    ):
        outcome = lapbench("data", name, "--source", source, "--out", tmp_path / "out.jsonl")
        assert outcome.status == 2
        assert message in outcome.err
        assert not (tmp_path / "out.jsonl").exists()
    outcome = lapbench("data", "gsm8k", "--source", good, "--split", "test", "--out", tmp_path / "out.jsonl")
    assert "--split test chooses among the files of a folder, but --source names files" in outcome.err
    assert not list(tmp_path.glob(".*"))


def test_what_is_there_is_not_replaced(converted, tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    outcome, _ = converted("gsm8k", [GSM])
    assert outcome.status == 2
    assert "out.jsonl exists already: choose another file, or delete that one" in outcome.err
    assert (tmp_path / "out.jsonl").read_text() == "{}\n"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    source = write(tmp_path / "train.jsonl", [GSM])
    monkeypatch.setattr("lapbench.datamodules.convert.chat.os.fsync", full)
    with pytest.raises(Exception, match=r"cannot write .*out\.jsonl: No space left on device"):
        convert_chat("gsm8k", SCHEMAS["gsm8k"], [source], tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_conversion_needs_no_torch(tmp_path):
    source = write(tmp_path / "train.jsonl", [GSM])
    code = (
        "import sys; from lapbench.cli import main; "
        f"main(['data', 'gsm8k', '--source', {str(source)!r}, '--out', {str(tmp_path / 'out.jsonl')!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    assert (tmp_path / "out.jsonl").exists()
