"""Parameter groups of the three families: what is decayed, what is not."""

import pytest
import torch
from torch import nn

from lapbench.backbones import VisionBackbone, build_backbone
from lapbench.optim import parameter_groups

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
# Names with every kind of exempt parameter: tokens, LayerScale, rotary frequencies, distillation.
MODELS = {
    "deit3_small_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "eva02_tiny_patch14_224": {"qk_norm": True},
    "vit_small_patch16_dinov3": {},
}
TOKENS = {"pos_embed", "cls_token", "dist_token", "reg_token", "head_coefficients", "freqs"}


def model_of(name: str) -> VisionBackbone:
    return build_backbone(name, "1TS+1L", num_classes=3, **SMALL, **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_the_right_group(name: str) -> None:
    model = model_of(name)
    groups = parameter_groups(model, 0.05)
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(decay) == len(list(model.parameters()))

    exempt = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            matrix = isinstance(module, nn.Linear | nn.Conv2d) and leaf == "weight"
            assert decay[id(parameter)] == (0.05 if matrix else 0.0), f"{path}.{leaf}"
            if not matrix:
                exempt.add(leaf)
    assert {"bias", "weight", "head_coefficients"} <= exempt  # norms' weights
    assert exempt & TOKENS >= {"head_coefficients"}


def test_what_the_families_exempt() -> None:
    """The check above is not empty: these parameters exist."""
    names = {path.rsplit(".", 1)[-1] for name in MODELS for path, _ in model_of(name).named_parameters()}
    assert names >= TOKENS | {"gamma", "gamma_1", "gamma_2", "q_bias", "v_bias"}


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert len(groups) == 1
    assert groups[0]["weight_decay"] == 0
    assert {id(p) for p in groups[0]["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}


def test_shared_parameters_are_listed_once() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1]


def test_tokens_of_a_wrapped_model_are_exempt_too() -> None:
    """``no_weight_decay`` names parameters of the model itself, not of what contains it."""
    wrapped = nn.ModuleDict({"backbone": model_of("vit_small_patch14_reg4_dinov2"), "head": nn.Linear(2, 2)})
    decayed = {id(p) for p in parameter_groups(wrapped, 0.1)[0]["params"]}
    tokens = {path: p for path, p in wrapped.named_parameters() if path.rsplit(".", 1)[-1] in TOKENS}
    assert len(tokens) == 5  # class, register, position, coefficients of two blocks
    assert not decayed & {id(p) for p in tokens.values()}
    assert id(wrapped["head"].weight) in decayed


def test_weight_decay_moves_matrices_only() -> None:
    model = model_of("vit_small_patch14_reg4_dinov2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(parameter_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name.endswith("weight") and "norm" not in name else 1.0
        torch.testing.assert_close(parameter, factor * before[name], msg=name)
