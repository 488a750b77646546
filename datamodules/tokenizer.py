"""The byte-level BPE tokenizer of a data set: text to tokens and back, and how many bytes each token stands for.

Special tokens go by nanochat's names and take the last numbers of the vocabulary. They are only ever put between texts,
by number: a ``<|bos|>`` that is written in a text stays text.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from lapbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TOKENIZER = "tokenizer.json"
BOS = "<|bos|>"
SPECIAL = (
    BOS,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)

# What normalisers, added spaces and decoders other than the byte-level one change: accents in two forms, blanks at both
# ends, line ends, control characters.
_PROBE = " \tNaïve nai\u0308ve ﬁ ™ 漢字 😀\x00\x7f\r\n\n 1234567 don't  "


class Tokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library, checked to be what the language models here need.

    Attributes:
        path: The file.
        sha256: The SHA-256 (hex) of the file.
        vocab_size: Number of tokens, special ones included.
        special: Number of each special token by its name; all of `SPECIAL`, and others that the file may have.
        bos: Number of the token that begins each document.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path} is no tokenizer.json of the tokenizers library: {error}") from error
        self._inner.encode_special_tokens = True  # not part of the file
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size: int = self._inner.get_vocab_size()
        added = self._inner.get_added_tokens_decoder()
        self.special: dict[str, int] = {token.content: number for number, token in sorted(added.items())}
        self._check(added)
        self.bos = self.special[BOS]

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Read a tokenizer.

        Raises:
            UserError: no such file, not a tokenizer, one that does not keep every byte of a text, or one without the
                special tokens.
        """
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read the tokenizer {path}: {error.strerror} (make one with `lapbench data tokenizer`)"
            ) from error
        return cls(path, content)

    def __reduce__(self) -> Any:
        return Tokenizer.load, (self.path,)  # pickled, the library's own would parse special tokens in texts again

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, none of them special."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all processors."""
        return [encoded.ids for encoded in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens by their names; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self) -> "npt.NDArray[np.int64]":
        """The number of bytes of text that each token stands for, int64 [vocab_size]; 0 for special tokens.

        In a byte-level vocabulary a token is spelt with one character for each of its bytes. Decoding a token on its
        own would not do: part of a character decodes to U+FFFD, which has three bytes.
        """
        import numpy as np

        special = set(self.special.values())
        return np.array(
            [0 if i in special else len(self._inner.id_to_token(i)) for i in range(self.vocab_size)], np.int64
        )

    def _check(self, added: dict[int, Any]) -> None:
        missing = [name for name in SPECIAL if name not in self.special]
        if missing:
            raise UserError(
                f"{self.path} lacks the special token{'s' * (len(missing) > 1)} {', '.join(missing)}: make a tokenizer "
                "with `lapbench data tokenizer`"
            )
        plain = [token.content for token in added.values() if not token.special]
        if plain:
            raise UserError(f"{self.path}: the added token {plain[0]!r} is not special: it would come out of texts")
        alphabet = set(ByteLevel.alphabet())
        for number in range(self.vocab_size):
            token = self._inner.id_to_token(number)
            if token is None:
                raise UserError(f"{self.path} has {self.vocab_size} tokens, but none of number {number}")
            if number not in added and not alphabet.issuperset(token):
                raise UserError(f"{self.path} is not byte-level: token {number} is {token!r}")
        missing = [sign for sign in sorted(alphabet) if self._inner.token_to_id(sign) is None]
        if missing or self.decode(self.encode(_PROBE)) != _PROBE:
            reason = f"it has no token for {missing[0]!r}" if missing else "text comes back changed"
            raise UserError(f"{self.path} does not keep every byte of a text: {reason}; expected byte-level BPE")
        if any(set(self.encode(name)) & added.keys() for name in self.special):
            raise UserError(f"{self.path}: special tokens come out of texts that name them")
