"""Segmentation against networks, scores and steps written out by hand. One file: importing mmseg takes seconds."""

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import lapbench.tasks.segmentation as room
from lapbench.backbones import VisionSettings
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings
from lapbench.tasks import SemanticSegmentation
from lapbench.tasks.segmentation import Inference, check_data
from lapbench.tasks.segmentation_scores import SegmentationScores
from lapbench.training.callbacks import StepSeeds
from lapbench.training.exact_resume import ExactResume

sys.path.insert(0, str(Path(__file__).parent))
from rectangles import CLASSES, Rectangles, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training"),  # a frozen backbone's
]
PATCH = 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Run = Callable[..., pl.Trainer]


def settings(**changes: Any) -> VisionSettings:
    options = {"embed_dim": 16, "depth": 4, "num_heads": 2, **changes.pop("options", {})}
    small = {"heads": 1, "img_size": 24, "patch_size": PATCH, "options": options}
    return VisionSettings("vit_tiny_patch16_224", **small | changes)


def task(seed: int = 0, backbone: VisionSettings | None = None, **changes: Any) -> SemanticSegmentation:
    torch.manual_seed(seed)
    defaults = {"optimizer": OptimizerSettings(lr=0.01), "lr_schedule": LRSchedule("linear", warmup_epochs=0.5)}
    return SemanticSegmentation(backbone or settings(), CLASSES, **defaults | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("rectangles") / "data")


@pytest.fixture
def trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Run:
    caplog.set_level(logging.ERROR, "lightning.pytorch")

    def build(epochs: int = 2, **changes: Any) -> pl.Trainer:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
        here = {"accelerator": "cpu", "devices": 1, "use_distributed_sampler": False, "default_root_dir": tmp_path}
        return pl.Trainer(max_epochs=epochs, **quiet | here | changes)

    return build


def digest(module: nn.Module) -> str:
    tensors = (*module.named_parameters(), *module.named_buffers())
    content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
    return hashlib.sha256(b"".join(content)).hexdigest()


