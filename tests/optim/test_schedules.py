"""Learning rates by hand, on the optimizer-step clock."""

import math
import warnings
from typing import Any

import pytest
import torch

from lapbench.errors import UserError
from lapbench.optim import LRSchedule, build_scheduler, learning_rate


def rates(settings: LRSchedule, peak: float, total: int, warmup: int) -> list[float]:
    return [learning_rate(s, peak=peak, total=total, warmup=warmup, settings=settings) for s in range(total + 1)]


def test_warmup_and_cosine_by_hand() -> None:
    settings = LRSchedule("cosine", warmup_lr=0.1, min_lr=0.2)
    half = math.sqrt(0.5)
    assert rates(settings, 1.0, 6, 2) == pytest.approx(
        [
            0.1,  # warm-up: 0.1 + 0.9 s / 2
            0.55,
            1.0,  # the peak, then 0.2 + 0.8 (1 + cos(pi (s - 2) / 4)) / 2
            0.2 + 0.4 * (1 + half),
            0.6,
            0.2 + 0.4 * (1 - half),
            0.2,
        ]
    )


def test_linear_by_hand() -> None:
    settings = LRSchedule("linear", warmup_lr=0.0, min_lr=0.5)
    assert rates(settings, 2.0, 5, 2) == pytest.approx([0.0, 1.0, 2.0, 1.5, 1.0, 0.5])
    assert learning_rate(9, peak=2.0, total=5, warmup=2, settings=settings) == 0.5


def test_constant_after_warmup() -> None:
    assert rates(LRSchedule("constant", warmup_lr=0.0, min_lr=0.5), 2.0, 4, 2) == [0.0, 1.0, 2.0, 2.0, 2.0]


def test_trapezoid_by_hand() -> None:
    """arXiv 2405.18392: flat until the last share of the steps, then linear."""
    settings = LRSchedule("trapezoid", warmup_lr=0.0, warmdown=0.4)
    assert rates(settings, 2.0, 10, 2) == pytest.approx([0, 1, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0])
    settings = LRSchedule("trapezoid", warmdown=0.2, final_fraction=0.1)
    assert rates(settings, 2.0, 10, 0) == pytest.approx([2.0] * 9 + [1.1, 0.2])
    assert rates(LRSchedule("trapezoid", warmdown=0.0), 2.0, 3, 0)[:3] == [2.0, 2.0, 2.0]


def test_warmup_in_steps_comes_before_warmup_in_epochs() -> None:
    assert LRSchedule(warmup_epochs=1.5).warmup(10) == 15
    assert LRSchedule(warmup_epochs=1.5, warmup_steps=7).warmup(10) == 7
    assert LRSchedule(warmup_epochs=1.5, warmup_steps=0).warmup(10) == 0


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert rates(LRSchedule(warmup_lr=0.5, min_lr=0.0), 1.0, 2, 0) == pytest.approx([1.0, 0.5, 0.0])


def test_steps_beyond_the_end_stay_at_the_minimum() -> None:
    settings = LRSchedule(min_lr=0.25)
    assert learning_rate(99, peak=1.0, total=10, warmup=0, settings=settings) == 0.25


def optimizer_at(lr: float) -> torch.optim.Optimizer:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups: list[dict[str, Any]] = [{"params": [a], "weight_decay": 0.1}, {"params": [b]}]
    return torch.optim.SGD(groups, lr=lr)


def test_the_scheduler_gives_every_group_these_rates() -> None:
    settings = LRSchedule(warmup_lr=1e-6, min_lr=1e-5)
    optimizer = optimizer_at(3e-3)
    scheduler = build_scheduler(optimizer, settings, total=9, warmup=3)
    seen = []
    for _ in range(9):
        assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(rates(settings, 3e-3, 9, 3)[:9], rel=1e-12)
    assert seen[0] == pytest.approx(1e-6, rel=1e-9)
    assert seen[3] == max(seen) == 3e-3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5, rel=1e-9)  # after the last step


def test_a_resumed_scheduler_goes_on_where_it_stopped() -> None:
    settings = LRSchedule(warmup_lr=0.0, min_lr=0.1)
    exact = rates(settings, 1.0, 8, 2)
    first = optimizer_at(1.0)
    scheduler = build_scheduler(first, settings, total=8, warmup=2)
    for _ in range(5):
        first.step()
        scheduler.step()
    second = optimizer_at(1.0)
    resumed = build_scheduler(second, settings, total=8, warmup=2)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(exact[5])
    with warnings.catch_warnings():
        # torch misses the optimizer step that came before the state was loaded
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        resumed.step()
    assert second.param_groups[0]["lr"] == pytest.approx(exact[6])


@pytest.mark.parametrize(
    ("lr", "settings", "clock", "said"),
    [
        (1.0, {}, {"total": 10, "warmup": 10}, "warmup_epochs: the warm-up takes 10 of the 10 optimizer steps"),
        (1.0, {}, {"total": 10, "warmup": -1}, "warmup_epochs: the warm-up takes -1"),
        (1.0, {}, {"total": 0, "warmup": 0}, "takes 0 of the 0 optimizer steps"),
        (1e-3, {"min_lr": 1e-2}, {}, "lr_schedule.min_lr: expected 0..0.001 .the peak., got 0.01"),
        (1e-3, {"warmup_lr": 1e-2}, {}, "lr_schedule.warmup_lr: expected 0..0.001 .the peak., got 0.01"),
        (1e-3, {"min_lr": -1e-3}, {}, "lr_schedule.min_lr: expected 0..0.001 .*, got -0.001"),
        (1e-3, {"warmup_lr": math.nan}, {}, "lr_schedule.warmup_lr: expected 0..0.001 .*, got nan"),
        (1.0, {"warmup_steps": 10}, {"warmup": 10}, "warmup_steps: the warm-up takes 10 of the 10 optimizer steps"),
        (1.0, {"name": "trapezoid", "warmdown": 1.1}, {}, "lr_schedule.warmdown: expected 0..1, got 1.1"),
        (1.0, {"name": "trapezoid", "final_fraction": -1}, {}, "lr_schedule.final_fraction: expected 0..1, got -1"),
        (1.0, {"name": "trapezoid", "warmdown": 0.9}, {}, "warm-up takes 2 and the warm-down 9 of the 10 optimizer"),
        (0.0, {"min_lr": 0.0, "warmup_lr": 0.0}, {}, "optimizer.lr: expected a learning rate above 0, got 0"),
    ],
)
def test_refused(lr: float, settings: dict[str, Any], clock: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_scheduler(optimizer_at(lr), LRSchedule(**settings), **{"total": 10, "warmup": 2, **clock})


def test_a_constant_schedule_has_no_minimum() -> None:
    build_scheduler(optimizer_at(1e-3), LRSchedule("constant", min_lr=1.0), total=10, warmup=2)
