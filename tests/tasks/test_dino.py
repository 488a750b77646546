"""The DINO task against the published algorithm, written plainly, and what surrounds it."""

import copy
import math
import os
import socket
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dino_runs import HEAD, Crops, K, Steps, published, task, trainer
from torch import Tensor, nn

from lapbench.backbones import VisionSettings
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings
from lapbench.tasks import DINO
from lapbench.tasks.dino_head import ProjectionHead
from lapbench.tasks.dino_loss import Temperatures
from lapbench.tasks.steps import NonFiniteLossError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
    # Random crops and a handful of steps; what is said of a collapse has tests of its own.
    pytest.mark.filterwarnings("ignore:.*DINO has collapsed"),
]


def close(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("clip_norm", "accumulation"), [(0.02, 1), (3.0, 2)])
def test_every_step_is_the_published_one(clip_norm: float, accumulation: int) -> None:
    settings = {"clip_norm": clip_norm, "ema": 0.9}
    model, data, steps = task(**settings), Crops(5 if accumulation == 2 else 3), Steps()
    run = trainer(max_epochs=2, accumulate_grad_batches=accumulation, callbacks=[steps])
    run.fit(model, data)
    twin, batches = task(**settings), data.batches()
    # The last window of an epoch is shorter, and its mean is over what it has.
    windows = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
    assert len(windows) == 3
    expected = published(twin, windows * 2, windows_per_epoch=3)
    assert run.global_step == 6
    assert [step["train/loss"] for step in steps.logged] == pytest.approx(expected["loss"], rel=1e-5)
    ends = [
        i for i in range(2 * len(batches)) if (i % len(batches) + 1) % accumulation == 0 or (i + 1) % len(batches) == 0
    ]
    assert [steps.logged[i]["train/grad_norm"] for i in ends] == pytest.approx(expected["norm"], rel=1e-4)
    close([steps.centers[i] for i in ends], expected["center"])
    close(model.teacher.parameters(), twin.teacher.parameters())
    close(model.student.parameters(), twin.student.parameters())


def test_schedules_go_by_optimizer_steps() -> None:
    """Eight micro-batches at accumulation 4: centre and teacher move twice, at the second step's values."""
    steps = Steps()
    temperatures = Temperatures(0.5, 0.2, 0.3, warmup_epochs=1)
    model = task(temperatures=temperatures, ema=0.9, lr_schedule=LRSchedule(warmup_epochs=0))
    trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[steps]).fit(model, Crops(8))
    for moving in (steps.centers, steps.teachers):
        moved = [not torch.equal(a, b) for a, b in pairwise(moving)]
        assert moved == [False, False, True, False, False, False, True]
    last = steps.logged[-1]
    assert last["train/ema"] == pytest.approx(0.95)
    assert last["train/weight_decay"] == pytest.approx(0.22)
    assert last["train/teacher_temperature"] == pytest.approx(0.25)
    assert last["train/center_norm"] == pytest.approx(steps.centers[-1].norm().item())


