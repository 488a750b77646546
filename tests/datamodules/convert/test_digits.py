import hashlib
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from lapbench.datamodules.convert import digits, main
from lapbench.datamodules.convert.digits import split_indices
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError


def pixels(image: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    decoded = Image.open(io.BytesIO(image))
    assert decoded.mode == "L"
    return np.asarray(decoded)


def test_every_digit_once_and_exactly(tmp_path: Path, read_shards: Callable[..., Any], capsys: Any) -> None:
    assert main(["digits", "--out", str(tmp_path / "d")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("digits: 1,437 train + 360 test images of 10 classes in 4 shards")
    assert out[1] == f"next: lapbench fit --config supervised/digits --data.init_args.data_dir {tmp_path / 'd'}"
    bunch = load_digits()
    train, test = (read_shards(tmp_path / "d", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1437, 360)
    assert sorted(int(key) for key, *_ in train + test) == list(range(1797))
    for key, extension, image, label in train + test:
        assert extension == "png"
        assert label == bunch.target[int(key)]
        # The levels come back exactly, and span the whole range of a byte.
        assert np.array_equal((pixels(image).astype(int) * 16 + 127) // 255, bunch.images[int(key)])
    assert max(pixels(image).max() for _, _, image, _ in train) == 255
    # Stratified: each class has its share of the test split to within one image.
    shares = Counter(label for *_, label in test)
    assert all(abs(shares[c] - 360 * n / 1797) < 1 for c, n in Counter(bunch.target.tolist()).items())


def test_the_split_never_changes() -> None:
    split = split_indices(load_digits().target.tolist())
    digest = hashlib.sha256(",".join(map(str, split["test"])).encode()).hexdigest()
    assert digest == "3398635c39c1931b90ca6da9f5bf11cfc17521a67b43da4c8baabcd12dc8adb4"


def test_already_converted(tmp_path: Path, capsys: Any) -> None:
    first = digits.convert(tmp_path)
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    shards = ["test-000000.tar", *(f"train-{i:06d}.tar" for i in range(3))]
    assert set(times) == {"manifest.json", "test.index.npy", "train.index.npy", *shards}
    assert digits.convert(tmp_path) == first == Manifest.load(tmp_path)
    assert main(["digits", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("already converted: digits: ")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_processes_at_once(tmp_path: Path, start_forked: Any) -> None:
    out = tmp_path / "d"
    script = (
        f"from pathlib import Path; from lapbench.datamodules.convert import digits; digits.convert(Path({str(out)!r}))"
    )
    processes = [start_forked("-c", script) for _ in range(2)]
    assert [process.communicate()[1] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    digits.convert(tmp_path / "alone")
    both = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("d", "alone")]
    assert both[0] == both[1]


def test_other_digits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "CHECKSUM", "0" * 64)
    with pytest.raises(UserError, match=r"digits have SHA-256 87ff0c9e.*expected 0000"):
        digits.convert(tmp_path / "d")
