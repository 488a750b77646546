"""Mistakes in the settings of token geometry are named in one line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lapbench.backbones import VisionSettings, build_decoder, build_vision_backbone
from lapbench.datamodules import Digits
from lapbench.errors import UserError
from lapbench.evaluation import TokenGeometry
from lapbench.evaluation.geometry_data import choose_split
from lapbench.evaluation.geometry_settings import choose
from lapbench.tasks import FrozenBackbone, ImageClassification

MEASURES = "anova, similarity, spectrum, collapse, pca, simplex, feature_maps, sublayers"
OPTIONS = {"embed_dim": 8, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("measures", ["anova", "similarty"], f"some of {MEASURES}, got 'similarty' (did you mean similarity?)"),
        ("measures", ["x"], f"some of {MEASURES}, got 'x'"),
        ("measures", [], "expected different ones or null, got ()"),
        ("measures", ["anova", "anova"], "expected different ones or null, got ('anova', 'anova')"),
        ("layers", "first", "expected all, last or different numbers from 0, got first"),
        ("layers", [], "expected all, last or different numbers from 0, got ()"),
        ("layers", [-1], "expected all, last or different numbers from 0, got (-1,)"),
        ("layers", [1, 1], "expected all, last or different numbers from 0, got (1, 1)"),
        ("max_samples", 0, "expected at least 1 or null, got 0"),
        ("alpha", 1.0, "expected 0 < value < 1, got 1.0"),
        ("every_n_epochs", 0, "expected at least 1 or null, got 0"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: Any, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        TokenGeometry(**{setting: value})
    assert str(caught.value).startswith(f"TokenGeometry.{setting}: ")
    assert str(caught.value).endswith(reason)


def vision(**changes: Any) -> VisionSettings:
    small = {"img_size": 8, "patch_size": 4, "in_chans": 1, "options": OPTIONS}
    return VisionSettings("vit_tiny_patch16_224", **small | changes)


def chosen(task: Any, data: Any, **settings: Any) -> Any:
    return choose(TokenGeometry(**settings).settings, task, data, "TokenGeometry")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layers": [0, 2]}, "TokenGeometry.layers: expected blocks of the backbone, 0..1, got 2"),
        ({"measures": ["simplex"]}, "measures: simplex does not apply: FrozenBackbone has no linear classifier"),
        ({"unit": "class token"}, "unit: expected sequence mean, as the backbone has no class token, got class token"),
    ],
)
def test_what_the_model_does_not_have(settings: dict[str, Any], reason: str) -> None:
    no_token = vision(global_pool="avg", options={**OPTIONS, "class_token": False})
    with pytest.raises(UserError) as caught:
        chosen(FrozenBackbone(no_token), Digits(), **settings)
    assert reason in str(caught.value)


def test_measures_that_do_not_apply_are_explained_unless_they_are_asked_for() -> None:
    pixels = FrozenBackbone(VisionSettings("pixels", patch_size=1, in_chans=1))
    found, reasons = chosen(pixels, Digits())
    assert found.measures == ("anova", "similarity", "spectrum", "collapse", "feature_maps")
    assert reasons == {
        "sublayers": "Pixels has no blocks",
        "pca": "it shows two components, tokens have one feature",
        "simplex": "FrozenBackbone has no linear classifier",
    }
    with pytest.raises(UserError, match="measures: sublayers does not apply: Pixels has no blocks"):
        chosen(pixels, Digits(), measures=["anova", "sublayers"])
    classification = ImageClassification(vision(), num_classes=10)
    assert chosen(classification, Digits())[1] == {}
    assert chosen(classification, Digits(), layers=[0])[1] == {
        "simplex": "the classifier reads the last layer, which was not chosen"
    }
    two = ImageClassification(vision(), num_classes=2)
    pairs: Any = Digits()
    pairs.num_classes = 2
    assert chosen(two, pairs)[1] == {"simplex": "it shows three classes, the data have 2"}
    # Named ones are explained by an error, or apply.
    found, reasons = chosen(classification, Digits(), measures=["similarity", "anova"], layers=[1, 0])
    assert (found.measures, found.layers, reasons) == (("anova", "similarity"), (0, 1), {})


def test_data_and_model_must_fit() -> None:
    images: Any = SimpleNamespace(backbone=build_vision_backbone("pixels", patch_size=2, in_chans=1, num_classes=0))
    text: Any = SimpleNamespace(backbone=build_decoder("tiny", vocab_size=8, depth=1, width=8, num_heads=2, context=8))
    with pytest.raises(UserError, match="TokenGeometry: expected images with labels, got LightningDataModule"):
        chosen(images, pl.LightningDataModule())
    with pytest.raises(UserError, match="TokenGeometry: expected text for a language model, got Digits"):
        chosen(text, Digits())
    other: Any = SimpleNamespace(backbone=torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match="TokenGeometry: expected a task with a backbone, got SimpleNamespace"):
        chosen(other, Digits())


def test_the_split() -> None:
    held_out, none = Digits(val_fraction=0.5), Digits()
    assert [choose_split(held_out, split, "") for split in ("auto", "val", "test")] == ["val", "val", "test"]
    assert [choose_split(none, split, "") for split in ("auto", "test")] == ["test", "test"]
    with pytest.raises(UserError, match=r"T\.split val: Digits has no validation split: measure split test"):
        choose_split(none, "val", "T")


def test_mistakes_are_said_before_training(tmp_path: Path, fit: Callable[..., Any]) -> None:
    outcome = fit(tmp_path / "run", "--trainer.callbacks+=TokenGeometry", "--trainer.callbacks.layers=[7]")
    assert outcome.status == 2
    reason = "TokenGeometry.layers: expected blocks of the backbone, 0..1, got 7"
    assert outcome.err.splitlines()[-1] == f"lapbench: error: {reason}"
    assert not (tmp_path / "run/checkpoints").exists()
