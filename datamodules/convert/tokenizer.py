"""A byte-level BPE tokenizer, trained on text.

Texts are split by the pattern that nanochat uses (``nanochat/tokenizer.py``): GPT-4's, but for numbers, of which at
most two digits make a piece. The special tokens take the last numbers of the vocabulary, as they do there.
"""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from lapbench.datamodules.manifest import MODE
from lapbench.datamodules.tokenizer import SPECIAL, Tokenizer
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SMALLEST = 256 + len(SPECIAL)


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
