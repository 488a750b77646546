"""``lapbench data smoltalk|mmlu-auxiliary|gsm8k|arc``: rows of local files to conversation JSONL, one object a line."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from lapbench.datamodules.conversations import check_messages
from lapbench.datamodules.convert.chat_schemas import SCHEMAS, Schema, gsm8k_plain
from lapbench.datamodules.convert.command import Command, add_texts
from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.convert.rows import Row, count_rows, find_files, read_rows
from lapbench.errors import UserError


class Converted(NamedTuple):
    """What was written: conversations, bytes, and the rows left out (``file, row: reason`` each)."""

    dataset: str
    conversations: int
    bytes: int
    invalid: list[str]


def convert_chat(
    name: str,
    schema: Schema,
    files: Sequence[Path],
    out: Path,
    *,
    skip_invalid: bool = False,
    progress: bool = False,
) -> Converted:
    """Write the conversations of ``files`` to the new file ``out``, which appears when it is whole.

    Args:
        name: The data set's name, written to each line as ``source``.
        schema: What a row of the data set means.
        files: Parquet and JSONL files.
        out: A new file.
        skip_invalid: Leave out rows that make no conversation, instead of stopping at the first.
        progress: Show a bar on stderr.

    Raises:
        UserError: ``out`` exists or cannot be written, a file cannot be read, a row is invalid, or no row is valid.
    """
    if out.exists():
        raise UserError(f"--out {out} exists already: choose another file, or delete that one")
    total = sum(count_rows(path, schema.columns, schema.wrapper) for path in files)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream, Bar(name, total, progress, unit="rows") as bar:
                rows = (row for path in files for row in read_rows(path, schema.columns, schema.wrapper))
                conversations, invalid = _write(stream, name, schema, _counted(rows, bar), skip_invalid)
                size = stream.tell()
                stream.flush()
                os.fsync(stream.fileno())
            if not conversations:
                reason = f"the first: {invalid[0]}" if invalid else "they have no rows"
                raise UserError(f"no conversation in {', '.join(map(str, files))}: {reason}")
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)  # there only if the lines above failed
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return Converted(name, conversations, size, invalid)


def _write(
    stream: IO[bytes], name: str, schema: Schema, rows: Iterator[Row], skip_invalid: bool
) -> tuple[int, list[str]]:
    """Write a line for each row; returns their number and the invalid rows."""
    conversations, invalid = 0, []
    for place, row in rows:
        try:
            messages = check_messages(_messages(schema, row, place), place)
        except UserError as error:
            if not skip_invalid:
                raise UserError(f"{error} (--skip-invalid leaves such rows out)") from error
            invalid.append(str(error))
            continue
        stream.write(json.dumps({"messages": messages, "source": name}).encode() + b"\n")
        conversations += 1
    return conversations, invalid


def _messages(schema: Schema, row: dict[str, Any], place: str) -> Any:
    try:
        return schema.messages(row)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _counted(rows: Iterator[Row], bar: Bar) -> Iterator[Row]:
    for row in rows:
        bar.advance(1)
        yield row


def _configure(name: str, parser: argparse.ArgumentParser) -> None:
    schema = SCHEMAS[name]
    add_texts(parser, ".parquet or .jsonl files, or one folder with SPLIT-*.parquet")
    parser.add_argument(
        "--split", metavar="NAME", help=f"the split whose files to read in a folder (default: {schema.split})"
    )
    if name == "gsm8k":
        parser.add_argument(
            "--calculations",
            choices=("tool", "remove"),
            default="tool",
            help="what becomes of <<48/2=24>>: a call of the Python tool and its output, or nothing (default: tool)",
        )
    parser.add_argument(
        "--skip-invalid",
        action="store_true",
        help="leave out rows that make no conversation and count them; without this the first one stops the conversion",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file to write, NAME.jsonl by custom"
    )


def _run(name: str, arguments: argparse.Namespace) -> tuple[Converted, bool]:
    schema = SCHEMAS[name]
    files = find_files(arguments.source, arguments.split, schema.split)
    if name == "gsm8k" and arguments.calculations == "remove":
        schema = schema._replace(messages=gsm8k_plain)
    converted = convert_chat(name, schema, files, arguments.out, skip_invalid=arguments.skip_invalid, progress=True)
    return converted, False


COMMANDS = {
    name: Command(f"{schema.title}, to JSONL", schema.description, partial(_configure, name), partial(_run, name))
    for name, schema in SCHEMAS.items()
}
