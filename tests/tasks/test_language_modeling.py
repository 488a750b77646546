"""The language modelling task against computations by hand."""

import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lapbench.backbones import DecoderSettings
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, MuonSettings, OptimizerSettings
from lapbench.results.record import Record, write_record
from lapbench.tasks import LanguageModeling
from lapbench.tasks.metrics import BitsPerByte
from lapbench.tasks.steps import NonFiniteLossError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]
VOCABULARY, CONTEXT, IGNORED = 11, 6, -100
SGD = OptimizerSettings(name="sgd", lr=0.5, weight_decay=0.0, options={"momentum": 0.0, "nesterov": False})


def task(heads: Any = 1, **settings: Any) -> LanguageModeling:
    """A decoder of one block, always with the same first weights."""
    torch.manual_seed(0)
    backbone = DecoderSettings(
        "tiny", heads, depth=1, width=8, num_heads=2, context=settings.pop("context", CONTEXT), head_std=0.3
    )
    settings.setdefault("optimizer" if "muon" not in settings else "lr_schedule", SGD)
    if "muon" in settings:
        settings["lr_schedule"] = LRSchedule("constant", warmup_epochs=0)
    settings.setdefault("lr_schedule", LRSchedule("constant", warmup_epochs=0))
    return LanguageModeling(backbone, settings.pop("vocab_size", VOCABULARY), **settings)


class Windows(pl.LightningDataModule):
    """The same ``count`` batches of two windows in each epoch, targets masked at random; 5 validation windows."""

    vocab_size, context = VOCABULARY, CONTEXT
    batch_size, eval_batch_size = 2, 3
    token_bytes = torch.tensor([1, 2, 3] * 3 + [0, 0]).numpy()

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        windows = 2 * count + 5
        self.inputs = torch.randint(VOCABULARY, (windows, CONTEXT), generator=generator)
        self.targets = torch.randint(VOCABULARY, (windows, CONTEXT), generator=generator)
        masked = torch.rand(windows, CONTEXT, generator=generator) < torch.rand(windows, 1, generator=generator)
        self.targets[masked] = IGNORED

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.inputs[:-5], self.targets[:-5]), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.inputs[-5:], self.targets[-5:]), self.eval_batch_size)

    def batch(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Micro-batches first..last as one."""
        return self.inputs[2 * first : 2 * last], self.targets[2 * first : 2 * last]


class Steps(pl.Callback):
    """What each optimizer step had: metrics, momentum."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.momentum: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        if trainer.global_step > len(self.logged):
            self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})
            self.momentum.append(trainer.optimizers[0].param_groups[0]["momentum"])


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **settings},
    )


def sgd_by_hand(model: LanguageModeling, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[float]]:
    """A step for each whole batch; returns losses and norms of the gradient."""
    losses, norms = [], []
    for inputs, targets in batches:
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad for p in model.backbone.parameters()]
        norms.append(nn.utils.get_total_norm([g for g in gradients if g is not None]).item())
        with torch.no_grad():
            for p in model.backbone.parameters():
                assert p.grad is not None
                p -= 0.5 * p.grad
    return losses, norms


def assert_weights(model: LanguageModeling, twin: LanguageModeling) -> None:
    own = dict(model.backbone.named_parameters())
    for name, p in twin.backbone.named_parameters():
        torch.testing.assert_close(own[name].detach(), p.detach(), rtol=1e-6, atol=1e-6, msg=name)


def test_accumulated_micro_batches_with_masks_are_one_big_batch() -> None:
    """8 micro-batches, 4 in a step; then 6, whose last step has 2."""
    for count in (8, 6):
        data, steps, model, twin = Windows(count), Steps(), task(), task()
        trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[steps]).fit(model, data)
        losses, norms = sgd_by_hand(twin, [data.batch(0, 4), data.batch(4, count)])
        assert_weights(model, twin)
        assert [step["train/loss"] for step in steps.logged] == pytest.approx(losses, rel=1e-6)
        assert [step["train/grad_norm"] for step in steps.logged] == pytest.approx(norms, rel=1e-5)


def test_a_micro_batch_without_targets_counts_nothing() -> None:
    data, steps, model, twin = Windows(4), Steps(), task(), task()
    data.targets[2:4] = IGNORED
    trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[steps]).fit(model, data)
    losses, _ = sgd_by_hand(twin, [data.batch(0, 2), data.batch(2, 4)])
    assert_weights(model, twin)
    assert [step["train/loss"] for step in steps.logged] == pytest.approx(losses, rel=1e-6)


