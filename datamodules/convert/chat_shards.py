"""Conversation JSONL to token shards in which the assistant's tokens are marked: made once, read by `chat.Chat`.

The folder's name tells the content of the file and of the tokenizer: another file or tokenizer makes another folder.
"""

import hashlib
import re
from itertools import islice
from pathlib import Path

from lapbench.datamodules.conversations import Message, letter_tokens, read_conversations, render
from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.convert.token_shards import SHARD_TOKENS, TokenShardWriter
from lapbench.datamodules.convert.writer import file_sha256
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

SPLIT = "conversations"
RENDERING = 1  # raise it when `conversations.render` makes other tokens of the same conversation
_BATCH = 1000  # conversations that are encoded together


def folder_name(source: Path, sha256: str, tokenizer: Tokenizer) -> str:
    """The name of the folder for the shards of ``source``, a file of SHA-256 ``sha256`` (hex)."""
    key = hashlib.sha256(f"{sha256} {tokenizer.sha256} {RENDERING}".encode()).hexdigest()[:16]
    return f"{_stem(source)}-{key}"


def render_file(
    source: Path,
    sha256: str,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = False,
) -> TokenManifest:
    """Write the conversations of ``source`` to ``folder``, a document each; finished folders are left alone.

    Args:
        source: Conversation JSONL.
        sha256: Its SHA-256 (hex), by which an interrupted conversion knows that the file is still the same.
        tokenizer: The tokenizer.
        folder: A folder of its own. Processes that write into it take turns, and the later ones find the work done.
        shard_tokens: See `TokenShardWriter`.
        progress: Show a bar on stderr.

    Raises:
        UserError: a line is no conversation, the file has none, or the folder cannot be written.
    """
    letter_tokens(tokenizer)  # answers to multiple-choice questions are one letter, scored as one prediction
    with TokenShardWriter(
        folder,
        _stem(source),
        tokenizer,
        shard_tokens=shard_tokens,
        loss=True,
        settings={"source_sha256": sha256, "rendering": RENDERING},
        origin=str(source.resolve()),
        progress=progress,
    ) as writer:
        if not writer.finished:
            conversations = read_conversations(source)
            with Bar(source.name, _lines(source) if progress else 0, progress, unit="conversations") as bar:
                while batch := list(islice(conversations, _BATCH)):
                    _add(writer, batch, tokenizer)
                    bar.advance(len(batch))
        return writer.close()


def source_sha256(source: Path) -> str:
    """The SHA-256 (hex) of a file of conversations. UserError: it cannot be read."""
    try:
        return file_sha256(source)
    except OSError as error:
        raise UserError(f"cannot read the conversations {source}: {error.strerror}") from error


def _add(writer: TokenShardWriter, batch: list[list[Message]], tokenizer: Tokenizer) -> None:
    passed = writer.pass_over(SPLIT, len(batch))
    for tokens, loss, text_bytes in render(batch[passed:], tokenizer):
        writer.add(SPLIT, tokens, text_bytes, loss)


def _lines(source: Path) -> int:
    with source.open("rb") as lines:
        return sum(1 for _ in lines)


def _stem(source: Path) -> str:
    """The file's name as that of a data set."""
    return re.sub(r"[^A-Za-z0-9_]", "_", source.stem)
