"""Weighted nearest neighbours against a vote counted by hand, on one and on two processes."""

import hashlib
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lapbench.backbones import VisionBackbone, build_vision_backbone
from lapbench.datamodules import Digits
from lapbench.errors import UserError
from lapbench.evaluation import NearestNeighbors, knn
from lapbench.evaluation.after_fit import AfterFit, join_processes
from lapbench.evaluation.features import AT_ONCE
from lapbench.evaluation.knn import Database, hits
from lapbench.results.record import read_record

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
TINY: dict[str, Any] = {"patch_size": 4, "in_chans": 1, "num_classes": 0}
TINY |= {"img_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
K = (1, 7, 30)


def by_hand(
    queries: torch.Tensor, database: torch.Tensor, labels: list[int], k: int, temperature: float = 0.07
) -> list[list[int]]:
    """The classes with votes of each query, most votes first; in float64, neighbour by neighbour."""
    queries, database = queries.double(), database.double()
    ranked = []
    for cosines in (queries @ database.T / queries.norm(dim=1)[:, None] / database.norm(dim=1)).tolist():
        nearest = sorted(range(len(cosines)), key=lambda i: (-cosines[i], i))[:k]
        votes: dict[int, float] = defaultdict(float)
        for i in nearest:
            votes[labels[i]] += math.exp(cosines[i] / temperature)
        ranked.append(sorted(votes, key=lambda c: (-votes[c], c)))
    return ranked


def test_votes_are_those_counted_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    database, queries = torch.randn(60, 8, generator=generator), torch.randn(20, 8, generator=generator)
    labels = torch.randint(12, (60,), generator=generator)
    own = torch.randint(12, (20,), generator=generator)
    unit = torch.nn.functional.normalize
    votes = Database(unit(database), labels, 12).votes(unit(queries), (1, 5, 60), 0.5)
    assert votes.dtype == torch.float64
    for k, of_k in zip((1, 5, 60), votes, strict=True):
        ranked = by_hand(queries, database, labels.tolist(), k, 0.5)
        for row, classes in zip(of_k, ranked, strict=True):
            assert row.argsort(descending=True)[: len(classes)].tolist() == classes
            assert int((row > 0).sum()) == len(classes)
        pairs = list(zip(ranked, own.tolist(), strict=True))
        expected = [sum(label in classes[:top] for classes, label in pairs) for top in (1, 5)]
        assert hits(of_k, own).tolist() == expected
    weights = (unit(queries) @ unit(database).T / 0.5).double().exp()
    assert torch.allclose(votes[-1].sum(1), weights.sum(1))


def test_equally_near_neighbours_and_equal_votes_have_an_order() -> None:
    # Six samples in the direction of the query, of which three can vote: the first three, in their order.
    features = torch.eye(2)[[1, 0, 0, 1, 0, 0, 0, 0]]
    database = Database(features, torch.tensor([0, 2, 1, 0, 1, 3, 3, 3]), 4)
    queries = torch.tensor([[1.0, 0.0]])
    cosines, places = database.nearest(queries, 3)
    assert (places.tolist(), cosines.tolist()) == ([[1, 2, 4]], [[1, 1, 1]])
    assert database.nearest(queries, 7)[1].tolist() == [[1, 2, 4, 5, 6, 7, 0]]
    (votes,) = database.votes(queries, (2,), 1.0)
    assert votes[0, 1] == votes[0, 2] > 0
    # Class 1 before class 2; class 3 has no vote, so it is not among the five.
    assert [hits(votes, torch.tensor([label])).tolist() for label in (0, 1, 2, 3)] == [[0, 0], [1, 1], [0, 1], [0, 0]]


def vit(**settings: Any) -> VisionBackbone:
    torch.manual_seed(3)
    return build_vision_backbone("vit_tiny_patch16_224", 1, **{**TINY, **settings})


class Task(pl.LightningModule):
    """Any task with a backbone."""

    def __init__(self, backbone: VisionBackbone) -> None:
        super().__init__()
        self.backbone = backbone


def after_fit(
    backbone: VisionBackbone, data: Digits, folder: Path, trainer: pl.Trainer | None = None, **settings: Any
) -> dict[str, Any]:
    """The section of a task with this backbone, as ``lapbench fit`` makes it."""
    task, file = Task(backbone), folder / "last.ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    trainer = trainer or pl.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    if trainer.is_global_zero:
        torch.save({"state_dict": task.state_dict()}, file)
    trainer.strategy.barrier()
    sections: dict[str, Any] = {}
    evaluation = NearestNeighbors(**{"k": K, "report_k": 7, **settings})
    assert AfterFit(trainer, task, data, 0, folder, file, "last").run([evaluation], sections.__setitem__) == []
    return sections["knn"]


def digits(folder: Path, **settings: Any) -> Digits:
    data = Digits(data_dir=str(folder), **{"eval_batch_size": 24, **settings})
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ({"class_token": False}, lambda tokens: tokens.mean(1)),
        ({"reg_tokens": 2}, lambda tokens: tokens[:, 0]),
        ({"class_token": False, "reg_tokens": 2}, lambda tokens: tokens[:, 2:].mean(1)),
    ],
)
def test_the_section_is_that_of_a_vote_by_hand(
    settings: dict[str, Any], token: Callable[[torch.Tensor], torch.Tensor], few_digits: Path, tmp_path: Path
) -> None:
    backbone: Any = vit(
        global_pool="avg" if settings.get("class_token") is False else "token", fc_norm=False, **settings
    )
    with torch.no_grad():
        backbone.norm.weight.copy_(torch.linspace(0.5, 2, 16))
    data = digits(few_digits, val_fraction=0.25)
    section = after_fit(backbone, data, tmp_path, split="val")
    assert section["samples"] == {"database": 120, "val": 40}
    assert section["settings"]["k"] == K

    features = []
    for part in ("train", "val"):
        images, labels = (torch.cat(p) for p in list(zip(*data.plain_dataloader(part), strict=True))[:2])  # type: ignore[arg-type]
        with torch.no_grad():
            features.append((token(backbone.forward_features(data.normalize(images))), labels.tolist()))
    (database, labels), (queries, own) = features
    for k in K:
        ranked = by_hand(queries, database, labels, k)
        for top in (1, 5):
            share = sum(label in classes[:top] for classes, label in zip(ranked, own, strict=True)) / 40
            assert section["metrics"][f"knn/top{top}_k{k}"] == pytest.approx(share)
    assert section["metrics"]["knn/top1"] == section["metrics"]["knn/top1_k7"] > 0.2
    assert section["metrics"]["knn/top5"] == section["metrics"]["knn/top5_k7"]
    assert len(section["metrics"]) == 8


