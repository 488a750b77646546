"""Which steps are logged."""

from types import SimpleNamespace
from typing import Any

import pytest

from lapbench.tasks.steps import is_shown


def trainer(step: int, every: int, last: bool = False) -> Any:
    return SimpleNamespace(global_step=step, log_every_n_steps=every, is_last_batch=last)


@pytest.mark.parametrize(("every", "shown"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 5]), (0, [])])
def test_loggers_take_every_nth_step_counted_from_one(every: int, shown: list[int]) -> None:
    assert [step for step in range(6) if is_shown(trainer(step, every))] == shown


def test_an_epochs_last_step_is_shown_whatever_loggers_take() -> None:
    assert is_shown(trainer(1, 5, last=True))
    assert is_shown(trainer(1, 0, last=True))