def test_importing_the_tasks_does_not_import_mmsegmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("mmseg", "mmcv", "mmengine")]
    for name in ("mmseg", "mmcv", "mmengine", *loaded):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "lapbench.tasks.mmseg_model", raising=False)
    for name in ("segmentation", "segmentation_scores"):
        spec = importlib.util.spec_from_file_location(f"fresh_{name}", Path(room.__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    with pytest.raises(UserError, match=r"is not installed: pip install 'lapbench\[segmentation\]'"):
        task()


# What a network predicts, and its scores, by hand.


def logits_by_hand(model: SemanticSegmentation, images: Tensor) -> Tensor:
    """[1, classes, H, W] of images whose sides are whole patches, by the linear head on the last block."""
    backbone: Any = model.backbone
    taken: list[Tensor] = []
    hook = backbone.blocks[-1].register_forward_hook(lambda module, inputs, output: taken.append(output))
    backbone(images)
    hook.remove()
    rows, columns = images.shape[2] // PATCH, images.shape[3] // PATCH
    patches = backbone.norm(taken[0])[:, 1:].transpose(1, 2).reshape(1, 16, rows, columns)
    head: Any = model.model.decode_head
    norm = head.norm
    patches = (patches - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + 1e-5).sqrt()
    patches = patches * norm.weight[:, None, None] + norm.bias[:, None, None]
    logits = (
        torch.einsum("bdhw,kd->bkhw", patches, head.conv_seg.weight[:, :, 0, 0]) + head.conv_seg.bias[:, None, None]
    )
    return nn.functional.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=False)


def starts(size: int, window: int, stride: int) -> list[int]:
    """Where windows begin: the last one is moved back to end where the image does."""
    found = [0]
    while found[-1] + window < size:
        found.append(min(found[-1] + stride, size - window))
    return found


def predicted_by_hand(model: SemanticSegmentation, file: Path, window: int | None, stride: int) -> np.ndarray:
    """Class indices [H, W] of an image file, enlarged to 96 pixels at the longer side."""
    from mmcv import imrescale

    pixels = np.asarray(Image.open(file))
    height, width = pixels.shape[:2]
    image = torch.from_numpy(imrescale(pixels, (96, 96))).permute(2, 0, 1).float()
    image = (image / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    _, rows, columns = image.shape
    image = nn.functional.pad(image, (0, -columns % PATCH, 0, -rows % PATCH))[None]
    if window is None:
        logits = logits_by_hand(model, image)
    else:
        logits, count = torch.zeros(1, CLASSES, *image.shape[2:]), torch.zeros(image.shape[2:])
        for top in starts(image.shape[2], window, stride):
            for left in starts(image.shape[3], window, stride):
                where = (..., slice(top, top + window), slice(left, left + window))
                logits[where] += logits_by_hand(model, image[where])
                count[where] += 1
        logits /= count
    logits = nn.functional.interpolate(logits[..., :rows, :columns], size=(height, width), mode="bilinear")
    return logits[0].argmax(0).numpy()


def scores_by_hand(model: SemanticSegmentation, folder: Path, window: int | None, stride: int) -> dict[str, float]:
    """From a confusion matrix over the raw PNG files."""
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    for file in sorted((folder / "annotations/validation").glob("*.png")):
        label = np.asarray(Image.open(file)).astype(int) - 1
        with torch.no_grad():
            found = predicted_by_hand(model, folder / f"images/validation/{file.stem}.jpg", window, stride)
        np.add.at(confusion, (label[label >= 0], found[label >= 0]), 1)
    right, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    return {
        "val/miou": (right / (labelled + predicted - right)).mean(),
        "val/macc": (right / labelled).mean(),
        "val/aacc": right.sum() / confusion.sum(),
    }


@pytest.fixture(scope="module")
def trained(folder: Path) -> SemanticSegmentation:
    """A model whose statistics and predictions are not those of a start: trained on a few images."""
    model = task()
    data = Rectangles(str(folder), seed=0)
    data.setup()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03)
    for _ in range(3):
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            model.model.loss(**model._prepared(batch, training=True))["decode.loss_ce"].backward()
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_scores_are_those_of_a_confusion_matrix_over_the_files(
    mode: str, trained: SemanticSegmentation, folder: Path, trainer: Run
) -> None:
    model = task(inference=Inference(mode, 40, 24))  # type: ignore[arg-type]
    model.load_state_dict(trained.state_dict())
    before = digest(model)
    expected = scores_by_hand(model.eval(), folder, 40 if mode == "slide" else None, 24)
    assert 0.5 < expected["val/aacc"] < 1  # neither all wrong nor all right
    (found,) = trainer().validate(model, datamodule=Rectangles(str(folder)), verbose=False)
    assert found == pytest.approx(expected, rel=1e-6)
    assert digest(model) == before
    if mode == "slide":
        return
    # Seven images for two processes: of four and three, which both take in two batches.
    two = trainer(strategy="ddp_fork", devices=2)
    (shared,) = two.validate(model, datamodule=Rectangles(str(folder), eval_batch_size=3), verbose=False)
    assert shared == found


def test_a_class_in_neither_files_nor_predictions_counts_in_no_mean() -> None:
    scores = SegmentationScores(4)
    scores.update(torch.tensor([[0, 0, 1, 2]]), torch.tensor([[0, 1, 1, 255]]))
    found = {name: value.item() for name, value in scores.compute().items()}
    # Class 2 is predicted where nothing is labelled: it counts nowhere either.
    assert found == {"miou": (1 / 2 + 1 / 2) / 2, "macc": (1 + 1 / 2) / 2, "aacc": pytest.approx(2 / 3)}
    assert scores.areas.dtype == torch.float64


# What the head sees.


@pytest.mark.parametrize(
    "backbone",
    [
        settings(),
        settings(options={"class_token": False, "reg_tokens": 2}, global_pool="avg"),
        VisionSettings(
            "eva02_tiny_patch14_224",
            1,
            img_size=24,
            patch_size=8,
            options={"embed_dim": 24, "depth": 2, "num_heads": 2},
        ),
    ],
    ids=["class token", "registers", "rotary"],
)
@pytest.mark.parametrize("size", [(24, 24), (40, 64)])
def test_maps_are_the_tokens_at_their_places(backbone: VisionSettings, size: tuple[int, int]) -> None:
    model = task(backbone=backbone).eval()
    images = torch.randn(2, 3, *size)
    (maps,) = model.model.backbone(images)
    timm: Any = super(type(model.backbone).__mro__[1], model.backbone)
    (expected,) = timm.forward_intermediates(images, 1, norm=True, output_fmt="NCHW", intermediates_only=True)
    assert maps.shape[2:] == (size[0] // 8, size[1] // 8)
    assert torch.equal(maps, expected)
    assert not maps.requires_grad


def test_position_embeddings_stretch_to_512_pixels() -> None:
    model = task(backbone=settings(img_size=32, patch_size=16)).eval()
    backbone: Any = model.backbone
    with torch.no_grad():
        images = torch.zeros(1, 3, 512, 512)
        backbone.pos_embed.zero_()
        without = backbone._pos_embed(backbone.patch_embed(images))
        backbone.pos_embed[:, 1::2] = 1  # the left one of two columns
        places = (backbone._pos_embed(backbone.patch_embed(images)) - without)[0, 1:, 0].reshape(32, 32)
        assert backbone.forward_intermediates(images, 1)[0].shape == (1, 1 + 32 * 32, 16)
    two = torch.tensor([[[[1.0, 0.0]] * 2]])
    expected = nn.functional.interpolate(two, size=(32, 32), mode="bicubic", antialias=True)[0, 0]
    assert torch.allclose(places, expected, atol=1e-5)
    assert places[:, :4].mean() > 0.9
    assert places[:, -4:].mean() < 0.1


def test_heads_read_the_blocks_that_they_say() -> None:
    from lapbench.tasks.mmseg_model import blocks_of

    assert [blocks_of(head, 12) for head in ("linear", "linear4", "upernet")] == [[11], [8, 9, 10, 11], [2, 5, 8, 11]]
    assert blocks_of("upernet", 24) == [5, 11, 17, 23]
    assert blocks_of("upernet", 4) == [0, 1, 2, 3]
    model = task(head="upernet", channels=8)
    assert model.model.decode_head.channels == 8
    assert [type(m).__name__ for m in model.modules() if "BatchNorm" in type(m).__name__].count("SharedBatchNorm2d") > 5
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


def test_the_loss_is_the_mean_over_labelled_pixels(folder: Path) -> None:
    """Also where images are smaller than the crop and padded to it."""
    model = task(head="linear4")
    data = Rectangles(str(folder), crop_size=64, resize_scale=(48, 48), seed=0)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert {tuple(image.shape[1:]) for image in batch["inputs"]} != {(64, 64)}
    preprocessor = model.model.data_preprocessor
    preprocessor.size, preprocessor.size_divisor = (64, 64), None
    prepared = model._prepared(batch, training=True)
    losses = model.model.loss(**prepared)
    assert prepared["inputs"].shape == (4, 3, 64, 64)
    labels = torch.stack([sample.gt_sem_seg.data[0] for sample in prepared["data_samples"]])
    assert (labels == 255).float().mean() > 0.2
    logits = nn.functional.interpolate(model.model(prepared["inputs"]), size=(64, 64), mode="bilinear")
    assert torch.allclose(losses["decode.loss_ce"], nn.functional.cross_entropy(logits, labels, ignore_index=255))


def test_grey_images_are_normalised_as_the_mean_of_the_channels(folder: Path) -> None:
    model = task(backbone=settings(in_chans=1))
    data = Rectangles(str(folder), channels=1)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    one = {name: values[:1] for name, values in batch.items()}
    prepared = model._prepared(one, training=False)
    height, width = one["inputs"][0].shape[1:]
    expected = (one["inputs"][0].float() / 255 - 0.449) / 0.226
    assert torch.allclose(prepared["inputs"][0, :, :height, :width], expected, atol=1e-6)
    assert prepared["inputs"].shape[2:] == (height + -height % 8, width + -width % 8)


# Training.


def test_a_frozen_backbone_stays_as_it_is(folder: Path, trainer: Run) -> None:
    model = task(head="upernet", channels=8, backbone=settings(drop_path=0.5))
    before, head = digest(model.backbone), digest(model.model.decode_head)
    run = trainer(1)
    run.fit(model, datamodule=Rectangles(str(folder), seed=0))
    assert digest(model.backbone) == before
    assert digest(model.model.decode_head) != head
    trained = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert not trained & {id(p) for p in model.backbone.parameters()}
    assert model.train().model.decode_head.training
    assert not model.backbone.training
    names = ("train/loss", "train/loss_epoch", "train/aacc", "train/lr", "train/grad_norm")
    assert set(run.callback_metrics) == {*names, "val/miou", "val/macc", "val/aacc"}


class SaveAt(pl.Callback):
    """Writes a checkpoint after a number of batches."""

    def __init__(self, batches: int, file: Path) -> None:
        self.batches, self.file = batches, file

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.batches:
            trainer.save_checkpoint(self.file)


def test_fine_tuning_learns_and_resumes_to_the_bit(folder: Path, trainer: Run, tmp_path: Path) -> None:
    """Dropout, drop-path and augmentation included; the checkpoint is of the middle of an epoch."""

    def build() -> SemanticSegmentation:
        return task(head="linear4", frozen=False, dropout=0.2, backbone=settings(drop_path=0.2))

    def fit(ckpt_path: Path | None = None) -> SemanticSegmentation:
        model, file = build(), tmp_path / "middle.ckpt"
        run = trainer(4, callbacks=[StepSeeds(0), ExactResume(), SaveAt(7, file)], check_val_every_n_epoch=4)
        run.fit(model, datamodule=Rectangles(str(folder), seed=0), ckpt_path=ckpt_path, weights_only=True)
        assert run.global_step == 12
        found.append({name: float(value) for name, value in run.callback_metrics.items()})
        return model

    found: list[dict[str, float]] = []
    (start,) = trainer().validate(build(), datamodule=Rectangles(str(folder)), verbose=False)
    whole = fit().state_dict()
    resumed = fit(tmp_path / "middle.ckpt").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert found[0] == found[1]
    assert found[0]["val/aacc"] > start["val/aacc"] + 0.2
    assert not torch.equal(
        whole["model.backbone.backbone.blocks.0.mlp.fc1.weight"], build().backbone.blocks[0].mlp.fc1.weight
    )  # type: ignore[index, union-attr]


def test_two_processes_train_what_one_trains(folder: Path, trainer: Run) -> None:
    """Batch statistics and loss are those of the images of both, which differ in unlabelled pixels."""
    optimizer = OptimizerSettings("sgd", lr=0.1, weight_decay=0.0, options={"momentum": 0.9})

    def fit(batch_size: int, **changes: Any) -> SemanticSegmentation:
        model = task(
            head="linear4", frozen=False, optimizer=optimizer, lr_schedule=LRSchedule("constant", warmup_epochs=0)
        )
        data = Rectangles(str(folder), crop_size=48, seed=0, batch_size=batch_size)
        trainer(1, limit_val_batches=0, **changes).fit(model, datamodule=data)
        return model

    one, two = fit(4), fit(2, strategy="ddp_fork", devices=2)
    start = task(head="linear4").state_dict()
    for name, value in one.state_dict().items():
        assert torch.allclose(two.state_dict()[name], value, rtol=1e-3, atol=2e-5), name
        if "norm.running_mean" in name or "conv_seg" in name:
            assert not torch.allclose(start[name], value, rtol=1e-3, atol=1e-4)


# What a user may get wrong.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inference": Inference("slide", 36)}, "inference.crop_size: expected a multiple of the patch size 8, got 36"),
        ({"inference": Inference("slide", 40, 48)}, r"inference.stride: expected 1..40 \(the window\), got 48"),
        ({"dropout": 1.0}, "dropout: expected 0 <= value < 1, got 1.0"),
        ({"channels": 0}, "channels: expected at least 1, got 0"),
        ({"mean": [0.5]}, "mean: expected 3 numbers, one for each channel of the backbone"),
        ({"backbone": settings(compile=True)}, "backbone.compile: segmentation reads tokens inside the model"),
        (
            {"backbone": VisionSettings("pixels", patch_size=8), "head": "linear4"},
            "it reads four layers, the backbone has 1",
        ),
        ({"optimizer": OptimizerSettings("adamv")}, "timm has no optimizer 'adamv'"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        task(**changes)


@pytest.mark.parametrize(
    ("changes", "data", "processes", "reason"),
    [
        ({}, {"crop_size": 36}, 1, "data.crop_size: expected a multiple of the patch size 8, got 36"),
        ({}, {"channels": 1}, 1, "data.channels: the backbone takes 3, Rectangles gives 1"),
        ({"head": "upernet", "channels": 8}, {"batch_size": 1}, 1, "upernet normalises over at least 2 images"),
        ({}, {"eval_batch_size": 1}, 2, "data.eval_batch_size: several processes need at least 2, got 1"),
    ],
)
def test_data_that_do_not_fit_the_model_are_named(
    changes: dict[str, Any], data: dict[str, Any], processes: int, reason: str, folder: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        check_data(task(**changes), Rectangles(str(folder), **data), processes)
