"""Token geometry of runs of every paradigm against the same measures over all tokens at once."""

import hashlib
import json
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lapbench.analysis.anova import TokenANOVA
from lapbench.analysis.collapse import NeuralCollapse
from lapbench.analysis.pca import TokenPCA, feature_maps
from lapbench.analysis.similarity import within_sequence_similarity
from lapbench.analysis.simplex import simplex_projection
from lapbench.analysis.spectrum import TokenSpectrum
from lapbench.analysis.sublayers import SublayerVariance
from lapbench.backbones import DecoderSettings, VisionSettings
from lapbench.datamodules import Digits, PyDocs
from lapbench.evaluation import TokenGeometry, geometry_measures
from lapbench.evaluation.after_fit import AfterFit, join_processes
from lapbench.evaluation.geometry import _pixels
from lapbench.evaluation.geometry_measures import Chosen, GeometryMeasures
from lapbench.evaluation.geometry_report import report
from lapbench.evaluation.processes import Processes
from lapbench.figures import load_figure
from lapbench.tasks import DINO, FrozenBackbone, ImageClassification, LanguageModeling

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
OPTIONS = {"embed_dim": 16, "depth": 3, "num_heads": 2}
NEAR = 1e-5  # the last bits of a float32 product depend on how many images it is of


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "lightning.pytorch")


def settings(**changes: Any) -> VisionSettings:
    small = {"heads": 1, "img_size": 8, "patch_size": 2, "in_chans": 1, "options": OPTIONS}
    return VisionSettings("vit_tiny_patch16_224", **small | changes)


def classification(**changes: Any) -> ImageClassification:
    torch.manual_seed(3)
    task = ImageClassification(settings(**changes), num_classes=10)
    with torch.no_grad():  # so that norms matter and images differ
        for name, parameter in task.backbone.named_parameters():
            if name in ("norm.weight", "fc_norm.weight"):
                parameter.copy_(torch.linspace(0.5, 2, 16))
            elif parameter.ndim > 1:
                parameter.normal_(std=0.5)
    return task


def digits(folder: Path, **changes: Any) -> Digits:
    data = Digits(data_dir=str(folder), **{"eval_batch_size": 24, "num_workers": 0, **changes})
    data.setup("fit")
    return data


def measured(
    task: pl.LightningModule, data: Any, folder: Path, trainer: pl.Trainer | None = None, **changes: Any
) -> dict[str, Any]:
    """The section of a task, as ``lapbench fit`` makes it."""
    file = folder / "last.ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    trainer = trainer or pl.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    if trainer.is_global_zero:
        torch.save({"state_dict": task.state_dict()}, file)
    trainer.strategy.barrier()
    sections: dict[str, Any] = {}
    evaluation = TokenGeometry(**{"pictures": False, **changes})
    failed = AfterFit(trainer, task, data, 0, folder, file, "last").run([evaluation], sections.__setitem__)
    assert failed == [], sections
    return sections[evaluation.name]


def series(folder: Path, name: str) -> dict[str, Any]:
    (only,) = load_figure(folder / f"figures/{name}.json")["series"]
    return only


def all_of(data: Digits, part: Any = "test") -> tuple[Tensor, Tensor, list[str]]:
    """All images of a part as the model sees them, labels and keys."""
    images, labels, keys = zip(*data.plain_dataloader(part), strict=True)
    return data.normalize(torch.cat(images)), torch.cat(labels), [key for part in keys for key in part]


