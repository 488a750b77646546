"""The image data modules: splits, batches, checks against the manifest, and settings from YAML."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import jsonargparse
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

import lapbench.datamodules
from lapbench.datamodules.builtin import CIFAR10, CIFAR100, Digits, ImageNet
from lapbench.datamodules.convert.index import index_again
from lapbench.datamodules.images import ImageShards, held_out_samples
from lapbench.datamodules.manifest import Manifest, Shard
from lapbench.datamodules.multicrop import MultiCrop
from lapbench.datamodules.transforms import TrainTransform
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
]


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    Digits(str(folder)).prepare_data()
    return str(folder)


def write_data(folder, splits, classes=10, size=32, extension="jpg"):
    """A data set of random images; sample i of a split has label i % classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    shards = {}
    for split, counts in splits.items():
        shards[split] = []
        for number, count in enumerate(counts):
            path = folder / f"{split}-{number:03d}.tar"
            with tarfile.open(path, "w") as tar:
                for i in range(count):
                    stream = io.BytesIO()
                    image = Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
                    image.save(stream, "PNG" if extension.lower() == "png" else "JPEG")
                    for suffix, data in ((extension, stream.getvalue()), ("cls", str(i % classes).encode())):
                        info = tarfile.TarInfo(f"{split}{number}_{i:04d}.{suffix}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
            shards[split].append(Shard(path.name, count, path.stat().st_size, "0" * 64))
    names = tuple(str(i) for i in range(classes))
    Manifest("test", names, {split: tuple(files) for split, files in shards.items()}).save(folder)
    index_again(folder)
    return str(folder)


def ready(data, stage="fit"):
    data.prepare_data()
    data.setup(stage)
    return data


def labels(loader):
    return torch.cat([batch[1] for batch in loader])


def test_digits_make_themselves(digits_dir):
    data = ready(Digits(digits_dir, batch_size=64))
    train, test = list(data.train_dataloader()), list(data.test_dataloader())
    assert len(train) == len(data.train_dataloader()) == 1437 // 64
    assert sum(len(batch[1]) for batch in test) == 360
    for images, targets in train:
        assert images.shape == (64, 1, 8, 8)
        assert images.dtype == torch.uint8
        assert targets.dtype == torch.int64
    assert sorted(labels(test).unique().tolist()) == list(range(10))
    # The constants normalise the training pixels.
    plain = ready(Digits(digits_dir, batch_size=1437, train_transform=TrainTransform(crop="none", hflip=0)))
    ((images, _),) = plain.train_dataloader()
    pixels = plain.normalize(images)
    assert pixels.mean().item() == pytest.approx(0, abs=0.01)
    assert pixels.std().item() == pytest.approx(1, abs=0.01)


def test_digits_pixels_are_those_of_scikit_learn(digits_dir):
    from sklearn.datasets import load_digits

    data = ready(Digits(digits_dir, eval_batch_size=360))
    ((images, targets, keys),) = data.predict_dataloader()
    numbers = [int(key) for key in keys]
    bunch = load_digits()
    values = (data.normalize(images)[:, 0] * data.std[0] + data.mean[0]) * 16
    assert np.abs(values.numpy() - bunch.images[numbers]).max() < 0.05
    assert targets.tolist() == bunch.target[numbers].tolist()


def test_preparing_again_changes_nothing(digits_dir):
    before = {path.name: path.stat().st_mtime_ns for path in Path(digits_dir).iterdir()}
    Digits(digits_dir).prepare_data()
    assert {path.name: path.stat().st_mtime_ns for path in Path(digits_dir).iterdir()} == before


@pytest.mark.parametrize("workers", [0, 2])
def test_held_out_samples_are_the_rest_of_training(tmp_path, workers):
    folder = write_data(tmp_path / "d", {"train": (30, 20, 10), "test": (5,)}, size=4, extension="png")

    def keys(seed, split):
        data = ready(CIFAR10(folder, batch_size=1, num_workers=workers, image_size=4, val_fraction=0.2, seed=seed))
        loader = data.val_dataloader() if split == "val" else data.train_dataloader()
        loader.stream.with_keys = True
        return [key for batch in loader for key in batch[2]]

    validation, train = keys(0, "val"), keys(0, "train")
    assert len(validation) == 12
    assert sorted(validation + train) == sorted(
        f"train{shard}_{i:04d}" for shard, count in enumerate((30, 20, 10)) for i in range(count)
    )
    assert sorted(keys(1, "val")) == sorted(validation)
    assert keys(1, "train") != train


def test_validation_images_are_deterministic_and_not_augmented(digits_dir):
    data = ready(Digits(digits_dir, val_fraction=0.1, eval_batch_size=144, seed=0))
    ((first, _),), ((second, _),) = data.val_dataloader(), data.val_dataloader()
    assert len(first) == 144
    assert torch.equal(first, second)
    other = ready(Digits(digits_dir, val_fraction=0.1, eval_batch_size=144, seed=5))
    assert torch.equal(next(iter(other.val_dataloader()))[0], first)


def test_held_out_count_is_exact():
    for samples, fraction, expected in ((1437, 0.1, 144), (10, 0.25, 2), (3, 0.4, 1)):
        assert held_out_samples(samples, fraction, 0).sum() == expected
    assert not np.array_equal(held_out_samples(100, 0.5, 0), held_out_samples(100, 0.5, 1))
    for fraction in (0.001, 0.9999):
        with pytest.raises(UserError, match="both sides need some"):
            held_out_samples(100, fraction, 0)


def drawn_keys(loader):
    """The keys that a loader's order draws, without decoding."""
    return [draw.sample.key for batch in loader.stream.order.batches(0, 0, 0, 1) for draw in batch]


@pytest.mark.parametrize("reader", ["index", "stream"])
@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_parts_never_overlap(tmp_path, reader, val_fraction):
    folder = write_data(tmp_path / "d", {"train": (30, 20, 10), "test": (5,)}, size=4, extension="png")
    settings = {"num_workers": 0, "image_size": 4, "val_fraction": val_fraction, "reader": reader}
    data = ready(CIFAR10(folder, batch_size=7, eval_batch_size=9, **settings))
    copy = data.for_evaluation(1, seed=5, select_fraction=0.25)
    parts = ["train", "select", "test"] + ["val"] * (val_fraction > 0)
    keys = {}
    for part in parts:
        batches = list(copy.plain_dataloader(part))
        assert all(len(images) == len(targets) == len(names) <= 9 for images, targets, names in batches)
        keys[part] = [key for batch in batches for key in batch[2]]
        assert keys[part] == sorted(keys[part])  # each once, in order
        assert len(keys[part]) == copy.samples_of(part)
    held = round(60 * val_fraction)
    assert [len(keys[part]) for part in parts] == [(60 - held) * 3 // 4, (60 - held) // 4, 5] + [held] * (held > 0)
    assert len({key for part in parts for key in keys[part]}) == 65
    # The loaders draw from the same parts; validation is what it was.
    assert sorted(drawn_keys(copy.train_dataloader())) == keys["train"]
    assert drawn_keys(copy.select_dataloader()) == keys["select"]
    if held:
        assert drawn_keys(copy.val_dataloader()) == drawn_keys(data.val_dataloader()) == keys["val"]
    # The choice depends on neither seed; another val_seed chooses others.
    again = data.for_evaluation(3, seed=6, select_fraction=0.25)
    assert drawn_keys(again.select_dataloader()) == keys["select"]
    other = ready(CIFAR10(folder, val_seed=1, **settings)).for_evaluation(1, seed=5, select_fraction=0.25)
    assert drawn_keys(other.select_dataloader()) != keys["select"]
    # The data themselves are as they were.
    assert data.samples_of("train") == 60 - held
    with pytest.raises(UserError, match="CIFAR10 holds no samples out to choose by: select_fraction is 0"):
        data.select_dataloader()


def test_parts_that_are_not_there(digits_dir):
    data = ready(Digits(digits_dir))
    with pytest.raises(UserError, match="Digits has no validation split: hold one out with val_fraction > 0"):
        data.plain_dataloader("val")
    with pytest.raises(UserError, match=r"select_fraction must be at least 0 and below 1, got 1.0"):
        data.for_evaluation(8, seed=0, select_fraction=1.0)
    with pytest.raises(UserError, match=r"select_fraction 0.0001 of 1437 samples holds out 0: both sides need some"):
        data.for_evaluation(8, seed=0, select_fraction=0.0001).select_dataloader()


def test_plain_images_are_those_of_evaluation(digits_dir):
    data = ready(Digits(digits_dir, eval_batch_size=100, val_fraction=0.1))
    for part, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        for (images, targets), (plain, same, _) in zip(loader, data.plain_dataloader(part), strict=True):
            assert torch.equal(images, plain)
            assert torch.equal(targets, same)


@pytest.mark.parametrize("reader", ["index", "stream"])
def test_crops_do_not_depend_on_workers_and_go_on_after_a_resume(tmp_path, reader):
    folder = write_data(tmp_path / "d", {"train": (7, 9), "test": (4,)}, size=20)
    crops = MultiCrop(local_crops=3, local_size=8)

    def batches(workers, start=0):
        settings = {"num_workers": workers, "image_size": 12, "reader": reader, "multicrop": crops}
        loader = ready(CIFAR10(folder, batch_size=4, **settings)).train_dataloader()
        return [
            loaded.batch
            for worker in range(max(1, workers))
            for loaded in loader.stream.batches(1, start, worker, max(1, workers))
        ]

    whole = batches(0)
    assert len(whole) == 4
    for images, targets in whole:
        assert [tuple(crop.shape) for crop in images] == [(4, 2, 3, 12, 12), (4, 3, 3, 8, 8)]
        assert len(targets) == 4

    def bits(batch):
        """The crops of each resolution, sample by sample."""
        return [[sample.numpy().tobytes() for sample in crops] for crops in batch[0]]

    def samples(some):
        return sorted(sample for batch in some for crops in bits(batch) for sample in crops)

    assert list(map(bits, batches(0, start=2))) == list(map(bits, whole[2:]))
    assert samples(batches(2)) == samples(whole)
    if reader == "index":  # even the batches are the same
        assert sorted(map(bits, batches(2))) == sorted(map(bits, whole))


def test_steps_see_normalised_crops_and_evaluation_single_images(tmp_path, digits_dir):
    crops = MultiCrop(local_crops=0, global_crops=3, enlarge=True)
    settings = {"image_size": 16, "val_fraction": 0.2, "batch_size": 128}
    trainer, data = quiet_trainer(tmp_path), Digits(digits_dir, multicrop=crops, **settings)

    class Crops(Seen):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(256, 10)

        def training_step(self, batch):
            (images,), targets = batch
            assert images.shape[1:] == (3, 1, 16, 16)
            self.images.setdefault("train", []).append(images)
            return torch.nn.functional.cross_entropy(self.layer(images[:, 0].flatten(1)), targets)

    model = Crops()
    trainer.fit_loop.max_epochs = 1
    trainer.fit(model, datamodule=data)
    alone = ready(Digits(digits_dir, multicrop=crops, **settings), None)
    loaded = [images for (images,), _ in alone.train_dataloader()]
    assert len(loaded) == len(model.images["train"]) == 1150 // 128
    for images, seen in zip(loaded, model.images["train"], strict=True):
        assert images.dtype == torch.uint8
        assert torch.equal(seen, (images.float() / 255 - torch.tensor(data.mean)) / torch.tensor(data.std))
    assert data.multicrop == crops
    assert data.for_evaluation(64, seed=0).multicrop is None
    plain = ready(Digits(digits_dir, **settings), None)
    for ours, theirs in (
        (alone.val_dataloader(), plain.val_dataloader()),
        (alone.for_evaluation(128, seed=0).train_dataloader(), plain.train_dataloader()),
    ):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))


