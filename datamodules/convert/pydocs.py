"""PyDocs: the language reference that Python brings along for ``help()`` (``pydoc_data.topics``): some 80 documents and
half a megabyte of text, with nothing to download. Every tenth document, by name, is for validation; the tokenizer is
trained on the other ones. The texts differ a little from one version of Python to the next.

The documents quote one another: 38 % of what is in validation (in pieces of 100 characters) can be read in training as
well, whole documents cannot. Which document the tenths are counted from makes that 1 to 85 %, 37 % on average, and so
the fifth is the first. Scores are for trying things out, not for publishing.
"""

import argparse
import hashlib
import platform
import tempfile
from pathlib import Path

from lapbench.datamodules.convert.command import Command, add_out, positive
from lapbench.datamodules.convert.token_shards import TokenShardWriter
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.errors import UserError

DATASET = "pydocs"
VOCAB_SIZE = 2048


def load() -> dict[str, list[str]]:
    """The texts of ``train`` and ``val``; UserError if this Python has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            f"this Python ({platform.python_version()}) was installed without pydoc_data.topics: use another one, or "
            "another data set"
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    val = texts[4::10]  # see above
    return {"train": [text for text in texts if text not in val], "val": val}  # some are there under two names


def convert(out: Path, vocab_size: int = VOCAB_SIZE, progress: bool = False) -> tuple[TokenManifest, bool]:
    """Write PyDocs to ``out``, or find them there; safe when several processes do so at once.

    Returns:
        The manifest, and whether it was there already.

    Raises:
        UserError: ``out`` holds something else or cannot be written, or the texts do not make such a vocabulary.
    """
    texts = load()
    digest = hashlib.sha256("\0".join(texts["train"] + texts["val"]).encode()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(texts["train"], vocab_size, Path(folder) / "tokenizer.json")
        settings = {"vocab_size": vocab_size, "texts_sha256": digest}
        origin = f"pydoc_data.topics of Python {platform.python_version()}"
        with TokenShardWriter(out, DATASET, tokenizer, settings=settings, origin=origin, progress=progress) as writer:
            for split, documents in texts.items():
                for text in documents:
                    writer.add(split, [tokenizer.bos, *tokenizer.encode(text)], len(text.encode()))
            return writer.close(), writer.finished


def _configure(parser: argparse.ArgumentParser) -> None:
    add_out(parser)
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=VOCAB_SIZE,
        metavar="N",
        help="tokens of the tokenizer, special ones included (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> tuple[TokenManifest, bool]:
    return convert(arguments.out, arguments.vocab_size, progress=True)


COMMAND = Command("Python's own documentation: half a megabyte of text, no download", __doc__ or "", _configure, _run)
