"""FineWeb-Edu, or any text in parquet files with a ``text`` column (JSONL and plain text files work as well), encoded
with a tokenizer made by ``lapbench data tokenizer``. Documents keep the order of the sorted files. The last file is for
validation, as in nanochat; with --val-documents it is no more than its first documents.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lapbench.datamodules.convert import text_files
from lapbench.datamodules.convert.command import Command, add_out, add_texts, positive
from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.convert.token_shards import SHARD_TOKENS, TokenShardWriter
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

DATASET = "fineweb-edu"
BATCH = 1024  # documents that are encoded at once, on all processors


class _Stretch(NamedTuple):
    """Documents ``first`` to ``last`` (exclusive; None for the end) of a file, which go to ``split``."""

    split: str
    path: Path
    first: int = 0
    last: int | None = None


def convert(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    val_documents: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = False,
) -> tuple[TokenManifest, bool]:
    """Write the documents of ``files`` to ``out`` as token shards; go on with an unfinished conversion.

    Args:
        files: Parquet, JSONL or text files; the last one is for validation.
        tokenizer: What encodes them.
        out: A new or empty folder, or that of an earlier conversion of the same files and settings.
        val_documents: How many documents of the last file are for validation; None for all.
        shard_tokens: A shard is closed by the document with which it has this many tokens.
        progress: Show bars and notices on stderr.

    Returns:
        The manifest, and whether it was there already.

    Raises:
        UserError: a split without documents, a damaged file, or a folder that holds something else.
    """
    if len(files) < 2 and val_documents is None:
        raise UserError(
            "there is one file, and the last one is for validation: give more files, or tell with --val-documents how "
            "many of its documents are for validation"
        )
    settings = {"texts_sha256": text_files.checksum(files), "val_documents": val_documents}
    origin = f"{files[0]} to {files[-1]}" if len(files) > 1 else str(files[0])
    counts = [text_files.count(path) for path in files]
    total = None if None in counts else sum(count or 0 for count in counts)
    seen: Counter[str] = Counter()
    with (
        TokenShardWriter(
            out, DATASET, tokenizer, shard_tokens=shard_tokens, settings=settings, origin=origin, progress=progress
        ) as writer,
        Bar(DATASET, total, progress and not writer.finished, unit="documents") as bar,
    ):
        begun, tokens = time.monotonic(), 0
        for stretch in _stretches(files, val_documents) if not writer.finished else ():
            for texts, passed in _batches(stretch, writer):
                for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
                    writer.add(stretch.split, [tokenizer.bos, *ids], len(text.encode()))
                    tokens += len(ids) + 1
                seen[stretch.split] += len(texts) + passed
                bar.advance(len(texts) + passed)
                bar.note(f"{tokens / (time.monotonic() - begun):,.0f} tokens/s")
        for split in ("train", "val") if not writer.finished else ():
            if not seen[split]:
                raise UserError(f"{origin}: no documents are left for {split} (--val-documents {val_documents})")
        return writer.close(), writer.finished


def _stretches(files: Sequence[Path], val_documents: int | None) -> list[_Stretch]:
    train = [_Stretch("train", path) for path in files[:-1]]
    if val_documents is None:
        return [*train, _Stretch("val", files[-1])]
    return [*train, _Stretch("train", files[-1], val_documents), _Stretch("val", files[-1], 0, val_documents)]


def _batches(stretch: _Stretch, writer: TokenShardWriter) -> Iterator[tuple[list[str], int]]:
    """Texts to encode, and how many documents before them are written already; those are not even read."""
    position = 0
    for part in text_files.parts(stretch.path):
        low = max(stretch.first - position, 0)
        high = part.documents if stretch.last is None else min(stretch.last - position, part.documents)
        position += part.documents
        if low >= high:
            continue
        passed = writer.pass_over(stretch.split, high - low)
        texts = part.read()[low + passed : high] if passed < high - low else []
        yield texts[:BATCH], passed
        for start in range(BATCH, len(texts), BATCH):
            yield texts[start : start + BATCH], 0


def _configure(parser: argparse.ArgumentParser) -> None:
    add_texts(parser, "parquet files (or .jsonl, .txt); the last one, sorted by path, is for validation")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="a tokenizer.json")
    add_out(parser)
    parser.add_argument(
        "--val-documents",
        type=positive,
        metavar="N",
        help="only the first N documents of the last file are for validation, the other ones for training",
    )
    parser.add_argument(
        "--shard-tokens",
        type=positive,
        default=SHARD_TOKENS,
        metavar="N",
        help="tokens in each shard, up to the end of a document (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> tuple[TokenManifest, bool]:
    return convert(
        text_files.find(arguments.source),
        Tokenizer.load(arguments.tokenizer),
        arguments.out,
        val_documents=arguments.val_documents,
        shard_tokens=arguments.shard_tokens,
        progress=True,
    )


COMMAND = Command("FineWeb-Edu or any text, from parquet files, as token shards", __doc__ or "", _configure, _run)
