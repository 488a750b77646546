"""Raw pixels as a backbone: every pixel in its patch, and one line for what it cannot be."""

from typing import Any

import pytest
import torch

from lapbench.backbones import Pixels, build_backbone
from lapbench.errors import UserError
from lapbench.evaluation.features import image_token, last_tokens, mean_patch_token


def build(**settings: Any) -> Pixels:
    backbone = build_backbone("pixels", **{"patch_size": 2, "in_chans": 3, "num_classes": 0, **settings})
    assert isinstance(backbone, Pixels)
    return backbone


def test_tokens_are_the_patches_row_by_row() -> None:
    backbone = build(img_size=8)
    images = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)  # another size than img_size
    (tokens,) = last_tokens(backbone, images)
    assert tokens.shape == (2, 2 * 3, backbone.embed_dim)
    for row in range(2):
        for column in range(3):
            patch = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(tokens[:, 3 * row + column], patch.flatten(1))
    assert image_token(backbone, tokens).shape == (2, 72)
    assert torch.equal(image_token(backbone, tokens).sort().values, images.flatten(1).sort().values)
    assert torch.equal(mean_patch_token(backbone, tokens), tokens.mean(1))
    assert torch.equal(backbone(images), images.flatten(1))
    for indices in (None, 1, [0], [-1]):
        assert torch.equal(backbone.forward_intermediates(images, indices, norm=True)[0], tokens)


def test_it_is_a_backbone_without_laplacian_heads_and_without_parameters() -> None:
    backbone = build(heads="0L", dynamic_img_size=True)
    assert (backbone.schedule.name, backbone.num_layers, backbone.num_prefix_tokens) == ("0L", 1, 0)
    assert list(backbone.state_dict()) == list(backbone.parameters()) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"heads": 1}, "it has no heads: expected heads 0, got 1"),
        (
            {"drop_path": 0.1},
            "expected no settings but img_size, patch_size, in_chans, dynamic_img_size, got drop_path",
        ),
        ({"embed_dim": 64}, "got options {'embed_dim': 64}"),
        ({"pretrained": True}, "got pretrained True"),
        ({"num_classes": 10}, "it has no classifier: expected num_classes 0"),
        ({"patch_size": None}, "expected a patch_size in pixels, got none"),
        ({"patch_size": 0, "img_size": 8}, "patch_size: expected at least 1, got 0"),
        ({"img_size": 9}, "img_size: expected a multiple of the patch size 2, got 9"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=r"^backbone pixels: ") as caught:
        build(**settings)
    assert reason in str(caught.value)


def test_images_and_layers_that_do_not_fit_are_one_line() -> None:
    backbone = build()
    for shape, got in (((1, 3, 4, 5), "got 3 x 4 x 5"), ((1, 1, 4, 4), "got 1 x 4 x 4")):
        with pytest.raises(UserError, match=got):
            backbone.forward_intermediates(torch.zeros(shape))
    with pytest.raises(UserError, match=r"expected its only layer \(1, \[0\] or \[-1\]\), got 4"):
        backbone.forward_intermediates(torch.zeros(1, 3, 4, 4), 4)
