"""manifest.json of a data set of tokens: its tokenizer, and its shards with tokens, documents and bytes of text.

A shard is a plain tar file that is a WebDataset sample, its number in the split being the key:
``00000.tokens.npy`` (documents one after the other, each beginning with the token ``<|bos|>``),
``00000.documents.npy`` (int64, where each document begins) and, in data of which not every token is to be predicted,
``00000.loss.npy`` (uint8, 1 for a token that is).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lapbench.datamodules.manifest import MANIFEST, MODE, is_plain_name, is_sha256, read_content, short
from lapbench.datamodules.tokenizer import TOKENIZER, Tokenizer
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

FORMAT = "tokens-1"
DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}  # and how many tokens they can tell apart


@dataclass(frozen=True)
class TokenShard:
    """One tar file: its plain name, and what is in it.

    ``tokens`` counts one ``<|bos|>`` for each of the ``documents``; ``text_bytes`` is the length of their text in
    UTF-8; ``bytes`` and ``sha256`` (hex) are those of the file.
    """

    file: str
    tokens: int
    documents: int
    text_bytes: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenManifest:
    """The contents of one folder of token shards.

    ``tokenizer_sha256`` is that of the folder's ``tokenizer.json``; ``splits`` maps a split's name to its shards in
    reading order; with ``loss`` every shard says which of its tokens are to be predicted; ``source`` says freely where
    the data came from.
    """

    dataset: str
    tokenizer_sha256: str
    vocab_size: int
    splits: dict[str, tuple[TokenShard, ...]]
    loss: bool = False
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The type of the tokens in the shards: the smallest that holds the vocabulary."""
        return dtype_of(self.vocab_size)

    def split(self, name: str) -> tuple[TokenShard, ...]:
        """The shards of split ``name``; UserError naming the splits there are."""
        if name not in self.splits:
            raise UserError(f"data set {self.dataset!r} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    def tokens(self, split: str) -> int:
        """The number of tokens in ``split``."""
        return sum(shard.tokens for shard in self.split(split))

    @classmethod
    def load(cls, folder: Path) -> "TokenManifest":
        """Read and check ``folder/manifest.json``.

        Only the manifest is checked: whether the shards are there is for their reader to say.

        Raises:
            UserError: the folder or its manifest is missing or unreadable, or the manifest is malformed.
        """
        content, path = read_content(Path(folder), "make it with `lapbench data` (see `lapbench data --help`)")
        return _checked(content, path)

    def save(self, folder: Path) -> None:
        """Write ``folder/manifest.json`` atomically.

        Raises:
            UserError: the manifest would not load again, or the folder cannot be written.
        """
        path = Path(folder) / MANIFEST
        content = self.to_json()
        _checked(content, path)
        write_atomically(path, json.dumps(content, indent=1) + "\n", MODE)

    def load_tokenizer(self, folder: Path) -> Tokenizer:
        """The tokenizer beside the manifest.

        Raises:
            UserError: it is missing, damaged, or not the one that the shards were made with.
        """
        tokenizer = Tokenizer.load(Path(folder) / TOKENIZER)
        if tokenizer.vocab_size != self.vocab_size:
            raise UserError(
                f"{tokenizer.path} has {tokenizer.vocab_size} tokens, the shards of {Path(folder) / MANIFEST} were "
                f"made with {self.vocab_size}: put the tokenizer of the data set back"
            )
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise UserError(
                f"{tokenizer.path} is not the tokenizer of {Path(folder) / MANIFEST}, its SHA-256 differs: put the "
                "tokenizer of the data set back"
            )
        return tokenizer

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON-ready values, keys in the order of the file."""
        return {
            "format": FORMAT,
            "dataset": self.dataset,
            "source": self.source,
            "tokenizer": {"file": TOKENIZER, "sha256": self.tokenizer_sha256, "vocab_size": self.vocab_size},
            "dtype": self.dtype,
            "loss": self.loss,
            "splits": {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()},
        }


def dtype_of(vocab_size: int) -> str:
    """The smallest type of `DTYPES` that numbers ``vocab_size`` tokens."""
    return next(name for name, numbers in DTYPES.items() if vocab_size <= numbers)


def _checked(content: Any, path: Path) -> TokenManifest:
    """Turn decoded JSON into a manifest, or raise a UserError that names the offending entry."""

    def need(good: object, where: str, expected: str, got: Any) -> None:
        if not good:
            raise UserError(f"{path}: {where} must be {expected}, got {short(got)}")

    need(isinstance(content, dict), "the manifest", "an object", content)
    need(content.get("format") == FORMAT, "'format'", f"{FORMAT!r} (a data set of tokens)", content.get("format"))
    dataset, source, tokenizer = content.get("dataset"), content.get("source", {}), content.get("tokenizer")
    dtype, loss, splits = content.get("dtype"), content.get("loss"), content.get("splits")
    need(isinstance(dataset, str) and dataset, "'dataset'", "a name", dataset)
    need(isinstance(source, dict), "'source'", "an object", source)
    need(isinstance(tokenizer, dict), "'tokenizer'", "an object", tokenizer)
    need(tokenizer.get("file") == TOKENIZER, "'file' of the tokenizer", repr(TOKENIZER), tokenizer.get("file"))
    sha256, vocab_size = tokenizer.get("sha256"), tokenizer.get("vocab_size")
    need(is_sha256(sha256), "'sha256' of the tokenizer", "64 hexadecimal digits", sha256)
    good = type(vocab_size) is int and 0 < vocab_size <= max(DTYPES.values())
    need(good, "'vocab_size'", f"a whole number in 1..{max(DTYPES.values())}", vocab_size)
    expected = dtype_of(vocab_size)
    need(dtype == expected, "'dtype'", f"{expected!r} for {vocab_size} tokens", dtype)
    need(type(loss) is bool, "'loss'", "true or false", loss)
    need(isinstance(splits, dict) and splits, "'splits'", "an object with at least one split", splits)
    # A shard listed twice would be read twice, and one listed in two splits would leak one into the other.
    seen: set[str] = set()
    checked = {}
    for name, shards in splits.items():
        need(is_plain_name(name), "a split's name", "letters, digits and _ . + = @ -", name)
        need(isinstance(shards, list) and shards, f"split {name!r}", "a list of at least one shard", shards)
        checked[name] = tuple(
            _checked_shard(shard, f"{path}: split {name!r}, shard {i}") for i, shard in enumerate(shards)
        )
        for shard in checked[name]:
            need(shard.file not in seen, f"split {name!r}", "shards that are listed once", shard.file)
            seen.add(shard.file)
    return TokenManifest(dataset, sha256, vocab_size, checked, loss, source)


def _checked_shard(content: Any, where: str) -> TokenShard:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must be an object, got {short(content)}")
    file, sha256 = content.get("file"), content.get("sha256")
    if not isinstance(file, str) or not is_plain_name(file):
        raise UserError(f"{where}: 'file' must be a plain file name inside the folder, got {short(file)}")
    counts: dict[str, int] = {}
    for key in ("tokens", "documents", "text_bytes", "bytes"):
        value = content.get(key)
        if type(value) is not int or value < 1:
            raise UserError(f"{where} ({file}): {key!r} must be a positive whole number, got {short(value)}")
        counts[key] = value
    if not is_sha256(sha256):
        raise UserError(f"{where} ({file}): 'sha256' must be 64 hexadecimal digits, got {short(sha256)}")
    return TokenShard(file, **counts, sha256=sha256)