def test_a_step_without_targets_moves_nothing() -> None:
    data, model = Windows(2), task()
    data.targets[:] = IGNORED
    trainer(max_epochs=1, accumulate_grad_batches=2).fit(model, data)
    assert_weights(model, task())


def test_the_gradient_is_clipped_after_it_is_a_mean() -> None:
    data, model, twin = Windows(2), task(), task()
    start = nn.utils.parameters_to_vector(twin.backbone.parameters()).detach()
    _, norms = sgd_by_hand(twin, [data.batch(0, 2)])
    clip = norms[0] / 2
    trainer(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=clip).fit(model, data)
    moved = nn.utils.parameters_to_vector(model.backbone.parameters()).detach() - start
    assert moved.norm().item() == pytest.approx(0.5 * clip, rel=1e-3)


def test_two_processes_are_one_big_batch(tmp_path: Path, start_forked: Callable[..., Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start_forked(script, tmp_path / "state.pt", env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    two = torch.load(tmp_path / "state.pt", weights_only=True)
    data, twin = Windows(8), task()
    # Each process takes every second window of each batch of two.
    losses, norms = sgd_by_hand(twin, [data.batch(0, 4), data.batch(4, 8)])
    for name, p in twin.backbone.named_parameters():
        torch.testing.assert_close(two["weights"][name], p.detach(), rtol=1e-6, atol=1e-6, msg=name)
    assert [step["train/loss"] for step in two["logged"]] == pytest.approx(losses, rel=1e-6)
    assert [step["train/grad_norm"] for step in two["logged"]] == pytest.approx(norms, rel=1e-5)
    one = trainer(limit_val_batches=1.0).validate(twin, data, verbose=False)[0]
    for name, value in one.items():
        assert two["validated"][name] == pytest.approx(value, rel=1e-5), name


def test_muon_warms_its_momentum_up_by_the_step() -> None:
    steps = Steps()
    run = trainer(max_steps=5, accumulate_grad_batches=2, callbacks=[steps])
    run.fit(task(muon=MuonSettings(momentum_warmup=4)), Windows(4))
    assert steps.momentum == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95])
    assert steps.logged[0]["train/lr"] == pytest.approx(0.02)


def test_loss_and_bits_per_byte_by_hand() -> None:
    data, model = Windows(1), task()
    inputs, targets = data.inputs[-5:], data.targets[-5:]
    nats = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    kept = targets.flatten() != IGNORED
    sizes = torch.as_tensor(data.token_bytes)[targets.flatten().clamp(min=0)] * kept
    metrics = trainer(limit_val_batches=1.0).validate(model, data, verbose=False)[0]
    assert metrics["val/loss"] == pytest.approx(nats[kept].mean().item(), rel=1e-6)
    bits = nats[sizes > 0].sum().item() / math.log(2) / sizes.sum().item()
    assert metrics["val/bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert (sizes[kept] == 0).any()  # special tokens among them


def test_a_uniform_model_over_bytes_has_eight_bits_per_byte() -> None:
    """Emoji and CJK as their bytes, one token each, and a document's separator."""
    tokens = [256, *"漢字 und 😀, naïve".encode(), 256]
    metric = BitsPerByte()
    sizes = torch.tensor([1] * 256 + [0])
    logits = torch.zeros(len(tokens), 256)
    losses = F.cross_entropy(logits, torch.tensor(tokens).clamp(max=255), reduction="none")
    metric.update(losses, sizes[torch.tensor(tokens)])
    assert metric.compute().item() == pytest.approx(8.0, rel=1e-7)
    assert metric.bytes.item() == len("漢字 und 😀, naïve".encode())


def test_a_non_finite_loss_stops_before_the_step() -> None:
    data, model = Windows(6), task()

    class Break(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                pl_module.backbone.embedding.weight.data[0, 0] = float("inf")

    said = r"train/loss is nan at optimizer step 1, epoch 0, batch 3: expected a finite number"
    with pytest.raises(NonFiniteLossError, match=said):
        trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[Break()]).fit(model, data)
    assert all(p.isfinite().all() for name, p in model.backbone.named_parameters() if "embedding" not in name)


def saved(model: LanguageModeling, folder: Path, **record: Any) -> Path:
    """A run's folder with this model as its last checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": model.state_dict()}, folder / "checkpoints/last.ckpt")
    write_record(folder, Record("LanguageModeling", "Windows", "tiny", "1L", 0, **{"status": "finished", **record}))
    return folder


@pytest.mark.parametrize("what", ["folder", "file"])
def test_training_starts_from_another_run(what: str, tmp_path: Path) -> None:
    source = task()
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1.0)
    folder = saved(source, tmp_path / "run", checkpoint="last")
    path = folder if what == "folder" else folder / "checkpoints/last.ckpt"
    model = task(init_from=str(path))
    trainer(max_steps=1, limit_train_batches=1).fit(model, Windows(1))
    sgd_by_hand(source, [Windows(1).batch(0, 1)])
    assert_weights(model, source)


def test_a_resumed_run_does_not_read_the_other_one_again(tmp_path: Path) -> None:
    model = task(init_from=str(saved(task(), tmp_path / "run")))
    run = trainer(max_steps=1)
    run.fit(model, Windows(2))
    run.save_checkpoint(tmp_path / "own.ckpt")
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    again = task(init_from=str(tmp_path / "run"))
    trainer(max_steps=1).fit(again, Windows(2), ckpt_path=tmp_path / "own.ckpt", weights_only=True)
    assert_weights(again, model)


@pytest.mark.parametrize(
    ("settings", "record", "said"),
    [
        ({"vocab_size": 12}, {}, r"embedding.weight has shape \(12, 8\), the model expects \(11, 8\)"),
        ({}, {"status": "running"}, "init_from: expected a finished run, the one in .*/run is running"),
        ({}, {"checkpoint": "best val/loss"}, "init_from: the run in .*/run has no checkpoint best.ckpt"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(
    settings: dict[str, Any], record: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = saved(task(**settings), tmp_path / "run", **record)
    with pytest.raises(UserError, match=said) as caught:
        trainer(max_steps=1).fit(task(init_from=str(folder)), Windows(1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "said"), [("none", "is neither"), ("", "has no record.json")])
def test_nothing_to_start_from(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"init_from: expected .*{said}"):
        trainer(max_steps=1).fit(task(init_from=str(tmp_path / name)), Windows(1))


@pytest.mark.parametrize(
    ("settings", "data", "said"),
    [
        ({"vocab_size": 12}, {}, "model.vocab_size: the model has 12 tokens, the data set Windows has 11"),
        ({"context": 5}, {}, "data.context: expected at most 5 .the model's context., got 6"),
        ({"optimizer": SGD, "muon": MuonSettings()}, {}, "optimizer, muon: expected one of them, got both"),
        ({"muon": MuonSettings(lr=-1)}, {}, "muon.lr: expected a number above 0, got -1"),
        ({"optimizer": OptimizerSettings(name="adamww")}, {}, "timm has no optimizer 'adamww'"),
        ({"sample_tokens": 0}, {}, "sample_tokens: expected at least 1, got 0"),
    ],
)
def test_refused(settings: dict[str, Any], data: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trainer(max_steps=1).fit(task(**settings), Windows(1))


def test_it_needs_a_data_module() -> None:
    data = Windows(1)
    with pytest.raises(UserError, match="data: language modelling needs a DataModule"):
        trainer(max_steps=1).fit(task(), data.train_dataloader(), data.val_dataloader())


def test_samples_leave_training_as_it_is(tmp_path: Path) -> None:
    """Text in TensorBoard, the same weights and random state as without."""
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    states = []
    for prompts in ([], ["a", "bc"]):
        data, model = Windows(3), task(sample_prompts=prompts, sample_tokens=4)
        data.tokenizer = SimpleNamespace(
            bos=10,
            encode=lambda text: [ord(c) - 97 for c in text],
            decode=lambda ids: "".join(chr(97 + i) for i in ids),
        )
        torch.manual_seed(3)
        board = TensorBoardLogger(tmp_path, name="", version=str(len(prompts)))
        run = trainer(max_epochs=2, limit_val_batches=1.0)
        run.loggers = [board]
        run.fit(model, data)
        states.append([torch.get_rng_state(), *(p.detach() for p in model.parameters())])
        events = EventAccumulator(board.log_dir)
        events.Reload()
        tags = [f"val/sample_{i}/text_summary" for i in range(len(prompts))]
        assert sorted(events.Tags()["tensors"]) == tags
        for tag, prompt in zip(tags, prompts, strict=True):
            first, second = (item.tensor_proto.string_val[0].decode() for item in events.Tensors(tag))
            assert first.startswith(f"**{prompt}**")
            assert len(second) <= len(f"**{prompt}**") + 4
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