def digest(module: torch.nn.Module) -> str:
    tensors = (*module.named_parameters(), *module.named_buffers())
    content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
    return hashlib.sha256(b"".join(content)).hexdigest()


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({"global_pool": "avg", "options": {**OPTIONS, "class_token": False}}, {}),
        ({"options": {**OPTIONS, "reg_tokens": 2}}, {"tokens": "patches", "layers": [1, 2]}),
        ({}, {"unit": "class token", "layers": "last"}),
    ],
)
def test_every_measure_is_that_of_all_tokens_at_once(
    changes: dict[str, Any], chosen: dict[str, Any], few_digits: Path, tmp_path: Path
) -> None:
    task, data = classification(**changes).eval(), digits(few_digits)
    before = digest(task)
    section = measured(task, data, tmp_path, **chosen)
    assert digest(task) == before
    assert section["left_out"] == {}
    assert (section["split"], section["samples"]) == ("test", 37)
    layers = {"all": [0, 1, 2], "last": [2]}.get(str(chosen.get("layers", "all")), chosen.get("layers"))
    assert section["layers"] == layers

    images, labels, keys = all_of(data)
    backbone: Any = task.backbone
    watch = SublayerVariance(backbone)
    with torch.no_grad(), watch.watching():
        every = backbone.forward_intermediates(images)
    with torch.no_grad():
        every[2] = backbone.norm(every[2])
        logits = task(images)
    prefix = backbone.num_prefix_tokens if chosen.get("tokens") == "patches" else 0
    tokens = [of_layer[:, prefix:] for of_layer in every]

    for place, layer in enumerate(layers):
        anova = TokenANOVA(10, 16)
        anova.update(tokens[layer], labels)
        for key, value in anova.compute().items():
            assert section["anova"][key][place] == pytest.approx(value, rel=NEAR)
        expected = float(within_sequence_similarity(tokens[layer]).mean())
        assert section["similarity"]["similarity"][place] == pytest.approx(expected, rel=NEAR, abs=NEAR)
        unit = every[layer][:, 0] if "unit" in chosen else tokens[layer].mean(dim=1)
        unit = backbone.fc_norm(unit).detach() if layer == 2 else unit
        collapse = NeuralCollapse(10, 16)
        collapse.update(unit, labels)
        for key, value in collapse.compute(task.backbone.head.weight if layer == 2 else None).items():
            if key != "classes":
                near = None if value is None else pytest.approx(value, rel=1e-4)
                assert section["collapse"][key][place] == near, key
    means = torch.stack([unit[labels == c].double().mean(dim=0) for c in range(10)])
    nearest = torch.cdist(unit.double(), means).argmin(dim=1)
    mismatch = float((nearest != logits.argmax(dim=1)).double().mean())
    assert section["collapse"]["nc4"] == [None] * (len(layers) - 1) + [pytest.approx(mismatch)]
    assert mismatch > 0
    assert len(logits.argmax(dim=1).unique()) > 1

    spectrum = TokenSpectrum(min(tokens[2].shape[1:]))
    spectrum.update(tokens[2])
    expected_spectrum = spectrum.compute()
    assert section["spectrum"]["k_alpha"] == pytest.approx(expected_spectrum["k_alpha"])
    assert section["spectrum"]["sequences"] == 37
    shown = series(tmp_path, "spectrum")
    assert shown["eigenvalues_mean"] == pytest.approx(expected_spectrum["eigenvalues_mean"], rel=1e-4, abs=1e-5)
    sublayers = watch.compute()
    assert section["sublayers"]["after_mlp"] == pytest.approx([sublayers["after_mlp"][i] for i in layers], rel=NEAR)
    kinds: Any = sublayers["by_kind"]
    for kind, of_kind in section["sublayers"]["by_kind"].items():
        assert of_kind["mean_shift"] == pytest.approx([kinds[kind]["mean_shift"][i] for i in layers], rel=NEAR)

    metrics = section["metrics"]
    assert metrics["geometry/nc4"] == pytest.approx(mismatch)
    assert metrics["geometry/within_sequence"] == section["anova"]["within_sequence"][-1]
    assert metrics["geometry/similarity"] == section["similarity"]["similarity"][-1]
    assert metrics["geometry/k_alpha"] == section["spectrum"]["k_alpha"]
    check_pictures(tmp_path, task, tokens[2], every[2], labels, keys)


