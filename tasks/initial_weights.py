"""Starting from another run's weights: which checkpoint a run stands for."""

from pathlib import Path

from lapbench.errors import UserError
from lapbench.results.record import FILE_NAME, read_record


def checkpoint_of(source: str) -> Path:
    """The checkpoint that ``source`` names.

    Args:
        source: A checkpoint, or the folder of a finished run: the checkpoint that its record declares, the last one if
            it declares none.

    Raises:
        UserError: No such file or run, or one that has not finished.
    """
    path = Path(source)
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"init_from: expected the folder of a run or a checkpoint, {path} is neither")
        return path
    if not (path / FILE_NAME).is_file():
        raise UserError(f"init_from: expected the folder of a run, {path} has no {FILE_NAME}")
    record = read_record(path)
    if record.status != "finished":
        raise UserError(f"init_from: expected a finished run, the one in {path} is {record.status}")
    file = path / "checkpoints" / f"{(record.checkpoint or 'last').split()[0]}.ckpt"
    if not file.is_file():
        raise UserError(f"init_from: the run in {path} has no checkpoint {file.name}")
    return file