def test_seed_comes_from_the_run(digits_dir, monkeypatch):
    def first(seed=None):
        return next(iter(ready(Digits(digits_dir, seed=seed)).train_dataloader()))[0]

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    unset = first()
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert torch.equal(first(), first(7))
    assert torch.equal(unset, first(0))
    assert not torch.equal(first(), unset)


def test_imagenet_validates_and_tests_on_its_validation_split(tmp_path):
    folder = write_data(tmp_path / "d", {"train": (10,), "val": (7, 6)}, classes=1000, extension="JPEG")
    data = ready(ImageNet(folder, batch_size=4, num_workers=0, image_size=16))
    for loader in (data.val_dataloader(), data.test_dataloader()):
        batches = list(loader)
        assert [len(targets) for _, targets in batches] == [4, 4, 4, 1]
        assert batches[0][0].shape == (4, 3, 16, 16)
    assert len(list(data.train_dataloader())) == 2


def test_repeats_reach_the_plan(tmp_path):
    folder = write_data(tmp_path / "d", {"train": (30,), "test": (5,)}, size=8)
    data = ready(CIFAR10(folder, batch_size=10, num_workers=0, image_size=8, repeats=3))
    loader = data.train_dataloader()
    loader.stream.with_keys = True
    keys = [key for batch in loader for key in batch[2]]
    assert len(keys) == 30
    assert len(set(keys)) == 10
    assert data.test_dataloader().stream.plan.repeats == 1


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.validated = 0

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch):
        self.validated += len(batch[1])

    def test_step(self, batch):
        self.log("test", float(len(batch[1])), reduce_fx="sum", on_epoch=True)

    def predict_step(self, batch):
        return batch[2]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def quiet_trainer(tmp_path):
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
    )


