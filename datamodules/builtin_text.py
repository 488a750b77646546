"""The data sets of text that lapbench knows: where each lies, and how it is made if it can be made from nothing."""

from typing import Any

from lapbench.datamodules.manifest import MANIFEST
from lapbench.datamodules.text import TextShards
from lapbench.errors import UserError


class PyDocs(TextShards):
    """Python's own documentation (``pydoc_data.topics``): half a megabyte in some 80 documents; made on first use.

    Args:
        vocab_size: Tokens of the tokenizer, which is trained on the training documents.
    """

    def __init__(
        self,
        data_dir: str = "data/pydocs",
        vocab_size: int = 2048,
        context: int = 256,
        batch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_dir=data_dir, context=context, batch_size=batch_size, **kwargs)
        self._asked = vocab_size

    def prepare_data(self) -> None:
        """Convert the documents unless the folder holds a data set already."""
        if not (self.data_dir / MANIFEST).is_file():
            from lapbench.datamodules.convert.pydocs import convert

            convert(self.data_dir, self._asked)

    def setup(self, stage: str | None = None) -> None:
        """See `TextShards.setup`.

        Raises:
            UserError: the data have another vocabulary than asked for.
        """
        super().setup(stage)
        if self.vocab_size != self._asked:
            raise UserError(
                f"{self.data_dir} has a vocabulary of {self.vocab_size} tokens, asked for {self._asked}: set "
                "vocab_size to that, or data_dir to a new folder"
            )


class FineWebEdu(TextShards):
    """FineWeb-Edu, as ``lapbench data fineweb-edu`` writes it; tests on the validation split."""

    def __init__(self, data_dir: str = "data/fineweb-edu", context: int = 2048, **kwargs: Any) -> None:
        super().__init__(data_dir=data_dir, context=context, **kwargs)
