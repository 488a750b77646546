"""Images with masks: labels, sizes, each image once over ranks, the same draws for any workers, exact resume."""

import io
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import cv2
import jsonargparse
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from PIL import Image

import lapbench.datamodules
from lapbench.datamodules import sharded
from lapbench.datamodules.builtin_masks import ADE20K, ShapesSegmentation
from lapbench.datamodules.convert import shapes
from lapbench.datamodules.convert.pairs import check_layout
from lapbench.datamodules.layout import Layout
from lapbench.errors import UserError
from lapbench.openmmlab import mmseg_imports

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
]

TRAIN, VAL = 13, 7


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def mask_of(number, split):
    """Blocks of labels; of a size of its own for each image."""
    rng = np.random.default_rng([number, split == "training"])
    return np.kron(rng.integers(0, 151, (5, 6 + number % 3)), np.ones((8, 8))).astype(np.uint8)


def image_of(number, split):
    """The label in red, the image's number in green, position in blue."""
    mask = mask_of(number, split)
    return np.stack([mask, np.full_like(mask, number), np.indices(mask.shape).sum(0).astype(np.uint8)], axis=-1)


def write(folder, counts):
    """A data set whose images are PNGs, whatever their names say, so that every pixel is known."""
    for split, count in counts.items():
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            (folder / f"images/{split}/ADE_{number:03d}.jpg").write_bytes(png(image_of(number, split)))
            (folder / f"annotations/{split}/ADE_{number:03d}.png").write_bytes(png(mask_of(number, split)))
    Layout("ade20k", 150, counts).save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "ade20k", {"training": TRAIN, "validation": VAL})


def ready(folder, **settings):
    data = ADE20K(
        str(folder), **{"batch_size": 3, "num_workers": 0, "crop_size": 24, "resize_scale": (64, 40)} | settings
    )
    data.setup("fit")
    return data


def masks(batch):
    return [sample.gt_sem_seg.data for sample in batch["data_samples"]]


def numbers(batch):
    return [int(Path(sample.img_path).stem[4:]) for sample in batch["data_samples"]]


def assert_equal(one, other):
    assert numbers(one) == numbers(other)
    for a, b in zip((*one["inputs"], *masks(one)), (*other["inputs"], *masks(other)), strict=True):
        assert torch.equal(a, b)


def test_evaluation_sees_whole_images_and_masks_of_their_own_size(folder):
    data = ready(folder, eval_batch_size=4, resize_scale=(80, 40))
    assert data.class_names[:2] == ("wall", "building")
    assert len(data.class_names) == data.num_classes == 150
    batches = list(data.val_dataloader())
    assert [number for batch in batches for number in numbers(batch)] == list(range(VAL))
    for batch in batches:
        for number, image, mask in zip(numbers(batch), batch["inputs"], masks(batch), strict=True):
            pixels, labels = image_of(number, "validation"), mask_of(number, "validation").astype(int)
            height, width = labels.shape
            factor = min(80 / width, 40 / height)
            size = int(width * factor + 0.5), int(height * factor + 0.5)
            expected = cv2.resize(pixels[..., ::-1], size, interpolation=cv2.INTER_LINEAR)
            assert image.dtype == torch.uint8
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
            assert mask.dtype == torch.int64
            assert np.array_equal(mask[0].numpy(), np.where(labels == 0, 255, labels - 1))


def test_labels_are_moved_once(tmp_path):
    write(tmp_path, {"training": 3, "validation": 1})
    labels = np.array([[0, 1], [150, 255]], np.uint8)
    (tmp_path / "annotations/validation/ADE_000.png").write_bytes(png(labels))
    data = ready(tmp_path)
    for _ in range(2):
        (batch,) = data.val_dataloader()
        assert masks(batch)[0].tolist() == [[[255, 0], [149, 255]]]


