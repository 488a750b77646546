"""Checkpoints that are either the old or the new one, never half of the new one."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lapbench.errors import UserError
from lapbench.results.files import write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames.

    Lightning writes to the system's temporary folder and moves: between two file systems that is a copy, which a kill
    or a full disk cuts short after the previous checkpoint is gone.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves; on failure what ``path`` held before is intact.

        Raises:
            UserError: The disk is full, the folder is read-only, ...
        """
        # Through memory, as Lightning does: torch.save itself hides why a write failed.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomically(Path(path), content.getbuffer())

    def load_checkpoint(self, path: str | Path, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """Loads.

        Raises:
            UserError: It is no checkpoint, or damaged.
        """
        try:
            checkpoint: dict[str, Any] = super().load_checkpoint(path, *arguments, **settings)
        except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
            # torch's page on how to load untrusted pickles all the same is no advice here.
            unsafe = isinstance(error, pickle.UnpicklingError)
            reason = "it holds more than plain tensors" if unsafe else str(error).strip().partition("\n")[0][:100]
            raise UserError(f"checkpoint {path}: not one, or damaged ({reason})") from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise UserError(
                f"checkpoint {path}: expected one that `lapbench fit` wrote, with a state_dict "
                "(weights of other origin go into model.backbone.weights)"
            )
        return checkpoint
