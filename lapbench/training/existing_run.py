"""A run that is there already, as arguments of ``CLI``: the same model and data, on what this machine has."""

import json
from pathlib import Path
from typing import Any

from lapbench.config_files import load_yaml
from lapbench.errors import UserError
from lapbench.training.run_folder import CONFIG

# One process and no callbacks, unless arguments after these say otherwise.
HERE = (
    *("--trainer.accelerator", "auto", "--trainer.devices", "1", "--trainer.num_nodes", "1"),
    *("--trainer.strategy", "auto", "--trainer.callbacks", "null"),
)
# The weights are all in the checkpoint: what the backbone started from need not be there any more.
_NOT_AGAIN = {"weights": None, "pretrained": False, "compile": False}


def run_arguments(run: Path) -> list[str]:
    """The configuration of the run in the folder ``run``, its backbone without the weights that it started from.

    Raises:
        UserError: The folder holds no run.
    """
    file = run / CONFIG
    if not file.is_file():
        raise UserError(f"{run}: expected the folder of a run, it has no {CONFIG}")
    backbone: dict[str, Any] = load_yaml(file)["model"]["init_args"]["backbone"]
    changes = {key: value for key, value in _NOT_AGAIN.items() if key in backbone}
    return ["--config", str(file), "--run.dir", str(run), *HERE, "--model.backbone", json.dumps(changes)]