def test_crops_and_flips_keep_image_and_mask_together(folder):
    data = ready(folder, photometric=False, resize_ratio=(1.0, 1.0), hflip=0.5, batch_size=TRAIN)
    flips, corners = Counter(), set()
    for _ in range(3):
        (batch,) = data.train_dataloader()
        for image, mask in zip(batch["inputs"], masks(batch), strict=True):
            assert image.shape == (3, 24, 24)
            blue, _, red = image.int()
            assert torch.equal(mask[0], torch.where(red == 0, 255, red - 1).long())
            flips[int(blue[0, 1] - blue[0, 0])] += 1
            corners.add(int(blue[0, 0]))
    assert {*flips} == {-1, 1}
    assert len(corners) > 5


def test_resizing_and_distortions_in_training(folder):
    sizes, plain = set(), ready(folder, photometric=False, crop_size=1000, resize_ratio=(0.5, 2.0), batch_size=TRAIN)
    (batch,) = plain.train_dataloader()
    for image, mask in zip(batch["inputs"], masks(batch), strict=True):
        assert image.shape[1:] == mask.shape[1:]
        sizes.add(image.shape[1])
    assert all(20 <= size <= 80 for size in sizes)
    assert len(sizes) > 6
    (distorted,) = ready(folder, crop_size=1000, batch_size=TRAIN).train_dataloader()
    assert sum(not torch.equal(a, b) for a, b in zip(distorted["inputs"], batch["inputs"], strict=True)) > TRAIN // 2
    # One class may not fill a crop: with any share allowed more crops are of few labels.
    fills = [
        np.mean([mask.unique(return_counts=True)[1].max() / mask.numel() for mask in masks(batch)])
        for share in (0.3, 1.0)
        for batch in ready(folder, crop_size=12, cat_max_ratio=share, batch_size=TRAIN).train_dataloader()
    ]
    assert fills[0] < fills[1]


