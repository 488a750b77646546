"""From a source of samples to a folder of shards: resumable at any moment, and equal bytes however often it was killed.

A shard appears under its name when it is whole, then gets its line in the journal; offsets and then the manifest are
written last and make the folder a data set. A second run keeps the shards whose size and checksum agree with the
journal.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lapbench.datamodules.convert.formats import image_extension
from lapbench.datamodules.convert.journal import JOURNAL, Entry, Journal, must_agree
from lapbench.datamodules.convert.progress import Bar, notice, waiting
from lapbench.datamodules.convert.scan import scan
from lapbench.datamodules.convert.writer import ShardWriter, file_sha256
from lapbench.datamodules.manifest import MANIFEST, Manifest, Shard
from lapbench.datamodules.offsets import save_indexed
from lapbench.errors import UserError

DAMAGED = "damaged"


@dataclass(frozen=True)
class Sample:
    """One image as the source has it: its index there, its bytes, its class, and its place for messages."""

    index: int
    image: bytes
    label: int
    place: str


class Source(Protocol):
    """What a converter reads from."""

    @property
    def dataset(self) -> str:
        """The data set's name."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by index."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples in each split, damaged ones included."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON values that together decide every byte: the source's checksum, the split, the order."""

    @property
    def origin(self) -> str:
        """Where the source was found; informative only, the same source may move."""

    def samples(self, split: str, start: int) -> Iterator[Sample]:
        """The samples of ``split`` in the order to write them, from position ``start`` on."""


def convert(
    source: Source, out: Path, *, shard_size: int, skip_damaged: bool = False, progress: bool = False
) -> tuple[Manifest, bool]:
    """Write ``source`` to ``out`` in shards of ``shard_size`` samples; go on with an unfinished conversion.

    Args:
        source: the samples.
        out: a new or empty folder, or the folder of an earlier conversion of the same source and settings. Processes
            that convert into the same folder take turns, and the later ones find the work done.
        shard_size: samples in each shard but a split's last.
        skip_damaged: leave damaged images out and list them in the manifest, instead of stopping at the first.
        progress: show bars and notices on stderr.

    Returns:
        The manifest, and whether it was there already.

    Raises:
        UserError: the folder holds something else, cannot be written, or an image is damaged.
    """
    settings = {**source.settings, "shard_size": shard_size}
    if (manifest := _finished(source.dataset, settings, out)) and not (out / JOURNAL).exists():
        return manifest, True
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {out}: {error.strerror}") from error
    with Journal(out, Entry.load, lambda: waiting(out, progress)) as journal:
        if manifest := _finished(source.dataset, settings, out):
            journal.remove()  # the earlier run was killed between its last two steps
            return manifest, True
        journal.begin(source.dataset, settings)
        rows = _check_finished_shards(journal, skip_damaged, progress)
        late = [
            d
            for split in source.sizes
            for d in _write_split(source, split, journal, rows, shard_size, skip_damaged, progress)
        ]
        splits: dict[str, tuple[Shard, ...]] = {
            split: tuple(entry.shard for entry in journal.entries if entry.split == split) for split in source.sizes
        }
        damaged = [place for entry in journal.entries for place in entry.damaged] + late
        noted = {DAMAGED: damaged} if damaged else {}
        manifest = Manifest(source.dataset, source.classes, splits, {"origin": source.origin, **settings, **noted})
        manifest = save_indexed(
            out,
            manifest,
            {split: b"".join(rows[shard.file] for shard in shards) for split, shards in splits.items()},
        )
        journal.remove()
    return manifest, False


def _finished(dataset: str, settings: Mapping[str, Any], out: Path) -> Manifest | None:
    """The manifest of ``out`` if it is there; UserError if it is of something else or lacks a shard."""
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.load(out)
    made = {name: manifest.source.get(name) for name in settings}
    must_agree(f"{out} holds", manifest.dataset, made, dataset, settings)
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        path = out / shard.file
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise UserError(
                f"{path} is missing or not of the {shard.bytes} bytes in the manifest: delete {out} and convert again"
            )
    return manifest


def _check_finished_shards(journal: Journal[Entry], skip_damaged: bool, progress: bool) -> dict[str, bytes]:
    """Keep the shards that are as the journal says, up to the first that is not; returns the rows of those kept."""
    folder = journal.path.parent
    rows: dict[str, bytes] = {}
    if not journal.entries:
        return rows
    with Bar("checking", sum(entry.shard.samples for entry in journal.entries), progress) as bar:
        for number, entry in enumerate(journal.entries):
            path = folder / entry.shard.file
            if entry.damaged and not skip_damaged:
                raise _damaged(entry.damaged[0])
            if not (
                path.is_file() and path.stat().st_size == entry.shard.bytes and file_sha256(path) == entry.shard.sha256
            ):
                notice(f"{path} is not as it was written: writing it again", progress)
                journal.keep(number)
                break
            rows[entry.shard.file] = scan(path).rows
            bar.advance(entry.shard.samples)
    return rows


def _write_split(
    source: Source,
    split: str,
    journal: Journal[Entry],
    rows: dict[str, bytes],
    shard_size: int,
    skip_damaged: bool,
    progress: bool,
) -> list[str]:
    """Write what is missing of ``split`` and add its shards' rows; returns the damaged images after its last shard."""
    done = [entry for entry in journal.entries if entry.split == split]
    position, total = done[-1].position if done else 0, source.sizes[split]
    damaged: list[str] = []
    with (
        Bar(f"{source.dataset} {split}", total, progress, start=position) as bar,
        closing(_generator(source, split, position)) as samples,
    ):
        while position < total:
            path = journal.path.parent / f"{split}-{len(done):06d}.tar"
            with ShardWriter(path) as shard:
                for sample in samples:
                    position += 1
                    bar.advance(1)
                    extension = image_extension(sample.image)
                    if extension is None:
                        damaged.append(sample.place)
                        if not skip_damaged:
                            raise _damaged(sample.place)
                        continue
                    # The index in the source, not the position here: a sample can be traced whatever the order.
                    shard.add(f"{sample.index:09d}", extension, sample.image, sample.label)
                    if shard.samples == shard_size:
                        break
                else:
                    if position != total:
                        raise UserError(
                            f"{source.origin}: {split} ended after {position} of {total} images: did it change?"
                        )
                if shard.samples:
                    done.append(Entry(split, shard.finish(), position, damaged))
                    rows[path.name] = bytes(shard.rows)
                    journal.add(done[-1])
                    damaged = []
    if not done:
        raise UserError(f"{source.origin}: no readable image in {split} ({total} looked at)")
    return damaged


def _generator(source: Source, split: str, start: int) -> Generator[Sample, None, None]:
    yield from source.samples(split, start)


def _damaged(place: str) -> UserError:
    return UserError(
        f"{place} is empty or no JPEG, PNG or WebP image: repair it, or leave such images out with --skip-damaged"
    )
