"""A trained run whose evaluations are still to do."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that tests and configs import from here


def _spec(class_path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A callback as config.yaml has it, with all its settings."""
    module, _, short = class_path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), short)).parameters
    return {"class_path": class_path, "init_args": {key: p.default for key, p in parameters.items()} | settings}


@pytest.fixture
def with_evaluations() -> Callable[..., Path]:
    """Makes a finished run one that was trained with evaluations in its config and lacks them.

    ``with_evaluations(run, ("fakes.Fails", {"rank": 1}), devices=2)``: class paths with settings, and trainer settings.
    """

    def change(run: Path, *evaluations: tuple[str, dict[str, Any]], **trainer: Any) -> Path:
        file = run / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["trainer"] |= {"callbacks": [_spec(*evaluation) for evaluation in evaluations], **trainer}
        file.write_text(yaml.safe_dump(config))
        return run

    return change


@pytest.fixture
def again(lapbench: Callable[..., Any]) -> Callable[[Path], Any]:
    """Starts ``lapbench fit`` on a run once more."""
    return lambda run: lapbench("fit", "--config", run / "config.yaml", "--run.dir", run)