def test_the_teacher_starts_as_the_student() -> None:
    model = task()
    for (name, a), (other, b) in zip(
        model.student.state_dict().items(), model.teacher.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert not any(p.requires_grad for p in model.teacher.parameters())
    assert model.backbone is model.teacher.backbone
    assert model.settings.dynamic_img_size
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(copy.deepcopy(model)(images), model(images))


@pytest.mark.parametrize("norm_last_layer", [True, False])
def test_a_frozen_last_layer_does_not_even_decay(norm_last_layer: bool) -> None:
    layers: list[dict[str, Tensor]] = []

    class Layers(Steps):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            layers.append(copy.deepcopy(pl_module.student.head.last_layer.state_dict()))

    head = ProjectionHead(K, 12, 8, norm_last_layer=norm_last_layer, freeze_epochs=2)
    model = task(head, optimizer=OptimizerSettings(lr=0.01, weight_decay=0.5))
    first = copy.deepcopy(model.student.head.last_layer.state_dict())
    trainer(max_epochs=3, callbacks=[Layers()]).fit(model, Crops(2))
    for name, weights in first.items():
        assert torch.equal(layers[0][name], weights)
        assert torch.equal(layers[1][name], weights)
        assert torch.equal(layers[2][name], weights) == (name == "gain" and norm_last_layer)


def test_weight_decay_rises_for_matrices_only() -> None:
    model = task()
    run = trainer(max_epochs=1)
    run.fit(model, Crops(4))
    matrices, others = run.optimizers[0].param_groups
    assert matrices["weight_decay"] == pytest.approx(0.4 - 0.36 * (1 + math.cos(math.pi * 3 / 4)) / 2)
    assert others["weight_decay"] == 0
    names = {id(p): name for name, p in model.student.named_parameters()}
    assert {"backbone.cls_token", "backbone.pos_embed", "head.mlp.0.bias"} <= {names[id(p)] for p in others["params"]}
    assert {"head.mlp.0.weight", "head.last_layer.direction"} <= {names[id(p)] for p in matrices["params"]}


def test_drop_path_is_the_students_alone() -> None:
    seen: list[tuple[bool, bool]] = []

    class Twice(Steps):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            (large, _), _ = batch
            images = large.flatten(0, 1)
            student, teacher = pl_module.student.backbone, pl_module.teacher.backbone
            seen.append((torch.equal(student(images), student(images)), torch.equal(teacher(images), teacher(images))))

    trainer(max_epochs=1, callbacks=[Twice()]).fit(task(drop_path=0.5), Crops(1))
    assert seen == [(False, True)]


def test_batch_norm_of_the_teacher_goes_by_the_batch() -> None:
    head = ProjectionHead(K, 12, 8, batch_norm=True)
    model, data = task(head), Crops(1)
    statistics = [b for name, b in model.teacher.named_buffers() if name.endswith("running_mean")]
    trainer(max_epochs=1).fit(model, data)
    assert all(mean.any() for mean in statistics)


def test_half_precision_leaves_loss_centre_and_teacher_in_float32() -> None:
    dtypes: set[torch.dtype] = set()

    class Dtypes(Steps):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *arguments: Any) -> None:
            dtypes.update(
                (outputs["loss"].dtype, pl_module.loss.center.dtype, next(pl_module.teacher.parameters()).dtype)
            )

    trainer(max_epochs=1, precision="bf16-mixed", callbacks=[Dtypes()]).fit(task(), Crops(2))
    assert dtypes == {torch.float32}
    with pytest.raises(UserError, match=r"trainer\.precision: the teacher's moving average needs float32 weights"):
        trainer(max_epochs=1, precision="bf16-true").fit(task(), Crops(2))