def test_grey_images_have_the_luminance(folder):
    (colour,), (grey,) = (ready(folder, channels=c, eval_batch_size=VAL).val_dataloader() for c in (3, 1))
    for image, one in zip(colour["inputs"], grey["inputs"], strict=True):
        assert one.shape == (1, *image.shape[1:])
        blue, green, red = image.double()
        assert (one[0] - (0.299 * red + 0.587 * green + 0.114 * blue)).abs().max() <= 0.51
    for batch in ready(folder, channels=1).train_dataloader():
        assert {image.shape for image in batch["inputs"]} == {(1, 24, 24)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("eval_batch_size", [1, 2, 3])
def test_ranks_see_each_image_once(folder, monkeypatch, world_size, eval_batch_size):
    monkeypatch.setattr(sharded, "_distributed", lambda: True)
    monkeypatch.setattr(sharded.dist, "get_world_size", lambda: world_size)
    steps, seen, trained = set(), [], []
    for rank in range(world_size):
        monkeypatch.setattr(sharded.dist, "get_rank", lambda rank=rank: rank)
        data = ready(folder, eval_batch_size=eval_batch_size)
        batches = [numbers(batch) for batch in data.val_dataloader()]
        steps.add(len(batches))
        seen += [number for batch in batches for number in batch]
        trained.append([numbers(batch) for batch in data.train_dataloader()])
    assert sorted(seen) == list(range(VAL))
    assert len(steps) == 1 or eval_batch_size == 1
    assert {len(batches) for batches in trained} == {TRAIN // (3 * world_size)}
    drawn = [number for batches in trained for batch in batches for number in batch]
    assert len(drawn) == len(set(drawn))


def test_the_same_draws_for_any_number_of_workers(folder):
    runs = []
    for workers in (0, 2):
        loader = ready(folder, num_workers=workers, seed=3).train_dataloader()
        runs.append([batch for _ in range(2) for batch in loader])
    for one, other in zip(*runs, strict=True):
        assert_equal(one, other)
    orders = [[number for batch in runs[0][epoch * 4 : epoch * 4 + 4] for number in numbers(batch)] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert orders[0] != [number for batch in ready(folder, seed=4).train_dataloader() for number in numbers(batch)]
    # What another image was drawn to before does not matter: the order alone differs with the batch size.
    by_number = {n: image for b in runs[0][:4] for n, image in zip(numbers(b), b["inputs"], strict=True)}
    for batch in ready(folder, seed=3, batch_size=1).train_dataloader():
        if numbers(batch)[0] in by_number:
            assert torch.equal(batch["inputs"][0], by_number[numbers(batch)[0]])


def test_loading_leaves_the_generators_alone(folder):
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    expected = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    list(ready(folder).train_dataloader())
    assert np.array_equal(np.random.get_state()[1], expected[0])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), expected[1])


def test_lightning_moves_batches(folder):
    batch = next(iter(ready(folder).train_dataloader()))
    moved = move_data_to_device(batch, torch.device("meta"))
    assert {tensor.device.type for tensor in (*moved["inputs"], *masks(moved))} == {"meta"}
    assert numbers(moved) == numbers(batch)


class Model(pl.LightningModule):
    """Keeps every training batch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch):
        self.batches.append(batch)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Killed(Exception):
    pass


class KilledAfter(pl.Callback):
    def __init__(self, steps, file):
        self.steps, self.file = steps, file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.file)
            raise Killed


def fit(folder, file, killed=0, resume=False, **settings):
    """The batches that a fit of two epochs was given."""
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=file.parent,
        num_sanity_val_steps=0,
        callbacks=[KilledAfter(killed, file)] if killed else None,
    )
    settings = {"batch_size": 3, "num_workers": 0, "crop_size": 24, "resize_scale": (64, 40)} | settings
    data = ADE20K(str(folder), **settings)
    with pytest.raises(Killed) if killed else nullcontext():
        trainer.fit(model, datamodule=data, ckpt_path=file if resume else None, weights_only=True if resume else None)
    return model.batches


def test_a_fit_resumes_with_the_next_batch(folder, tmp_path):
    file = tmp_path / "last.ckpt"
    whole = fit(folder, file)
    for killed in (2, 4, 7):  # in mid-epoch, at the end of one, in the next
        before = fit(folder, file, killed)
        after = fit(folder, file, resume=True)
        assert (len(whole), len(before), len(after)) == (8, killed, 8 - killed)
        for one, other in zip(whole, before + after, strict=True):
            assert_equal(one, other)
    with pytest.raises(UserError, match=r"cannot resume .* seed was 0 and is 5, crop_size was 24 and is 32; --allow"):
        fit(folder, file, resume=True, seed=5, crop_size=32)


def test_a_copy_for_evaluation(folder):
    data = ready(folder, seed=0)
    other = data.for_evaluation(batch_size=5, seed=1)
    assert (other.batch_size, other.seed, data.batch_size, data.seed) == (5, 1, 3, 0)
    assert [len(batch["inputs"]) for batch in other.train_dataloader()] == [5, 5]


def test_damaged_files_are_one_line(tmp_path):
    write(tmp_path, {"training": 3, "validation": 2})
    data = ready(tmp_path)
    for file in ("images/validation/ADE_001.jpg", "annotations/training/ADE_002.png"):
        whole = (tmp_path / file).read_bytes()
        for damaged in (whole[:60], b""):
            (tmp_path / file).write_bytes(damaged)
            loader = data.val_dataloader() if "validation" in file else data.train_dataloader()
            with pytest.raises(UserError, match=f"cannot read .*{file}: ") as error:
                list(loader)
            assert "\n" not in str(error.value)
        (tmp_path / file).unlink()
        with pytest.raises(UserError, match=f"cannot read .*{file}: .*No such file"):
            list(loader)
        with pytest.raises(UserError, match=r"ADE_00. has no|\.(jpg|png) has no .*(jpg|png)$"):
            ready(tmp_path)
        (tmp_path / file).write_bytes(whole)


def test_data_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match=r"no data folder .*none: make it with `lapbench data ade20k --source"):
        ADE20K(str(tmp_path / "none")).setup("fit")
    write(tmp_path / "d", {"training": 3, "validation": 2})
    Layout("shapes (synthetic)", 30, {"training": 3, "validation": 2}).save(tmp_path / "d")
    with pytest.raises(UserError, match=r"ADE20K has 150 classes, the layout has 30 \(data set 'shapes"):
        ADE20K(str(tmp_path / "d")).setup("fit")
    Layout("ade20k", 150, {"training": 3, "validation": 2}).save(tmp_path / "d")
    (tmp_path / "d/images/training/more").mkdir()
    (tmp_path / "d/images/training/more/ADE_9.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"expected 3 images in training as in layout.json, got 4"):
        ADE20K(str(tmp_path / "d")).setup("fit")
    (tmp_path / "d/images/training/more/ADE_9.jpg").unlink()
    data = ready(tmp_path / "d", batch_size=4)
    with pytest.raises(UserError, match=r"one training step takes 4 samples .* the split holds 3"):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_size": 0}, "crop_size must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"resize_scale": (2048, 0)}, r"resize_scale must be two sizes of at least 1, got \[2048, 0\]"),
        ({"resize_ratio": (2.0, 0.5)}, r"resize_ratio must be a range of factors above 0, got \[2.0, 0.5\]"),
        ({"resize_ratio": (0.0, 0.5)}, "resize_ratio must be a range"),
        ({"cat_max_ratio": 1.5}, "cat_max_ratio must be at least 0 and at most 1, got 1.5"),
        ({"hflip": -0.5}, "hflip must be at least 0"),
        ({"channels": 4}, r"channels must be 1 \(grey\) or 3 \(colour\), got 4"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        ADE20K(**settings)


def test_only_the_known_noise_is_dropped(capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mmseg_imports():
            sys.stdout.write("Could not import OneDL\nCould not import OneDL at all\n")
            warnings.warn("Fail to import ``MultiScaleDeformableAttention`` from ``mmcv.ops``", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert capsys.readouterr().out == "Could not import OneDL at all\n"
    assert [str(warning.message) for warning in caught] == ["another"]
    with (
        pytest.raises(UserError, match=r"mmcv is not installed: pip install 'lapbench\[segmentation\]'"),
        mmseg_imports(),
    ):
        raise ModuleNotFoundError("No module named 'mmcv.ops'", name="mmcv")
    with pytest.raises(ModuleNotFoundError, match="elsewhere"), mmseg_imports():
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")


def test_shapes_make_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "IMAGES", {"train": 24, "test": 24})
    monkeypatch.setattr(shapes, "SCENE_COUNTS", {"training": 6, "validation": 3})
    data = ShapesSegmentation(str(tmp_path / "shapes"), batch_size=3, channels=1)
    for _ in range(2):  # the second time everything is there
        data.prepare_data()
    data.setup("fit")
    assert data.class_names == shapes.SHAPES_CLASSES
    assert check_layout(tmp_path / "shapes/ade20k", data.num_classes) == {"training": 6, "validation": 3}
    (evaluated,) = data.val_dataloader()
    for image, mask, number in zip(evaluated["inputs"], masks(evaluated), range(3), strict=True):
        files = [tmp_path / f"shapes/ade20k/{kind}/validation/{number:06d}" for kind in ("images", "annotations")]
        grey = np.asarray(Image.open(files[0].with_suffix(".jpg")).convert("L")).astype(int)
        labels = np.asarray(Image.open(files[1].with_suffix(".png"))).astype(int)
        assert np.abs(image[0].numpy() - grey).max() <= 1
        assert np.array_equal(mask[0].numpy(), np.where(labels == 0, 255, labels - 1))
    for batch in data.train_dataloader():
        assert all(max(image.shape) <= 96 for image in batch["inputs"])


def test_settings_from_yaml(folder):
    assert lapbench.datamodules.ADE20K is ADE20K
    assert lapbench.datamodules.ShapesSegmentation is ShapesSegmentation
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    arguments = {"data_dir": str(folder), "resize_scale": [64, 40], "channels": 1, "num_workers": 0, "batch_size": 5}
    for name in ("ADE20K", "ShapesSegmentation"):
        config = {"data": {"class_path": f"lapbench.datamodules.{name}", "init_args": arguments}}
        data = parser.instantiate(parser.parse_object(config)).data
        assert (data.resize_scale, data.channels, data.batch_size, data.eval_batch_size) == ((64, 40), 1, 5, 5)
    with pytest.raises(jsonargparse.ArgumentError, match="channels"):
        parser.parse_object({"data": config["data"] | {"init_args": {"channels": 2}}})
