"""Training a tokenizer: equal texts make equal files, of the size asked for or not at all."""

import json
from pathlib import Path

import pytest

from lapbench.datamodules.convert import main
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

TEXTS = ["the cat sat on the mat\n" * 5, "don't, in 12345 years", "déjà vu"]


def test_equal_texts_make_equal_files(tmp_path: Path) -> None:
    files = [train_tokenizer(iter(TEXTS), 290, tmp_path / name).path for name in ("a.json", "b.json")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert train_tokenizer([TEXTS[0]], 270, tmp_path / "c.json").path.read_bytes() != files[0].read_bytes()


def test_numbers_are_split_into_pairs_of_digits(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1234 " * 50], 265 + 2, tmp_path / "t.json")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["12", "34"]


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (TEXTS, 264, r"the vocabulary needs 265 tokens \(256 bytes, 9 special\), got 264"),
        (["ab"], 1000, r"the texts make a vocabulary of 266 tokens at most, asked for 1000: use more text"),
        ([], 266, r"a vocabulary of 265 tokens at most, asked for 266"),
    ],
)
def test_a_vocabulary_that_cannot_be(tmp_path: Path, texts: list[str], size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, size, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_vocabulary_is_bytes(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 265, tmp_path / "t.json")
    assert len(tokenizer.encode("日")) == 3


def test_an_error_of_the_texts_arrives(tmp_path: Path) -> None:
    def texts():  # type: ignore[no-untyped-def]
        yield TEXTS[0]
        raise UserError("bad file")

    with pytest.raises(UserError, match="bad file"):
        train_tokenizer(texts(), 300, tmp_path / "t.json")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "t.json"
    arguments = ["tokenizer", "--vocab-size", "280", "--out", str(out), "--source"]
    assert main([*arguments, f"{tmp_path}/*.txt", str(tmp_path / "b.jsonl")]) == 0
    printed = capsys.readouterr().out.splitlines()
    tokenizer = Tokenizer.load(out)
    texts = [TEXTS[0], *TEXTS]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    per_token = sum(len(text.encode()) for text in texts) / tokens
    assert printed == [
        f"tokenizer of 280 tokens, trained on {sum(map(len, texts)):,} characters of 4 documents "
        f"({per_token:.2f} bytes a token on the first of them), in {out}",
        f"next: lapbench data fineweb-edu --source FILES --tokenizer {out} --out data/fineweb-edu",
    ]
    assert tokenizer.path.read_bytes() == train_tokenizer(texts, 280, tmp_path / "u.json").path.read_bytes()
    with pytest.raises(UserError, match=r"t\.json exists: data may have been made with it"):
        main([*arguments, str(tmp_path / "a.txt")])


def test_command_with_a_limit_and_pydocs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tokenizer", "--source", "pydocs", "--vocab-size", "300", "--max-chars", "20000"]
    assert main([*arguments, "--out", str(tmp_path / "t.json")]) == 0
    assert "tokenizer of 300 tokens, trained on 20,000 characters of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", r"a\.csv: expected a file of \.parquet, \.jsonl, \.txt"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8: byte 2 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"a\.jsonl, line 2: expected an object with a string 'text'"),
        ("a.jsonl", b'{"text": "a"}\n\n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: the text is not Unicode"),
        ("a.parquet", b"PAR1", r"a\.parquet is not readable as parquet"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        main(["tokenizer", "--source", str(tmp_path / name), "--out", str(tmp_path / "t.json")])
    assert not (tmp_path / "t.json").exists()


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--source .*/x\*\.txt: no such file$"):
        main(["tokenizer", "--source", f"{tmp_path}/x*.txt", "--out", str(tmp_path / "t.json")])
    with pytest.raises(UserError, match=r"no such file; it is a folder"):
        main(["tokenizer", "--source", str(tmp_path), "--out", str(tmp_path / "t.json")])