def test_the_backbone_stays_as_it_is_and_dropout_is_off(few_digits: Path, tmp_path: Path) -> None:
    def digest(module: torch.nn.Module) -> str:
        tensors = (*module.named_parameters(), *module.named_buffers())
        content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
        return hashlib.sha256(b"".join(content)).hexdigest()

    data = digits(few_digits)
    dropping = vit(drop_path=0.9, proj_drop_rate=0.5, pos_drop_rate=0.5)
    dropping.register_buffer("counter", torch.arange(3.0), persistent=False)
    before = digest(dropping.train())
    section = after_fit(dropping, data, tmp_path / "dropping")
    assert digest(dropping) == before
    assert all(p.grad is None and p.requires_grad and not p.is_inference() for p in dropping.parameters())
    again = after_fit(vit(), data, tmp_path / "plain", database_device="cpu")
    assert again["metrics"] == section["metrics"]


def test_raw_pixels_are_told_apart(few_digits: Path, tmp_path: Path) -> None:
    pixels = build_vision_backbone("pixels", patch_size=2, in_chans=1, num_classes=0)
    section = after_fit(pixels, digits(few_digits), tmp_path)
    assert section["metrics"]["knn/top1_k1"] > 0.8


def one_of_two(rank: int, folder: Path, few: Path, found: Any) -> None:
    """A process of two."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, barebones=True)
        join_processes(trainer)
        found.put((rank, after_fit(vit(), digits(few), folder / "run", trainer)))


def test_two_processes_give_the_result_of_one(few_digits: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path, few_digits, found)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    one = after_fit(vit(), digits(few_digits), tmp_path / "one")
    assert 37 % AT_ONCE
    for _, two in sorted([found.get(), found.get()]):
        assert two["metrics"] == one["metrics"]
        assert two["samples"] == one["samples"] == {"database": 160, "test": 37}


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("k", (), "NearestNeighbors.k: expected different numbers of at least 1, got ()"),
        ("k", (0, 20), "got (0, 20)"),
        ("k", (20, 20), "got (20, 20)"),
        ("report_k", 5, "NearestNeighbors.report_k: expected one of k (10, 20, 100, 200), got 5"),
        ("temperature", 0.0, "NearestNeighbors.temperature: expected above 0, got 0.0"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: Any, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        NearestNeighbors(**{setting: value})
    assert reason in str(caught.value)


def test_what_does_not_fit_the_run_is_said_before_training(
    tmp_path: Path, fit: Callable[..., Any], few_digits: Path
) -> None:
    outcome = fit(tmp_path / "run", "--trainer.callbacks+=NearestNeighbors", "--trainer.callbacks.split=val")
    assert outcome.status == 2
    reason = "NearestNeighbors.k: expected at most the 120 samples that training draws from, got 200"
    assert outcome.err.splitlines()[-1] == f"lapbench: error: {reason}"
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(UserError, match=r"split val: Digits has no validation split: hold one out"):
        NearestNeighbors(split="val")._check(digits(few_digits))
    with pytest.raises(UserError, match="expected images with labels, got LightningDataModule"):
        NearestNeighbors()._check(pl.LightningDataModule())
    with pytest.raises(UserError, match="at most the 160 samples that training draws from, got 200"):
        NearestNeighbors()._check_k(160)


def test_it_is_repeated_when_it_was_stopped(
    finished: Path, with_evaluations: Callable[..., Path], again: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_evaluations(finished, ("lapbench.evaluation.NearestNeighbors", {"k": [5], "report_k": 5}))
    with monkeypatch.context() as patch:
        patch.setattr(knn, "hits", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert again(run).status != 0
    assert read_record(run).evaluations == {}
    assert again(run).status == 0
    section = read_record(run).evaluations["knn"]
    assert section["samples"] == {"database": 120, "test": 37}
    assert read_record(run).metrics["knn/top1"] == section["metrics"]["knn/top1_k5"] > 0.2