def check_pictures(folder: Path, task: Any, tokens: Tensor, every: Tensor, labels: Tensor, keys: list[str]) -> None:
    pca = TokenPCA(16)
    pca.update(tokens)
    components = pca.compute(2)
    length = tokens.size(1)
    places = torch.arange(length) if length <= 16 else torch.arange(16) * length // 16
    rows = [row for label in range(10) for row in (labels == label).nonzero().flatten()[:10].tolist()]
    shown = series(folder, "pca")
    assert shown["classes"] == labels[rows].repeat_interleave(len(places)).tolist()
    points = components.project(tokens[rows][:, places].flatten(0, 1))
    assert torch.allclose(torch.tensor(shown["points"]).double(), points, atol=1e-4)
    assert shown["explained"] == pytest.approx(components.explained, rel=1e-4)

    shown = series(folder, "simplex")
    chosen = shown["chosen"]
    rows = [row for label in chosen for row in (labels == label).nonzero().flatten()[:20].tolist()]
    with torch.no_grad():
        read = task.backbone.fc_norm(tokens[rows][:, places].flatten(0, 1))
        points = simplex_projection(read, task.backbone.head.weight[chosen])
    assert torch.allclose(torch.tensor(shown["points"]).double(), points, atol=1e-4)
    assert [chosen[c] for c in shown["classes"]] == labels[rows].repeat_interleave(len(places)).tolist()

    shown = series(folder, "feature_maps")
    assert shown["keys"] == keys[:4]
    assert len(shown["images"]) == 4
    prefix = task.backbone.num_prefix_tokens
    for found, image in zip(shown["maps"], every[:4], strict=True):
        assert torch.allclose(torch.tensor(found).double(), feature_maps(image[prefix:], (4, 4)), atol=1e-3)


