"""The folder of a run: taken by one process, resumed when unfinished, never mixed with another run's."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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
_SHARED = (
    "run.dir: expected a folder for all processes of the run, as they are not started by lapbench (torchrun, srun)"
)
# What may differ when a run is resumed: nothing that its results depend on. Whether the number of workers does is for
# the data's own layout to say.
_MAY_DIFFER = re.compile(
    r"run\.(dir|save_every_n_steps)|trainer\.enable_(progress_bar|model_summary)"
    r"|data\.init_args\.(num_workers|pin_memory|persistent_workers)"
)
# What --allow_layout_change lets differ: which samples come in which order.
_LAYOUT = re.compile(
    r"seed_everything|trainer\.(accelerator|devices|num_nodes|strategy|accumulate_grad_batches)|data\..*"
)


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
        changes: Settings that are others than the run was started with, where that was asked for: before and after.
        notes: What the record is to say of how the run went.
        lock: The open lock file; held as long as the process lives.
    """

    path: Path | None
    settings: RunSettings
    previous: Record | None = None
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    lock: IO[str] | None = None

    @classmethod
    def take(cls, settings: RunSettings, label: str, config: str, allow_layout_change: bool = False) -> "RunFolder":
        """Makes or takes over the folder of a run to train, and writes its config.yaml.

        Args:
            settings: Its ``dir`` is the folder; without one, ``runs/<label>-<time>`` is made.
            label: Name of a new folder.
            config: The resolved configuration, as YAML.
            allow_layout_change: Whether an unfinished run goes on although settings of its data's layout differ.

        Raises:
            UserError: It cannot be written, another process works in it, or it holds a run of another configuration.
        """
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return cls._of_another_process(settings)
        if settings.dir is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(_SHARED)
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
                folder.notes = dict(folder.previous.notes)
            folder._keep_config(config, allow_layout_change and not folder.finished)
        except UserError:
            folder.release()
            raise
        return folder

    @classmethod
    def _of_another_process(cls, settings: RunSettings) -> "RunFolder":
        """The folder that the run's first process takes, for the others: they read in it only."""
        name = settings.dir or os.environ.get(_RUN_DIR_VARIABLE)
        if name is None:
            raise UserError(_SHARED)
        path = Path(name)
        return cls(path, settings, read_record(path) if (path / FILE_NAME).exists() else None)

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

    def _keep_config(self, config: str, allow_layout_change: bool) -> None:
        assert self.path is not None
        file = self.path / CONFIG
        if self.previous is not None or self.last_checkpoint is not None:
            if not file.is_file():
                raise UserError(f"run.dir {self.path} holds a run without its {CONFIG}; give another --run.dir")
            self.changes = _differences(load_yaml(file), yaml.safe_load(config))
            _refuse(self.changes, self.path, allow_layout_change)
            if not self.changes:
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


def _differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The settings that matter to a run's results and differ: before and after, by key."""
    before, after = dict(_flatten(old)), dict(_flatten(new))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _MAY_DIFFER.fullmatch(key)
    }


def _refuse(changes: dict[str, tuple[Any, Any]], folder: Path, allow_layout_change: bool) -> None:
    layout = [key for key in changes if _LAYOUT.fullmatch(key)]
    wrong = [key for key in changes if not (allow_layout_change and key in layout)]
    if not wrong:
        return
    key, *others = wrong
    old, new = changes[key]
    more = f" (and {len(others)} more: {', '.join(others[:3])})" if others else ""
    hint = "; --allow_layout_change accepts it, at the cost of exactness" if len(layout) == len(changes) else ""
    raise UserError(
        f"run.dir {folder} holds a run with {key} = {old!r}, this one has {new!r}{more}; give another --run.dir{hint}"
    )


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
