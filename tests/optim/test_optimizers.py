"""Optimizers through timm's factory: groups, options, learning rates by batch, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from timm.optim import Lamb
from torch import nn

from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings, build_optimizer, build_scheduler


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("adamw", {"betas": [0.9, 0.95], "eps": 1e-6}, torch.optim.AdamW),
        ("lamb", {"betas": [0.8, 0.9]}, Lamb),
        ("sgd", {"momentum": 0.5, "nesterov": False}, torch.optim.SGD),
    ],
)
def test_timm_builds_them(name: str, options: dict[str, Any], kind: type) -> None:
    model = model_of()
    optimizer = build_optimizer(model, OptimizerSettings(name, lr=0.1, weight_decay=0.3, options=options), 64)
    assert isinstance(optimizer, kind)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 4]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.1
        for key, value in options.items():
            assert group[key] == (tuple(value) if isinstance(value, list) else value)
    assert options == OptimizerSettings(options=options).options  # the settings, which are logged, keep their lists
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in model.state_dict().items() if n != "1.bias" or p.any())


def test_adamw_step_by_hand() -> None:
    """The first step of AdamW moves by lr sign(g), after decaying matrices by 1 - lr decay."""
    model = model_of()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerSettings("adamw", lr=0.01, weight_decay=0.5), 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter, factor * before[name] - 0.01, msg=name)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_fused_adamw_equals_the_plain_one(device: str) -> None:
    """``options: {fused: true}`` reaches torch, follows the schedule, and resumes."""
    torch.manual_seed(0)
    data = torch.randn(5, 8, 3, device=device)
    results = []
    for options in ({}, {"fused": True}):
        model = model_of().to(device)
        optimizer = build_optimizer(model, OptimizerSettings("adamw", lr=0.01, options=options), 8)
        scheduler = build_scheduler(optimizer, LRSchedule(), total=5, warmup=2)
        for step, batch in enumerate(data):
            if step == 3:  # a checkpoint
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            scheduler.step()
        assert all(bool(group.get("fused")) == bool(options) for group in optimizer.param_groups)
        results.append(list(model.parameters()))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    start = next(model_of().to(device).parameters())
    assert not torch.allclose(results[0][0], start)


@pytest.mark.parametrize(
    ("settings", "batch", "lr"),
    [
        ({"lr": 3e-3}, 4096, 3e-3),
        ({"lr": 1e-3, "lr_batch_size": 1024}, 2048, 2e-3),
        ({"lr": 5e-4, "lr_batch_size": 256}, 64, 1.25e-4),
        ({"lr": 1e-3, "lr_batch_size": 256, "lr_scaling": "sqrt"}, 1024, 2e-3),
        ({"lr": 1e-3, "lr_batch_size": 256, "lr_scaling": "sqrt"}, 64, 5e-4),
    ],
)
def test_peak_learning_rate(settings: dict[str, Any], batch: int, lr: float) -> None:
    assert OptimizerSettings(**settings).peak_lr(batch) == pytest.approx(lr, rel=1e-12)
    optimizer = build_optimizer(model_of(), OptimizerSettings(**settings), batch)
    assert {group["lr"] for group in optimizer.param_groups} == {OptimizerSettings(**settings).peak_lr(batch)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "adamww"}, "optimizer.name: timm has no optimizer 'adamww'; did you mean adamw,"),
        ({"name": "AdamW"}, "timm has no optimizer 'AdamW'; did you mean adamw,"),
        ({"name": "qqqqq"}, "timm has no optimizer 'qqqqq'$"),
        ({"options": {"beta": 0.9}}, "optimizer.options: adamw has no option beta; expected amsgrad, betas,"),
        # timm would drop these without a word
        ({"options": {"momentum": 0.9}}, "adamw has no option momentum; "),
        ({"options": {"layer_decay": 0.75}}, "adamw has no option layer_decay; "),
        ({"name": "sgd", "options": {"eps": 1e-8}}, "sgd has no option eps; "),
        # these have their own settings
        ({"options": {"lr": 0.1, "weight_decay": 0.1}}, "adamw has no option lr, weight_decay; "),
        ({"options": {"betas": [2, 0.9]}}, "optimizer adamw: Invalid beta parameter at index 0: 2.*got options"),
        ({"options": {"betas": 0.9}}, "optimizer adamw: .*got options {'betas': 0.9}"),
        ({"options": {"fused": True, "foreach": True}}, "optimizer adamw: .*fused.*foreach"),
        ({"lr": -1.0}, "optimizer adamw: Invalid learning rate: -1.0"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        build_optimizer(model_of(), OptimizerSettings(**settings), 8)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message of a machine without a GPU")
@pytest.mark.parametrize("name", ["fusedadamw", "bnbadamw8bit"])
def test_optimizers_of_libraries_that_are_not_there(name: str) -> None:
    with pytest.raises(UserError, match=f"optimizer.name: {name} cannot be used here: CUDA required"):
        build_optimizer(model_of(), OptimizerSettings(name), 8)
