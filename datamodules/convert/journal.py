"""The journal of a conversion under way: its lock, its settings, and the shards that are finished.

One JSON object a line in ``.convert.journal``: first ``{"dataset", "settings"}``, then one entry for each shard,
written after the shard has its name. It is removed once the manifest is written.
"""

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lapbench.datamodules.convert.formats import shorten
from lapbench.datamodules.manifest import Shard
from lapbench.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JOURNAL = ".convert.journal"


@dataclass(frozen=True)
class Entry:
    """A finished shard of ``split``: the source position after it, and the damaged images skipped on the way."""

    split: str
    shard: Shard
    position: int
    damaged: list[str]

    @classmethod
    def load(cls, value: dict[str, Any]) -> "Entry":
        """The entry of which ``value`` was made by `asdict`."""
        return cls(**value | {"shard": Shard(**value["shard"])})


E = TypeVar("E", bound="DataclassInstance")


class Journal(Generic[E]):
    """Holds the folder's lock between ``with`` and its end; ``waiting()`` is called if another process has it.

    Args:
        folder: where the conversion writes.
        entry: makes an entry of what `asdict` made of it.
        waiting: called once before a wait.

    Attributes:
        header: the ``{"dataset", "settings"}`` that the conversion was begun with, None if it is new.
        entries: the finished shards, in the order they were written.
    """

    def __init__(self, folder: Path, entry: Callable[[dict[str, Any]], E], waiting: Callable[[], None]) -> None:
        self.path = folder / JOURNAL
        self.header: dict[str, Any] | None = None
        self.entries: list[E] = []
        self._entry = entry
        self._waiting = waiting

    def __enter__(self) -> "Journal[E]":
        try:
            with ExitStack() as undo:
                self._stream = undo.enter_context(self._locked())
                self._read()
                undo.pop_all()
        except OSError as error:
            raise self._failure(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def begin(self, dataset: str, settings: Mapping[str, Any]) -> None:
        """Write the first line, or see that the unfinished conversion is of the same data set and settings.

        Raises:
            UserError: it is not, or the folder holds something else.
        """
        folder = self.path.parent
        if self.header is not None:
            what = f"{folder} holds an unfinished conversion of"
            must_agree(what, self.header["dataset"], self.header["settings"], dataset, settings)
            for left_over in folder.glob(".*.tmp"):  # killed while the last files were being written
                left_over.unlink()
            return
        strangers = sorted(path.name for path in folder.iterdir() if path.name != JOURNAL)
        if strangers:
            self.remove()
            raise UserError(f"the folder {folder} is not empty ({strangers[0]}) and no conversion: choose a new --out")
        self.header = {"dataset": dataset, "settings": dict(settings)}
        self._append(self.header)

    def add(self, entry: E) -> None:
        """Record a finished shard."""
        self.entries.append(entry)
        self._append(asdict(entry))

    def keep(self, count: int) -> None:
        """Forget all but the first ``count`` entries: the shards after them are to be written again."""
        try:
            self._stream.truncate(self._ends[count])
            self._stream.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._failure(error) from error
        del self.entries[count:], self._ends[count + 1 :]

    def remove(self) -> None:
        """Delete the file; the lock is held until the ``with`` ends."""
        try:
            self.path.unlink()
        except OSError as error:
            raise self._failure(error) from error

    def _locked(self) -> Any:
        while True:
            stream = self.path.open("a+b", buffering=0)
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._waiting()
                fcntl.flock(stream, fcntl.LOCK_EX)
            # The one who had the lock may have finished and deleted the file: then this lock guards nothing.
            try:
                if os.path.samestat(os.stat(self.path), os.fstat(stream.fileno())):
                    return stream
            except FileNotFoundError:
                pass
            stream.close()

    def _read(self) -> None:
        self._stream.seek(0)
        content: bytes = self._stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._stream.truncate(len(whole))  # a line cut short by a kill
        self._ends: list[int] = []
        try:
            for number, line in enumerate(whole.splitlines(keepends=True)):
                value = json.loads(line)
                if number == 0:
                    self.header = {"dataset": value["dataset"], "settings": value["settings"]}
                else:
                    self.entries.append(self._entry(value))
                self._ends.append((self._ends[-1] if self._ends else 0) + len(line))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path} is damaged at line {number + 1}: delete {self.path.parent} and convert again"
            ) from error

    def _append(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            if self._stream.write(line) != len(line):
                raise OSError(0, "no space for a whole line")
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._failure(error) from error
        self._ends.append((self._ends[-1] if self._ends else 0) + len(line))

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror}")


def must_agree(what: str, dataset: str, made: Mapping[str, Any], asked: str, settings: Mapping[str, Any]) -> None:
    """UserError, beginning with ``what``, unless data set and settings are those asked for."""
    remedy = "choose another --out, or delete that folder"
    if dataset != asked:
        raise UserError(f"{what} the data set {dataset!r}, asked for {asked!r}: {remedy}")
    for name, value in settings.items():
        if made.get(name) != value:
            raise UserError(
                f"{what} {dataset} with {name} {shorten(made.get(name))}, now it is {shorten(value)}: {remedy}"
            )
