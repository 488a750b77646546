"""The first samples of a split, where its batches begin, and the samples that figures show."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lapbench.datamodules import Digits, sharded
from lapbench.errors import UserError
from lapbench.evaluation.geometry_data import GeometryData, batch_starts
from lapbench.evaluation.geometry_samples import FirstSamples, as_points, png, simplex_classes, spaced
from lapbench.evaluation.processes import Processes


def digits(folder: Path, **settings: Any) -> Digits:
    data = Digits(data_dir=str(folder), **{"eval_batch_size": 8, "num_workers": 0, **settings})
    data.setup("fit")
    return data


def keys_of(data: GeometryData) -> dict[int, str]:
    """The key of each sample of this process by its place."""
    loader = data.predict_dataloader()
    found = {}
    for first, (images, labels, keys) in zip(batch_starts(loader), loader, strict=True):
        assert len(images) == len(labels) == len(keys)
        found |= {first + row: key for row, key in enumerate(keys)}
    return found


@pytest.mark.parametrize(
    ("reader", "workers", "max_samples"),
    [(reader, 0, most) for reader in ("index", "stream") for most in (None, 70, 5, 1000)]
    + [("index", 2, 70), ("stream", 2, 70)],
)
def test_places_are_those_in_the_split(
    few_digits: Path, reader: Any, workers: int, max_samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any number of processes and workers; the split has three shards."""
    settings = {"reader": reader, "persistent_workers": False}
    data = digits(few_digits, **settings)
    data.test_split = "train"  # type: ignore[misc]
    everything = [key for _, _, keys in data.plain_dataloader("test") for key in keys]
    assert len(everything) == 160
    data = digits(few_digits, num_workers=workers, **settings)
    data.test_split = "train"  # type: ignore[misc]
    found: dict[int, str] = {}
    shares = []
    for rank in range(2):
        monkeypatch.setattr(sharded, "_distributed", lambda: True)
        monkeypatch.setattr(sharded.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(sharded.dist, "get_world_size", lambda: 2)
        own = keys_of(GeometryData(data, "test", max_samples))
        assert not own.keys() & found.keys()
        found |= own
        shares.append(len(own))
    expected = everything[:max_samples]
    assert [found[place] for place in range(len(found))] == expected
    assert shares == [len(expected) // 2, len(expected) - len(expected) // 2]


def test_more_processes_than_samples(few_digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "_distributed", lambda: True)
    monkeypatch.setattr(sharded.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(sharded.dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes cannot share the evaluation of 1 samples: use fewer"):
        GeometryData(digits(few_digits), "test", 1).predict_dataloader()


def test_the_data_stay_as_they_are(few_digits: Path) -> None:
    data = digits(few_digits)
    assert len(keys_of(GeometryData(data, "test", 9))) == 9
    assert data.test_dataloader().stream.plan.samples == 37


def test_the_first_samples_of_each_class_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (60,), generator=generator).tolist()
    contents = torch.arange(60.0).view(60, 1, 1).expand(60, 3, 2)
    expected = [(c, i) for c in (0, 2) for i in [i for i, label in enumerate(labels) if label == c][:5]]
    for batches in ([range(60)], [range(40, 60), range(7), range(7, 40)]):
        first = FirstSamples([2, 0], 5)
        for batch in batches:
            first.update(contents[batch.start : batch.stop], labels[batch.start : batch.stop], batch.start)
        assert all(len(kept) == 5 for kept in first.kept.values())
        found = first.gathered(Processes())
        assert [(label, int(content[0, 0])) for label, content in found] == expected
    tokens, classes = as_points(found)
    assert tokens.shape == (30, 2)
    assert classes == [c for c, _ in expected for _ in range(3)]


def test_tokens_at_even_distances() -> None:
    tokens = torch.arange(10.0).view(1, 10, 1)
    assert spaced(tokens, 4).flatten().tolist() == [0, 2, 5, 7]
    assert torch.equal(spaced(tokens, 10), tokens)
    assert torch.equal(spaced(tokens, 99), tokens)


def test_three_classes_that_depend_on_nothing_but_their_number() -> None:
    assert simplex_classes(3) == [0, 1, 2]
    chosen = simplex_classes(1000)
    assert chosen == sorted(set(chosen)) == simplex_classes(1000)
    assert len(chosen) == 3


@pytest.mark.parametrize("channels", [1, 3])
def test_images_as_png(channels: int) -> None:

    values = torch.arange(channels * 6).view(channels, 2, 3) * 14
    with Image.open(io.BytesIO(base64.b64decode(png(values / 255)))) as image:
        pixels = np.asarray(image).reshape(2, 3, channels)
    assert np.array_equal(pixels, values.movedim(0, -1).numpy())
