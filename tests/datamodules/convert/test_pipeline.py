import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lapbench.datamodules.convert import class_folders as folders
from lapbench.datamodules.convert import main, pipeline
from lapbench.datamodules.convert.order import permutation
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError


def convert(source: Path, out: Path, shard_size: int = 5) -> tuple[Manifest, bool]:
    return pipeline.convert(folders.ClassFolders(source), out, shard_size=shard_size)


def test_permutation() -> None:
    assert sorted(permutation(100, "a")) == list(range(100))
    assert permutation(100, "a") == permutation(100, "a") != permutation(100, "b")
    assert permutation(5, "lapbench") == [1, 2, 0, 4, 3]


# In a process of its own: webdataset leaves the files it reads for the garbage collector to close.
READ_WITH_WEBDATASET = """
import base64, json, sys
import webdataset as wds

samples = wds.WebDataset(sys.argv[1:], shardshuffle=False)
raw = [(s["__key__"], base64.b64encode(s["jpg"]).decode(), int(s["cls"])) for s in samples]
decoded = wds.WebDataset(sys.argv[1:], shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
print(json.dumps([raw, [(image.size, label) for image, label in decoded]]))
"""


def test_webdataset_reads_the_shards(tmp_path: Path, class_folders: Path, read_shards: Any, forked: Any) -> None:
    manifest, _ = convert(class_folders, tmp_path / "out")
    urls = [str(tmp_path / "out" / shard.file) for shard in manifest.split("train")]
    result = forked("-c", READ_WITH_WEBDATASET, *urls)
    assert result.returncode == 0, result.stderr
    raw, decoded = json.loads(result.stdout)
    expected = read_shards(tmp_path / "out", "train")
    assert [(key, base64.b64decode(image), label) for key, image, label in raw] == [
        (key, image, label) for key, _, image, label in expected
    ]
    assert decoded == [[[8, 8], label] for *_, label in expected]


# Kills a conversion right before its n-th step that touches the disk, for every n, and finishes it each time.
KILL_EVERYWHERE = """
import os, signal, sys, tarfile
from pathlib import Path
from lapbench.datamodules.convert import class_folders, pipeline

source, base = Path(sys.argv[1]), Path(sys.argv[2])

def convert(out):
    return pipeline.convert(class_folders.ClassFolders(source), out, shard_size=5)

def content(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

def arm(moment):
    steps = 0
    def before(owner, name):
        function = getattr(owner, name)
        def step(*args, **kwargs):
            nonlocal steps
            if steps == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
            return function(*args, **kwargs)
        setattr(owner, name, step)
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "mkdir"), (tarfile.TarFile, "addfile"),
                        (pipeline.Journal, "begin"), (pipeline.Journal, "add"), (pipeline.Journal, "remove")):
        before(owner, name)

convert(base / "whole")
whole = content(base / "whole")
moment = 0
while True:
    out = base / f"killed{moment}"
    child = os.fork()
    if child == 0:
        arm(moment)
        convert(out)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} if out.exists() else {}
    convert(out)
    assert content(out) == whole, moment
    # Of the shards that had their name at most the one without a line in the journal is written again.
    rewritten = [name for name, then in kept.items() if (out / name).stat().st_mtime_ns != then]
    assert len(rewritten) <= 1, (moment, rewritten)
    moment += 1
print(moment)
"""


def test_killed_before_every_step(tmp_path: Path, class_folders: Path) -> None:
    for folder in class_folders.glob("*/*"):  # three classes are enough here
        if int(folder.name) > 2:
            shutil.rmtree(folder)
    result = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, str(class_folders), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # 12 images of two members each, 3 shards of fsync, replace, unlink, journal and its fsync, and more at the ends.
    assert int(result.stdout) > 12 * 2 + 3 * 5


