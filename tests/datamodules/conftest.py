"""Shared by the tests of text: a small tokenizer, and shards of tokens whose every place is known."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lapbench.datamodules.convert.token_shards import TokenShardWriter
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.tokenizer import Tokenizer

WORDS = "the cat sat on the mat, and it's 1234 o'clock; déjà vu 漢字 😀\n"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """300 tokens: 256 bytes, 35 merges, 9 special ones from 291 on."""
    return train_tokenizer([WORDS * 3, WORDS], 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="session")
def write_tokens(tokenizer: Tokenizer) -> Callable[..., TokenManifest]:
    """Writes one shard for each list of lengths, a document for each length; tokens are 0, 1, ... over the split.

    A document's first token is ``<|bos|>``; the token at place p of a split is otherwise ``p % 256``. With ``loss``
    the tokens at even places are to be predicted.
    """

    def write(folder: Path, loss: bool = False, **splits: Sequence[Sequence[int]]) -> TokenManifest:
        with TokenShardWriter(folder, "numbers", tokenizer, shard_tokens=1 << 40, loss=loss) as writer:
            for split, shards in splits.items():
                place = 0
                for documents in shards:
                    for length in documents:
                        places = np.arange(place, place + length)
                        tokens = [tokenizer.bos, *(places[1:] % 256).tolist()]
                        writer.add(split, tokens, length, (places % 2 == 0).tolist() if loss else None)
                        place += length
                    writer._write(split, writer._splits[split])
            return writer.close()

    return write