def test_a_non_finite_loss_stops_before_the_step() -> None:
    data = Crops(3)
    data.views.large[4] = float("nan")  # in the second batch
    model, steps = task(), Steps()
    with pytest.raises(NonFiniteLossError, match="train/loss is nan at optimizer step 1, epoch 0, batch 1"):
        trainer(max_epochs=1, callbacks=[steps]).fit(model, data)
    assert torch.equal(nn.utils.parameters_to_vector(model.teacher.parameters()), steps.teachers[-1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema": 1.5}, r"ema: expected 0 <= value <= 1, got 1\.5"),
        ({"center_momentum": -1.0}, r"center_momentum: expected 0 <= value <= 1, got -1"),
        ({"weight_decay_end": -0.1}, r"weight_decay_end: expected at least 0 or null, got -0\.1"),
        ({"clip_norm": 0.0}, r"clip_norm: expected a number above 0 or null, got 0"),
        ({"temperatures": Temperatures(teacher=0.0)}, r"temperatures\.teacher: expected a number above 0, got 0"),
        ({"temperatures": Temperatures(warmup_epochs=-1)}, r"temperatures\.warmup_epochs: expected at least 0, got -1"),
        ({"head": ProjectionHead(out_dim=1)}, r"head\.out_dim: expected at least 2, got 1"),
        ({"optimizer": OptimizerSettings("adamm")}, r"optimizer\.name: timm has no optimizer 'adamm'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        task(settings.pop("head", HEAD), **settings)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"multicrop": None}, r"data\.multicrop: DINO learns from several crops of an image, Crops gives none"),
        (
            {"multicrop": SimpleNamespace(global_crops=1, local_crops=0, local_size=4)},
            r"data\.multicrop: expected a global crop and at least one more, got 1 global and 0 local",
        ),
        (
            {"image_size": 10},
            r"data\.image_size: expected a multiple of the patches of 4 x 4 pixels of vit_",
        ),
        (
            {"multicrop": SimpleNamespace(global_crops=2, local_crops=1, local_size=6)},
            r"data\.multicrop\.local_size: expected a multiple of the patches of 4 x 4 pixels of vit_tiny\w+, got 6",
        ),
        (
            {"image_size": 16},
            r"model\.backbone\.img_size: expected data\.image_size, 16, for the global crops, got 8",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(data: dict[str, Any], said: str) -> None:
    crops = Crops(2)
    for name, value in data.items():
        setattr(crops, name, value)
    with pytest.raises(UserError, match=said):
        trainer(max_epochs=1).fit(task(), crops)


def test_raw_pixels_are_refused() -> None:
    with pytest.raises(UserError, match=r"backbone\.name: DINO trains a backbone, pixels has no parameters"):
        DINO(VisionSettings("pixels", patch_size=4, img_size=8))


def test_two_kinds_of_clipping_are_refused() -> None:
    with pytest.raises(UserError, match=r"trainer\.gradient_clip_val: expected null, as DINO clips .* got 1"):
        trainer(max_epochs=1, gradient_clip_val=1.0).fit(task(), Crops(2))


def test_two_processes_are_one_big_batch(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("dino_process.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "state.pt")],
            env={**environment, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
    two = torch.load(tmp_path / "state.pt", weights_only=True)
    # Each process has one half of the images of every batch; two micro-batches are a step.
    twin, batches = task(), Crops(4, batch_size=4).batches()
    expected = published(twin, [batches[:2], batches[2:]] * 2, windows_per_epoch=2)
    close(two["teacher"], twin.teacher.parameters())
    close(two["student"], twin.student.parameters())
    torch.testing.assert_close(two["center"], expected["center"][-1], rtol=1e-5, atol=1e-6)
    means = [sum(expected["loss"][i : i + 4]) / 4 for i in (0, 4)]
    assert two["loss_epoch"] == pytest.approx(means, rel=1e-5)


def collapsing(**settings: Any) -> DINO:
    """A teacher whose head gives every image the same."""
    model = task(lr_schedule=LRSchedule(warmup_epochs=0), **settings)
    nn.init.zeros_(model.teacher.head.mlp[-1].weight)
    nn.init.ones_(model.teacher.head.mlp[-1].bias)
    model.ema = 1.0
    return model


def test_a_collapse_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=3).fit(collapsing(), Crops(2))
    (warning,) = [w for w in caught if w.category.__name__ == "CollapseWarning"]
    assert str(warning.message).startswith(
        "epoch 0: DINO has collapsed: the teacher's outputs are the same for all images"
    )


def test_a_collapse_may_end_the_run() -> None:
    with pytest.raises(UserError, match=r"epoch 0: DINO has collapsed: .* information [^;]* nats, feature std "):
        trainer(max_epochs=3).fit(collapsing(stop_on_collapse=True), Crops(2))


def test_a_healthy_run_goes_on() -> None:
    steps = Steps()
    head = ProjectionHead(K, 12, 8, batch_norm=True)
    model = task(head, temperatures=Temperatures(), lr_schedule=LRSchedule(warmup_epochs=0), stop_on_collapse=True)
    trainer(max_epochs=3, callbacks=[steps]).fit(model, Crops(4))
    last = steps.logged[-1]
    assert 0 < last["train/teacher_entropy"] < math.log(K)
    assert 0 < last["train/information"] < math.log(K)
    assert 0 < last["train/feature_std"] <= 1
    assert -1 <= last["train/similarity"] <= 1
