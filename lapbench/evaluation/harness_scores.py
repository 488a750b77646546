"""Scores of one task by lm-evaluation-harness. Imports ``lm_eval``, so import it only where it is needed."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lm_eval.api.task as harness_task
from lm_eval.evaluator import evaluate

from lapbench.backbones import Decoder
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.evaluation.harness_model import HarnessModel
from lapbench.evaluation.harness_tasks import build_task, by_letters
from lapbench.evaluation.language_settings import LanguageSettings
from lapbench.evaluation.processes import Processes

# The metrics of the harness, and what they are called here.
_METRICS = {
    "acc,none": "",
    "acc_norm,none": "_acc_norm",
    "exact_match,strict-match": "",
    "exact_match,flexible-extract": "_flexible",
}


def score(
    task: str,
    rows: Sequence[dict[str, Any]],
    settings: LanguageSettings,
    model: Decoder,
    tokenizer: Tokenizer,
    seed: int,
    processes: Processes,
    autocast: Callable[[], AbstractContextManager[Any]],
    title: str,
) -> dict[str, Any]:
    """The metrics of ``task`` on the questions ``rows``, with their standard errors, on all processes.

    Args:
        task: Its name.
        rows: Checked questions.
        settings: Prompts, limits and the like.
        model: The decoder, in evaluation mode.
        tokenizer: Its tokenizer.
        seed: Of sampled answers.
        processes: Those that share the work.
        autocast: Makes the context in which the model computes.
        title: What lines of progress begin with.
    """
    lm = HarnessModel(
        model,
        tokenizer,
        batch_size=settings.batch_size,
        chat=settings.chat,
        separate=by_letters(task, settings),
        seed=seed,
        processes=processes,
        autocast=autocast,
        progress=Progress(f"{title}: {task}", processes),
    )
    with _quiet_harness():
        found = evaluate(
            lm,
            build_task(task, rows, settings, processes),
            limit=settings.limit,
            bootstrap_iters=1,  # for 0 not even the standard error of a mean is computed, which needs none
            log_samples=False,
            confirm_run_unsafe_code=task == "humaneval",
        )
    return _result(task, found, lm.truncated)


def _result(name: str, found: Mapping[str, Any], truncated: int) -> dict[str, Any]:
    """Metrics, their standard errors and the number of questions of a task, and of each subject where it has some."""
    results = found["results"]
    metrics, errors = _named(name, results[name])
    result: dict[str, Any] = {
        "metrics": metrics,
        "standard_errors": errors,
        "questions": sum(n["effective"] for n in found["n-samples"].values()),
        "truncated": truncated,
    }
    if len(results) > 1:
        result["subjects"] = {key: values["acc,none"] for key, values in sorted(results.items()) if key != name}
    return result


def _named(task: str, values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    metrics, errors = {}, {}
    for key, value in values.items():
        name, _, filtered = key.partition(",")
        if key in _METRICS:
            ours = f"{task}{_METRICS[key]}"
        elif re.fullmatch(r"pass@\d+", name):
            ours = f"{task}_{name}"
        else:
            continue
        metrics[ours] = float(value)
        error = values.get(f"{name}_stderr,{filtered}")
        if isinstance(error, float):
            errors[ours] = error
    return metrics, errors


class Progress:
    """A line on stderr every ten seconds."""

    def __init__(self, name: str, processes: Processes, every_seconds: float = 10.0) -> None:
        self.name = name
        self.every_seconds = every_seconds
        self.stream = sys.stderr if processes.rank == 0 else None
        self._next = time.monotonic() + every_seconds

    def __call__(self, done: int, total: int) -> None:
        if self.stream is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every_seconds
            print(f"{self.name}: batch {done}/{total}", file=self.stream, flush=True)


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Leaves out the harness's progress bars, which end before the model begins, and its remarks on its own tasks."""
    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, harness_task.tqdm
    logger.setLevel(logging.ERROR)
    harness_task.tqdm = lambda items, **settings: items
    try:
        yield
    finally:
        logger.setLevel(level)
        harness_task.tqdm = bar