def test_batches_and_a_second_reading_change_nothing(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = classification()
    one = measured(task, digits(few_digits, eval_batch_size=37), tmp_path / "one")
    # Of batches above the size at which the backbone reads, and a process that may keep nothing.
    monkeypatch.setattr(geometry_measures, "KEPT", 0)
    other = measured(task, digits(few_digits, eval_batch_size=100), tmp_path / "other")
    for key in ("anova", "similarity", "spectrum", "collapse", "sublayers", "metrics"):
        same(one[key], other[key])


def same(one: Any, other: Any) -> None:
    """But for the order of float64 sums."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(other, float) else other)


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
        section = measured(classification(), digits(few), folder / "two", trainer, max_samples=29)
        found.put((rank, json.dumps(section)))


def test_two_processes_give_the_result_of_one(few_digits: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path, few_digits, found)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    one = measured(classification(), digits(few_digits), tmp_path / "one", max_samples=29)
    for _, text in sorted([found.get(), found.get()]):
        two = json.loads(text)
        assert (two["samples"], two["left_out"]) == (29, {})
        same(json.loads(json.dumps({**one, "seconds": 0})), {**two, "seconds": 0})
    for name in one["figures"]:
        if name != "feature_maps":  # colours of patches with nearly equal variances are decided by the last bits
            same(series(tmp_path / "one", name), series(tmp_path / "two", name))


def test_the_first_samples_are_taken(few_digits: Path, tmp_path: Path) -> None:
    task, data = classification().eval(), digits(few_digits, val_fraction=0.25, num_workers=0)
    section = measured(task, data, tmp_path, max_samples=13, measures=["similarity", "anova"])
    assert (section["split"], section["samples"]) == ("val", 13)
    images, labels, _ = all_of(data, "val")
    with torch.no_grad():
        tokens = task.backbone.forward_features(images[:13])  # type: ignore[operator]
    assert section["similarity"]["similarity"][-1] == pytest.approx(float(within_sequence_similarity(tokens).mean()))
    anova = TokenANOVA(10, 16)
    anova.update(tokens, labels[:13])
    assert section["anova"]["between_class"][-1] == pytest.approx(anova.compute()["between_class"], rel=NEAR)
    assert section["figures"] == ["anova", "similarity"]


def test_backbones_without_a_classifier(few_digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = digits(few_digits)
    teacher = DINO(settings())
    with torch.no_grad():
        teacher.teacher.backbone.norm.weight.mul_(2)  # type: ignore[union-attr]
    frozen = FrozenBackbone(settings(heads=0))
    pixels = FrozenBackbone(VisionSettings("pixels", patch_size=2, in_chans=1))
    no_classifier = "has no linear classifier"
    for task, layers in ((teacher, 3), (frozen, 3), (pixels, 1)):
        name = type(task).__name__
        folder = tmp_path / f"{name}{layers}"
        section = measured(task, data, folder, max_samples=20)
        assert section["left_out"].pop("simplex") == f"{name} {no_classifier}"
        assert section["left_out"] == ({"sublayers": "Pixels has no blocks"} if task is pixels else {})
        assert section["layers"] == list(range(layers))
        assert section["collapse"]["nc1"][-1] > 0
        assert section["collapse"]["nc3"] == section["collapse"]["nc4"] == [None] * layers
        assert not {"geometry/nc3", "geometry/nc4"} & section["metrics"].keys()
        images, _, _ = all_of(data)
        with torch.no_grad():
            tokens = task.backbone.forward_intermediates(images[:20], [layers - 1], norm=task is not pixels)[0]  # type: ignore[union-attr, operator]
        similarity = float(within_sequence_similarity(tokens).mean())
        assert section["metrics"]["geometry/similarity"] == pytest.approx(similarity, rel=NEAR)
        assert series(folder, "similarity")["label"] == {teacher: "1L", frozen: "0L", pixels: "pixels"}[task]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    PyDocs(str(folder), vocab_size=320).prepare_data()
    return folder


def test_a_language_model(documents: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"depth": 2, "width": 16, "num_heads": 2, "context": 64, "head_std": 0.02}
    task = LanguageModeling(DecoderSettings("tiny", 1, **shape), 320).eval()
    for parameter in task.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    data = PyDocs(str(documents), vocab_size=320, context=64, eval_batch_size=5)
    data.setup("fit")
    windows = [torch.cat(part) for part in zip(*data.val_dataloader(), strict=True)]  # type: ignore[arg-type]
    section = measured(task, data, tmp_path)
    inputs, targets = windows
    assert section["samples"] == len(inputs)
    assert set(section["left_out"]) == {"collapse", "pca", "simplex", "feature_maps"}
    whole = targets[:, -1] != -100
    assert 0 < int(whole.sum()) < len(whole)  # the last window of a shard is shorter
    with torch.no_grad():
        every = task.backbone.forward_intermediates(inputs)
        every[1] = task.backbone.norm(every[1])  # type: ignore[operator]
    anova = TokenANOVA(320, 16)
    anova.update(every[1], targets)
    expected = anova.compute()
    assert section["anova"] == {"layers": [1], **{k: [pytest.approx(v, rel=NEAR)] for k, v in expected.items()}}
    assert "geometry/within_sequence" not in section["metrics"]
    for layer in range(2):
        similarity = float(within_sequence_similarity(every[layer][whole]).mean())
        assert section["similarity"]["similarity"][layer] == pytest.approx(similarity, rel=NEAR, abs=NEAR)
    assert section["spectrum"]["sequences"] == int(whole.sum())
    watch = SublayerVariance(task.backbone)
    with torch.no_grad(), watch.watching():
        task.backbone(inputs[whole])
    assert section["sublayers"]["after_attention"] == pytest.approx(watch.compute()["after_attention"], rel=NEAR)
    assert section["figures"] == ["anova", "similarity", "spectrum", "sublayers"]


def test_text_without_a_whole_window(documents: Path) -> None:
    data = PyDocs(str(documents), vocab_size=320, context=8)
    shape: dict[str, Any] = {"depth": 1, "width": 8, "num_heads": 2, "context": 8}
    task = LanguageModeling(DecoderSettings("tiny", 1, **shape), 320).eval()
    names = ("anova", "similarity", "spectrum", "sublayers")
    measures = GeometryMeasures(task, Chosen(names, (0,), "all", "sequence mean", 0.99), 320, samples=2)
    inputs = torch.arange(16).view(2, 8)
    targets = (inputs + 1).masked_fill(torch.arange(8) > 4, -100)
    measures.update(inputs, targets, 0)
    found = report(measures, Processes(), _pixels(data))
    reason = "no window is predicted up to its end"
    assert found.left_out == {"similarity": reason, "spectrum": reason, "sublayers": reason}
    assert found.found.keys() == found.figures.keys() == {"anova"}
    assert found.metrics.keys() == {"within_class", "between_class"}
