"""Python's own documentation: the same for every process, every tenth document held out."""

import sys
from pathlib import Path

import pytest

from lapbench.datamodules.convert import main, pydocs
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.errors import UserError


def test_every_tenth_document_is_for_validation() -> None:
    from pydoc_data.topics import topics

    texts = pydocs.load()
    names = sorted(topics)
    assert texts["val"] == [topics[name] for name in names[4::10]]
    assert {*texts["train"]} | {*texts["val"]} == {*topics.values()}
    assert not {*texts["train"]} & {*texts["val"]}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["pydocs", "--out", str(out), "--vocab-size", "512"]) == 0
    manifest = TokenManifest.load(out)
    assert manifest.vocab_size == 512
    size = sum(len(text.encode()) for texts in pydocs.load().values() for text in texts)
    assert sum(shard.text_bytes for shards in manifest.splits.values() for shard in shards) == size
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(
        f"pydocs: {manifest.tokens('train'):,} train + {manifest.tokens('val'):,} val tokens of "
    )
    assert printed[1] == f"next: lapbench fit --config language/pydocs --data.init_args.data_dir {out}"
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    again = tmp_path / "again"
    assert main(["pydocs", "--out", str(again), "--vocab-size", "512"]) == 0
    assert {path.name: path.read_bytes() for path in again.iterdir()} == files
    with pytest.raises(UserError, match=r"holds pydocs with vocab_size 512, now it is 2048"):
        main(["pydocs", "--out", str(out)])


def test_a_python_without_its_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"this Python \(3\.\S+\) was installed without pydoc_data\.topics"):
        main(["pydocs", "--out", str(tmp_path / "out")])
