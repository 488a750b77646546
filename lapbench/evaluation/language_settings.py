"""The settings of a language evaluation, which choose prompts and scores."""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["letters", "harness"]


@dataclass(frozen=True)
class LanguageSettings:
    """The settings of a ``LanguageEvaluation``, as its section in the record shows them."""

    tasks: tuple[str, ...]
    data_dir: str | None
    scoring: Scoring
    chat: bool
    limit: int | None
    samples: int
    k: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    batch_size: int