@pytest.mark.parametrize(("fraction", "validated"), [(0.0, 0), (0.2, 2 * 287)])
def test_lightning_runs_without_warnings(tmp_path, digits_dir, fraction, validated):
    trainer, model, data = quiet_trainer(tmp_path), Model(), Digits(digits_dir, val_fraction=fraction)
    trainer.fit(model, datamodule=data)
    assert model.validated == validated
    assert trainer.global_step == 2 * ((1437 - validated // 2) // 64)
    assert trainer.test(model, datamodule=data, verbose=False) == [{"test": 360.0}]
    assert sum(map(len, trainer.predict(model, datamodule=data))) == 360


class Seen(Model):
    """Keeps the images of every step."""

    def __init__(self):
        super().__init__()
        self.images = {}

    def keep(self, batch, stage):
        assert batch[0].device == self.device
        self.images.setdefault(stage, []).append(batch[0])

    def training_step(self, batch):
        self.keep(batch, "train")
        return super().training_step(batch)

    def validation_step(self, batch):
        self.keep(batch, "val")

    def test_step(self, batch):
        self.keep(batch, "test")

    def predict_step(self, batch):
        self.keep(batch, "predict")
        return batch[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("erase_prob", [0.0, 0.5])
def test_loaders_yield_uint8_and_steps_see_normalised_float32(tmp_path, digits_dir, workers, erase_prob):
    settings = {"val_fraction": 0.2, "num_workers": workers, "train_transform": TrainTransform(erase_prob=erase_prob)}
    trainer, model, data = quiet_trainer(tmp_path), Seen(), Digits(digits_dir, **settings)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    keys = trainer.predict(model, datamodule=data)
    alone = ready(Digits(digits_dir, **settings), None)
    loaders = {
        "train": alone.train_dataloader(),
        "val": alone.val_dataloader(),
        "test": alone.test_dataloader(),
        "predict": alone.predict_dataloader(),
    }
    for stage, loader in loaders.items():
        batches = list(loader)
        dtype = torch.float32 if stage == "train" and erase_prob else torch.uint8
        assert {batch[0].dtype for batch in batches} == {dtype}
        assert len(model.images[stage]) == len(batches) > 0
        for seen, batch in zip(model.images[stage], batches, strict=True):
            images = batch[0]
            if dtype == torch.uint8:
                images = (images.float() / 255 - torch.tensor(data.mean)) / torch.tensor(data.std)
            assert seen.dtype == torch.float32
            assert torch.equal(seen, images)
    assert keys == [batch[2] for batch in batches]


def test_a_checkpoint_of_another_layout_is_refused_at_an_epochs_end(tmp_path, digits_dir):
    trainer, model = quiet_trainer(tmp_path), Model()
    trainer.fit(model, datamodule=Digits(digits_dir))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = quiet_trainer(tmp_path)
    again.fit_loop.max_epochs = 3
    with pytest.raises(UserError, match="batch_size was 64 and is 32"):
        again.fit(
            Model(), datamodule=Digits(digits_dir, batch_size=32), ckpt_path=tmp_path / "end.ckpt", weights_only=True
        )
    # Evaluation may use any layout.
    tested = quiet_trainer(tmp_path)
    other = Digits(digits_dir, batch_size=32)
    assert tested.test(model, other, ckpt_path=tmp_path / "end.ckpt", verbose=False, weights_only=True) == [
        {"test": 360.0}
    ]


def test_validating_without_validation_data(tmp_path, digits_dir):
    with pytest.raises(UserError, match="Digits has no validation split: hold one out with val_fraction > 0"):
        quiet_trainer(tmp_path).validate(Model(), datamodule=Digits(digits_dir))


def test_class_count_must_agree_with_the_manifest(digits_dir):
    with pytest.raises(UserError, match="CIFAR100 has 100 classes, the manifest lists 10"):
        CIFAR100(digits_dir).setup("fit")


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"no data folder .*none: make it with `lapbench data"):
        CIFAR10(str(tmp_path / "none")).setup("fit")


def test_shards_are_checked_before_training(tmp_path):
    folder = write_data(tmp_path / "d", {"train": (4, 4), "test": (4,)}, size=4)
    shard = tmp_path / "d" / "train-001.tar"
    size = shard.stat().st_size
    shard.write_bytes(b"")
    with pytest.raises(UserError, match=rf"train-001.tar: expected {size} bytes as in the manifest, got 0"):
        CIFAR10(folder).setup("fit")
    shard.unlink()
    with pytest.raises(UserError, match=r"train-001.tar is missing"):
        CIFAR10(folder).setup("fit")


def test_an_empty_shard_is_named(tmp_path):
    folder = Path(write_data(tmp_path / "d", {"train": (4, 4), "test": (4,)}, size=4))
    tarfile.open(folder / "train-001.tar", "w").close()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"][1]["bytes"] = (folder / "train-001.tar").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for reader, message in (
        ("stream", "expected 4 samples as in the manifest, got 0"),
        ("index", r"sample number [0-3]: expected an image of .* as in the index, got something else"),
    ):
        data = ready(CIFAR10(str(folder), batch_size=2, num_workers=0, image_size=4, reader=reader))
        with pytest.raises(UserError, match=rf"train-001.tar(: |, ){message}"):
            list(data.train_dataloader())


def test_shards_elsewhere(tmp_path):
    folder = Path(write_data(tmp_path / "d", {"train": (4,), "test": (4,)}, size=4))
    elsewhere = tmp_path / "e"
    elsewhere.mkdir()
    for shard in folder.glob("*.tar"):
        shard.rename(elsewhere / shard.name)
    for url in (str(elsewhere), elsewhere.as_uri()):
        data = ready(CIFAR10(str(folder), num_workers=0, image_size=4, shards_url=url))
        assert len(labels(data.test_dataloader())) == 4
    with pytest.raises(UserError, match="only paths, file: and https: URLs are read, got pipe:"):
        CIFAR10(str(folder), shards_url="pipe:cat")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"reader": "random"}, "reader must be index or stream, got 'random'"),
        ({"shuffle_buffer": 0}, "shuffle_buffer must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"crop_pct": 0.0}, "crop_pct must be in"),
        ({"train_transform": TrainTransform(auto_augment="magic")}, "unknown policy 'magic'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        Digits(**settings)


def test_too_large_a_batch(digits_dir):
    with pytest.raises(UserError, match=r"takes 2000 samples .*, the split holds 1437"):
        ready(Digits(digits_dir, batch_size=2000)).train_dataloader()


def test_constants():
    assert [data.num_classes for data in (Digits(), CIFAR10(), CIFAR100(), ImageNet())] == [10, 10, 100, 1000]
    assert [len(data.mean) for data in (Digits(), CIFAR10(), CIFAR100(), ImageNet())] == [1, 3, 3, 3]
    assert [len(data.std) for data in (Digits(), CIFAR10(), CIFAR100(), ImageNet())] == [1, 3, 3, 3]


def test_yaml_settings_change_only_what_they_name(digits_dir):
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(ImageShards, "data")
    text = f"""
    data:
      class_path: lapbench.datamodules.Digits
      init_args:
        data_dir: {digits_dir}
        val_fraction: 0.1
        train_transform: {{hflip: 0.25}}
    """
    data = parser.instantiate(parser.parse_string(text)).data
    assert type(data) is Digits
    assert data.val_fraction == 0.1
    assert data._train_transform.hflip == 0.25
    assert data._train_transform.padding == 1  # the data set's own default, not TrainTransform's


def test_every_setting_has_help():
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(CIFAR100, "data")
    for action in parser._actions:
        if action.dest.startswith("data.") and action.dest.count("."):
            assert action.help, action.dest


def test_importing_the_package_imports_no_torch():
    code = "import sys, lapbench.datamodules; assert not {'torch', 'lightning', 'numpy', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert lapbench.datamodules.ImageNet is ImageNet
    for name in lapbench.datamodules.__all__:
        assert getattr(lapbench.datamodules, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        lapbench.datamodules.Nothing  # noqa: B018