def test_killed_command_goes_on(tmp_path: Path, tiny: Any) -> None:
    image = tiny.jpeg(0)
    for split, count in (("train", 400), ("val", 50)):
        for label in range(4):
            (tmp_path / "in" / split / f"n{label}").mkdir(parents=True)
            for number in range(count):
                (tmp_path / "in" / split / f"n{label}" / f"{number}.JPEG").write_bytes(image + bytes([label]))
    arguments = ["imagenet", "--source", str(tmp_path / "in"), "--shard-size", "20", "--out"]
    script = "import sys; from lapbench.datamodules.convert import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, *arguments, str(tmp_path / "out")]
    for shards in (3, 30):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(list(tmp_path.glob("out/*.tar"))) < shards and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out/manifest.json").exists()
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    assert tiny.folder_bytes(tmp_path / "out") == tiny.folder_bytes(tmp_path / "whole")


@pytest.fixture
def interrupted(tmp_path: Path, class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that stopped after 4 shards."""
    with monkeypatch.context() as patched:
        add = pipeline.Journal.add

        def stop(journal: Any, entry: Any) -> None:
            add(journal, entry)
            if len(journal.entries) == 4:
                raise KeyboardInterrupt

        patched.setattr(pipeline.Journal, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(class_folders, tmp_path / "out")
    return tmp_path / "out"


def test_torn_journal(interrupted: Path, class_folders: Path, tmp_path: Path, tiny: Any) -> None:
    convert(class_folders, tmp_path / "whole")
    whole, journal = tiny.folder_bytes(tmp_path / "whole"), (interrupted / ".convert.journal").read_bytes()
    for cut in range(1, len(journal), 97):
        out = tmp_path / f"torn{cut}"
        out.mkdir()
        for name, content in tiny.folder_bytes(interrupted).items():
            (out / name).write_bytes(content)
        (out / ".convert.journal").write_bytes(journal[:cut])
        if journal[:cut].count(b"\n"):
            convert(class_folders, out)
            assert tiny.folder_bytes(out) == whole
        else:  # without its first line nobody knows whose shards these are
            with pytest.raises(UserError, match="is not empty"):
                convert(class_folders, out)
    (interrupted / ".convert.journal").write_bytes(b'{"dataset": 1}\n' + journal)
    with pytest.raises(UserError, match=r"\.convert\.journal is damaged at line 1: delete"):
        convert(class_folders, interrupted)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_damaged_finished_shard_is_written_again(
    interrupted: Path, class_folders: Path, tmp_path: Path, damage: str, tiny: Any
) -> None:
    path = interrupted / "train-000001.tar"
    content = path.read_bytes()
    path.write_bytes({"missing": b"", "short": content[:-1], "changed": b"x" + content[1:]}[damage])
    if damage == "missing":
        path.unlink()
    convert(class_folders, interrupted)
    convert(class_folders, tmp_path / "whole")
    assert tiny.folder_bytes(interrupted) == tiny.folder_bytes(tmp_path / "whole")


def test_changed_source_or_settings(interrupted: Path, class_folders: Path) -> None:
    with pytest.raises(UserError, match=r"unfinished conversion of imagenet with shard_size 5, now it is 6: choose"):
        convert(class_folders, interrupted, shard_size=6)
    (class_folders / "train/3/new.JPEG").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(
        UserError, match=r"unfinished conversion of imagenet with listing_sha256 '[0-9a-f]+.*, now it is"
    ):
        convert(class_folders, interrupted)
    (class_folders / "train/3/new.JPEG").unlink()
    assert convert(class_folders, interrupted)[1] is False
    # The same for the finished folder.
    assert convert(class_folders, interrupted)[1] is True
    with pytest.raises(UserError, match=r"out holds imagenet with shard_size 5, now it is 6"):
        convert(class_folders, interrupted, shard_size=6)
    with pytest.raises(UserError, match=r"holds the data set 'imagenet', asked for 'digits'"):
        main(["digits", "--out", str(interrupted)])


def test_finished_folder_that_lost_a_shard(class_folders: Path, tmp_path: Path) -> None:
    convert(class_folders, tmp_path / "out")
    (tmp_path / "out/val-000001.tar").unlink()
    with pytest.raises(UserError, match=r"val-000001\.tar is missing or not of the \d+ bytes in the manifest"):
        convert(class_folders, tmp_path / "out")


def test_other_peoples_folder_is_left_alone(class_folders: Path, tmp_path: Path, tiny: Any) -> None:
    before = tiny.folder_bytes(class_folders)
    with pytest.raises(UserError, match=r"is not empty \(train\) and no conversion"):
        convert(class_folders, class_folders)
    after = tiny.folder_bytes(class_folders)
    after.pop(".convert.journal", None)
    assert after == before
    assert not (class_folders / ".convert.journal").exists()


def test_folder_that_cannot_be(class_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot create the folder .*file: File exists"):
        convert(class_folders, tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot create the folder .*file/out: Not a directory"):
        convert(class_folders, tmp_path / "file/out")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_file_system_that_takes_nothing(class_folders: Path) -> None:
    with pytest.raises(UserError, match=r"cannot create the folder /proc/lapbench/out: "):
        convert(class_folders, Path("/proc/lapbench/out"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(class_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"cannot write .*\.convert\.journal: Permission denied"):
        convert(class_folders, tmp_path / "out")


@pytest.mark.parametrize("room", [3_000, 8_000, 0])
def test_full_disk(class_folders: Path, tmp_path: Path, room: int, tiny: Any) -> None:
    # A limit on the size of files is the nearest to a full disk that needs no privileges.
    script = textwrap.dedent(
        f"""
        import resource, sys
        from lapbench.datamodules.convert import main
        from lapbench.errors import UserError
        resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
        try:
            main(sys.argv[1:])
        except UserError as error:
            print(error)
        """
    )
    arguments = ["imagenet", "--source", str(class_folders), "--out", str(tmp_path / "out"), "--shard-size", "40"]
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    path = ".convert.journal" if room == 0 else "train-000000.tar"
    reason = "File too large" + (" (finished shards are kept: run again to go on)" if room else "")
    assert result.stdout == f"cannot write {tmp_path}/out/{path}: {reason}\n"
    assert [p.name for p in (tmp_path / "out").iterdir()] == [".convert.journal"]
    # With room again the same command finishes.
    assert main(arguments) == 0
    assert Manifest.load(tmp_path / "out").samples("train") == 36


def test_source_that_ends_early(class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = folders.ClassFolders.samples
    monkeypatch.setattr(folders.ClassFolders, "samples", lambda *a: list(samples(*a))[:-1])
    with pytest.raises(UserError, match=r"train ended after 35 of 36 images: did it change\?"):
        convert(class_folders, tmp_path / "out")


def test_unreadable_file(class_folders: Path, tmp_path: Path) -> None:
    source = folders.ClassFolders(class_folders)
    (class_folders / "train/5/img_0.JPEG").unlink()
    with pytest.raises(UserError, match=r"cannot read .*train/5/img_0\.JPEG: No such file"):
        pipeline.convert(source, tmp_path / "out", shard_size=5)


def test_help_explains_every_option(capsys: Any) -> None:
    for command in ([], ["digits"], ["cifar10"], ["cifar100"], ["imagenet"], ["index"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert caught.value.code == 0
        assert "lapbench data" in capsys.readouterr().out
    for arguments in ([], ["mnist"], ["digits"], ["imagenet", "--out", "x"], ["digits", "--ou", "x"]):
        with pytest.raises(UserError):
            main(arguments)


def test_interrupt_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "convert", stop)
    assert main(["digits", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on where this one stopped\n"


def test_importing_needs_no_torch() -> None:
    script = (
        "import sys, lapbench.datamodules.convert; print({'torch', 'sklearn', 'pyarrow', 'PIL'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout == "set()\n", result.stderr


def test_jpeg_fixture_is_a_real_image(tiny: Any) -> None:
    assert Image.open(io.BytesIO(tiny.jpeg(3))).size == (8, 8)
