"""Settings of a run that are neither the model's, the data's nor the trainer's."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class RunSettings:
    """Where a run lives and which of its checkpoints counts.

    Args:
        dir: Folder of the run: config.yaml, record.json, checkpoints/, tensorboard/. A folder that holds an unfinished
            run of the same configuration is resumed. null makes a new folder below runs/.
        test: Checkpoint that is tested after training and stands in tables: "last", "best" (by ``monitor``), or "none".
        monitor: Metric that chooses the best checkpoint.
        monitor_mode: Whether the best one is the "max" or "min".
        save_every_n_steps: Optimizer steps between checkpoints within an epoch; null writes one at each epoch's end
            only. SIGTERM and SIGUSR1 write one at the next step in any case.
    """

    dir: str | None = None
    test: Literal["last", "best", "none"] = "last"
    monitor: str = "val/top1"
    monitor_mode: Literal["max", "min"] = "max"
    save_every_n_steps: int | None = None
