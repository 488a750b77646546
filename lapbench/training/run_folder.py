"""The folder of a run: taken by one process, resumed when unfinished, never mixed with another run's."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lapbench.config_files import load_yaml
from lapbench.errors import UserError
from lapbench.process import lock_folder
from lapbench.results.files import write_atomically
from lapbench.results.record import FILE_NAME, Record, read_record
from lapbench.training.settings import RunSettings

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
# Other ranks of the same run inherit it: they must not make folders of their own.
_RUN_DIR_VARIABLE = "LAPBENCH_RUN_DIR"
# What may differ when a run is resumed: nothing that its results depend on.
_MAY_DIFFER = ("run.dir", "trainer.enable_progress_bar", "trainer.enable_model_summary")


def schedule_name(model: LightningModule) -> str:
    """The name of the head schedule of a task's backbone."""
    backbone: Any = model.backbone
    return str(backbone.schedule.name)


@dataclass
class RunFolder:
    """One run's folder.

    Attributes:
        path: The folder, or None when a command runs without one.
        settings: The run's settings.
        previous: The record that was there before, if any.
        lock: The open lock file; held as long as the process lives.
    """

    path: Path | None
    settings: RunSettings
    previous: Record | None = None
    lock: IO[str] | None = None

    @classmethod
    def take(cls, settings: RunSettings, label: str, config: str) -> "RunFolder":
        """Makes or takes over the folder of a run to train, and writes its config.yaml.

        Args:
            settings: Its ``dir`` is the folder; without one, ``runs/<label>-<time>`` is made.
            label: Name of a new folder.
            config: The resolved configuration, as YAML.

        Raises:
            UserError: It cannot be written, another process works in it, or it holds a run of another configuration.
        """
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            path = Path(os.environ[_RUN_DIR_VARIABLE])
            # As the first process has read it, which writes to it only when all are connected.
            return cls(path, settings, read_record(path) if (path / FILE_NAME).exists() else None)
        try:
            path = Path(settings.dir) if settings.dir is not None else _new_folder(Path("runs") / label)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.dir {settings.dir or 'runs'}: cannot make this folder ({error.strerror})") from error
        os.environ[_RUN_DIR_VARIABLE] = str(path)
        folder = cls(path, settings, lock=lock_folder(path, "another `lapbench fit`"))
        try:
            if (path / FILE_NAME).exists():
                folder.previous = read_record(path)
            folder._keep_config(config)
        except UserError:
            folder.release()
            raise
        return folder

    @classmethod
    def existing(cls, settings: RunSettings) -> "RunFolder":
        """The folder of a run to score, or none if ``run.dir`` is null."""
        if settings.dir is None:
            return cls(None, settings)
        path = Path(settings.dir)
        if not path.is_dir():
            raise UserError(f"run.dir: expected the folder of a run, {path} is none")
        return cls(path, settings, read_record(path) if (path / FILE_NAME).exists() else None)

    @property
    def finished(self) -> bool:
        """Whether the run that is there has finished."""
        return self.previous is not None and self.previous.status == "finished"

    @property
    def trained(self) -> bool:
        """Whether the run that is there has been trained and tested: its record says which checkpoint counts."""
        return self.previous is not None and self.previous.checkpoint is not None

    @property
    def evaluated_checkpoint(self) -> str:
        """The checkpoint that evaluations after training use: the declared one, "last" where none is tested."""
        return "best" if self.settings.test == "best" else "last"

    @property
    def last_checkpoint(self) -> Path | None:
        """What an unfinished run resumes from, if it came that far."""
        last = self.checkpoint_file("last")
        return last if last.is_file() else None

    def checkpoint_file(self, name: str) -> Path:
        """The file of the checkpoint "last", "best" or "nonfinite"."""
        assert self.path is not None
        return self.path / CHECKPOINTS / f"{name}.ckpt"

    def checkpoint_to_score(self, name: str | None) -> Path | None:
        """The checkpoint that ``--ckpt_path`` asks for; None scores the model as it is built.

        Raises:
            UserError: No such file, or "last"/"best" without ``run.dir``.
        """
        if name is None and self.path is None:
            return None
        name = name or self.evaluated_checkpoint
        if name in ("last", "best"):
            if self.path is None:
                raise UserError(f"--ckpt_path {name}: needs the run's folder, --run.dir")
            file = self.checkpoint_file(name)
        else:
            file = Path(name)
        if not file.is_file():
            raise UserError(f"checkpoint {file}: no such file")
        return file

    def logger(self) -> TensorBoardLogger:
        """TensorBoard events below the folder."""
        assert self.path is not None
        return TensorBoardLogger(self.path, name="", version="tensorboard", default_hp_metric=False)

    def release(self) -> None:
        """Lets other processes work in the folder."""
        if self.lock is not None:
            self.lock.close()

    def _keep_config(self, config: str) -> None:
        assert self.path is not None
        file = self.path / CONFIG
        if self.previous is not None or self.last_checkpoint is not None:
            if not file.is_file():
                raise UserError(f"run.dir {self.path} holds a run without its {CONFIG}; give another --run.dir")
            _check_same(load_yaml(file), yaml.safe_load(config), self.path)
            return
        write_atomically(file, config)


def _new_folder(stem: Path) -> Path:
    """A folder that this call made, so that two runs started in the same second get two."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    base = f"{stem.name}-{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = stem.parent / f"{base}{suffix}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise UserError(f"{stem.parent}: a thousand runs started in this second; give --run.dir")


def _check_same(old: Any, new: Any, folder: Path) -> None:
    before, after = dict(_flatten(old)), dict(_flatten(new))
    differing = [
        key
        for key in sorted(before.keys() | after.keys())
        if key not in _MAY_DIFFER and before.get(key) != after.get(key)
    ]
    if differing:
        key = differing[0]
        more = f" (and {len(differing) - 1} more: {', '.join(differing[1:4])})" if len(differing) > 1 else ""
        raise UserError(
            f"run.dir {folder} holds a run with {key} = {before.get(key)!r}, this one has {after.get(key)!r}{more}; "
            "give another --run.dir"
        )


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
