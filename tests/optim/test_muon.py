"""Muon and AdamW against a plain rewrite of both; which parameter belongs to which."""

import math
from typing import Any

import pytest
import timm.optim.muon
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapbench.errors import UserError
from lapbench.optim import LRSchedule, MuonSettings, build_muon, build_scheduler, set_momentum

WIDTH, VOCABULARY = 48, 20


class Small(nn.Module):
    """What ``build_muon`` knows of a decoder: wide, tall and square matrices, a norm, coefficients, an embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_dim = WIDTH
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))]
        )
        self.blocks.append(nn.Linear(WIDTH, WIDTH, bias=False))
        self.blocks.append(nn.RMSNorm(WIDTH))
        self.blocks[0].register_parameter("head_coefficients", nn.Parameter(torch.ones(2, 3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.blocks[0].head_coefficients.mean()
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def model_of(tied: bool = False) -> Small:
    torch.manual_seed(0)
    return Small(tied)


def gradients(model: Small, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, 8), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def newton_schulz(x: Tensor) -> Tensor:
    """kellerjordan.github.io/posts/muon, in double precision and for any shape."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Plain:
    """Both optimizers as their papers write them, in double precision."""

    def __init__(self, model: Small, settings: MuonSettings) -> None:
        self.s = settings
        self.state: dict[str, list[Tensor]] = {}
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def step(self, model: Small, step: int) -> None:
        width = math.sqrt(768 / WIDTH)
        momentum = min(1.0, step / self.s.momentum_warmup) * (0.95 - 0.85) + 0.85
        for name, p in model.named_parameters():
            gradient = p.grad.double()
            if name.startswith("blocks") and p.ndim == 2 and "coefficients" not in name:
                (buffer,) = self.state.setdefault(name, [torch.zeros_like(gradient)])
                buffer.mul_(momentum).add_((1 - momentum) * gradient)
                update = newton_schulz((1 - momentum) * gradient + momentum * buffer)
                self.weights[name] -= self.s.lr * max(1, p.size(0) / p.size(1)) ** 0.5 * update
                continue
            rate = {"embedding.weight": 0.2 * width, "head.weight": 0.004 * width}.get(name, 0.004)
            first, second = self.state.setdefault(name, [torch.zeros_like(gradient), torch.zeros_like(gradient)])
            first.mul_(0.8).add_(0.2 * gradient)
            second.mul_(0.95).add_(0.05 * gradient**2)
            mean, square = first / (1 - 0.8 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
            self.weights[name] -= rate * mean / (square.sqrt() + 1e-10)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_thirty_steps_are_those_of_a_plain_rewrite(bfloat16: bool) -> None:
    """To float32 on a CPU; with bfloat16, as on other devices, to its noise, of which 30 steps are a walk."""
    settings = MuonSettings(momentum_warmup=20)
    model = model_of()
    optimizer, plain = build_muon(model, settings), Plain(model, settings)
    if bfloat16:
        optimizer.__class__ = timm.optim.muon.Muon
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(30):
        gradients(model, step)
        plain.step(model, step)  # on the same gradients, so that an error is not carried into the next ones
        set_momentum(optimizer, settings, step)
        optimizer.step()
    for name, p in model.named_parameters():
        moved, error = (plain.weights[name] - start[name]).norm(), (p.detach() - plain.weights[name]).norm()
        muon = name.startswith("blocks") and p.ndim == 2 and "coefficients" not in name
        bound = 3e-2 if muon and bfloat16 else 1e-4 if muon else 1e-5
        assert moved > 0
        assert error / moved < bound, name


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = model_of(tied)
    optimizer = build_muon(model, MuonSettings())
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [sorted(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
    head = ["embedding.weight"] if tied else ["head.weight"]
    assert groups == [
        ["blocks.0.0.weight", "blocks.0.2.weight", "blocks.1.weight"],
        *([] if tied else [["embedding.weight"]]),
        head,
        ["blocks.0.head_coefficients", "blocks.2.weight"],
    ]
    width = (WIDTH / 768) ** -0.5
    rates = [0.02, *([] if tied else [0.2 * width]), 0.004 * width, 0.004]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
    assert [group["nesterov"] for group in optimizer.param_groups] == [True] + [False] * (len(rates) - 1)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


def test_frozen_parameters_are_left_out() -> None:
    model = model_of()
    model.embedding.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    groups = build_muon(model, MuonSettings()).param_groups
    assert [len(group["params"]) for group in groups] == [2, 1, 2]


def test_fine_tuning_scales_every_rate() -> None:
    whole, scaled = (build_muon(model_of(), MuonSettings(lr_scale=scale)).param_groups for scale in (1.0, 0.02))
    assert [g["lr"] for g in scaled] == pytest.approx([0.02 * g["lr"] for g in whole])


def test_momentum_grows_over_the_first_steps() -> None:
    settings = MuonSettings()
    assert [settings.momentum_at(step) for step in (0, 150, 300, 10**6)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert MuonSettings(momentum_warmup=0).momentum_at(0) == 0.95


def test_all_groups_follow_one_schedule() -> None:
    optimizer = build_muon(model_of(), MuonSettings())
    peaks = [group["lr"] for group in optimizer.param_groups]
    scheduler = build_scheduler(optimizer, LRSchedule("trapezoid", warmup_lr=0.0, warmdown=0.5), total=8, warmup=2)
    seen = []
    for _ in range(8):
        factors = [group["lr"] / peak for group, peak in zip(optimizer.param_groups, peaks, strict=True)]
        assert factors == pytest.approx([factors[0]] * len(peaks), rel=1e-12)
        seen.append(factors[0])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25])


def test_a_resumed_optimizer_goes_on_bit_for_bit() -> None:
    settings = MuonSettings(momentum_warmup=4)

    def steps(model: Small, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            gradients(model, step)
            set_momentum(optimizer, settings, step)
            optimizer.step()

    whole = model_of()
    steps(whole, build_muon(whole, settings), 0, 6)
    first = model_of()
    optimizer = build_muon(first, settings)
    steps(first, optimizer, 0, 3)
    second = model_of()
    second.load_state_dict(first.state_dict())
    resumed = build_muon(second, settings)
    resumed.load_state_dict(optimizer.state_dict())
    steps(second, resumed, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "muon.lr: expected a number above 0, got 0"),
        ({"head_lr": math.nan}, "muon.head_lr: expected a number above 0, got nan"),
        ({"lr_scale": -1.0}, "muon.lr_scale: expected a number above 0, got -1"),
        ({"momentum": 1.0}, "muon.momentum: expected 0 <= value < 1, got 1"),
        ({"momentum_start": -0.1}, "muon.momentum_start: expected 0 <= value < 1, got -0.1"),
        ({"ns_steps": 0}, "muon.ns_steps: expected at least 1, got 0"),
        ({"momentum_warmup": -1}, "muon.momentum_warmup: expected at least 0, got -1"),
        ({"weight_decay": -1.0}, "muon.weight_decay: expected at least 0, got -1"),
        ({"betas": (0.9, 1.0)}, "muon.betas: expected two numbers in 0 <= value < 1, got .0.9, 1.0."),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_muon(model_of(), MuonSettings(**settings))
