"""Train a byte-level BPE tokenizer on text, for example on some of the parquet files of FineWeb-Edu.

Texts are split by the pattern that nanochat uses (``nanochat/tokenizer.py``): GPT-4's, but for numbers, of which at
most two digits make a piece. The special tokens take the last numbers of the vocabulary, as they do there.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from lapbench.datamodules.convert import text_files
from lapbench.datamodules.convert.command import Command, add_texts, positive
from lapbench.datamodules.manifest import MODE
from lapbench.datamodules.tokenizer import SPECIAL, Tokenizer
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SMALLEST = 256 + len(SPECIAL)
_MEASURED = 1 << 20  # characters at the beginning of the texts of which the bytes per token are measured


class Trained(NamedTuple):
    """A new tokenizer: how much text it was trained on, and the bytes of text per token on the first of it."""

    tokenizer: Tokenizer
    documents: int
    characters: int
    bytes_per_token: float


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: Path, progress: bool = False) -> Tokenizer:
    """Train a tokenizer and write it to the file ``out``; equal texts make equal files.

    Args:
        texts: What to train on, gone through once.
        vocab_size: Number of tokens: 256 bytes, the merges, and the special tokens.
        out: The file, ``tokenizer.json`` by custom.
        progress: Show the library's bars on stderr.

    Raises:
        UserError: a vocabulary too small, or larger than the texts allow; ``out`` cannot be written.
    """
    if vocab_size < SMALLEST:
        raise UserError(f"the vocabulary needs {SMALLEST} tokens (256 bytes, {len(SPECIAL)} special), got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted: a set's order differs between runs
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    if (got := tokenizer.get_vocab_size()) != vocab_size:
        raise UserError(f"the texts make a vocabulary of {got} tokens at most, asked for {vocab_size}: use more text")
    if Path(out).is_dir():
        raise UserError(
            f"cannot write the tokenizer to {out}: it is a folder, expected a file like {out}/tokenizer.json"
        )
    write_atomically(Path(out), tokenizer.to_str(pretty=True) + "\n", MODE)
    return Tokenizer.load(out)


class _Texts:
    """Hands texts on, up to ``limit`` characters, and keeps the first of them to measure the tokenizer on."""

    def __init__(self, texts: Iterable[str], limit: int | None) -> None:
        self.documents = self.characters = 0
        self.first: list[str] = []
        self._texts = texts
        self._limit = limit

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if self._limit is not None:
                text = text[: self._limit - self.characters]
            if self.characters < _MEASURED:
                self.first.append(text[: _MEASURED - self.characters])
            self.documents += 1
            self.characters += len(text)
            yield text
            if self.characters == self._limit:
                return


def _documents(source: list[str]) -> Iterable[str]:
    if source == ["pydocs"]:
        from lapbench.datamodules.convert import pydocs  # which trains tokenizers itself

        return pydocs.load()["train"]
    return (text for path in text_files.find(source) for text in text_files.documents(path))


def _configure(parser: argparse.ArgumentParser) -> None:
    add_texts(parser, ".parquet (column 'text'), .jsonl (entry 'text') or .txt files, or the word pydocs")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=65536,
        metavar="N",
        help="tokens, of which 256 are bytes and 9 are special (default: %(default)s)",
    )
    parser.add_argument("--max-chars", type=positive, metavar="N", help="train on the first N characters only")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file to write, tokenizer.json by custom"
    )


def _run(arguments: argparse.Namespace) -> tuple[Trained, bool]:
    if arguments.out.exists():
        raise UserError(f"--out {arguments.out} exists: data may have been made with it, so it is not replaced")
    texts = _Texts(_documents(arguments.source), arguments.max_chars)
    tokenizer = train_tokenizer(texts, arguments.vocab_size, arguments.out, progress=True)
    tokens = sum(map(len, tokenizer.encode_batch(texts.first)))
    size = sum(len(text.encode()) for text in texts.first)
    return Trained(tokenizer, texts.documents, texts.characters, size / max(tokens, 1)), False


COMMAND = Command("a byte-level BPE tokenizer, trained on text", __doc__ or "", _configure, _run)
