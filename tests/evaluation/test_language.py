"""The five language evaluations on small local files, through the harness, for a tiny decoder trained to answer."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import language_rows
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lapbench.backbones import Decoder, build_decoder
from lapbench.datamodules.conversations import render
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.evaluation import LanguageEvaluation
from lapbench.evaluation.base import FinishedTraining

FIVE = ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [str(message["content"]) for messages in language_rows.conversations() for message in messages]
    return train_tokenizer(texts, 500, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def trained(tokenizer: Tokenizer) -> Decoder:
    """A decoder that has learnt the answers by heart."""
    torch.manual_seed(0)
    model = build_decoder(
        "tiny", 1, vocab_size=tokenizer.vocab_size, depth=2, width=64, num_heads=2, context=192, head_std=0.02
    )
    rows = render(language_rows.conversations(), tokenizer)
    longest = max(len(row.tokens) for row in rows)
    assert longest <= model.context
    tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows])
    loss = torch.tensor([row.loss + [0] * (longest - len(row.loss)) for row in rows], dtype=torch.bool)
    targets = tokens.masked_fill(~loss, -100)[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95))
    for _ in range(200):
        value = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten())
        if value.item() < 0.02:
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert value.item() < 0.05
    return model.eval()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_rows.write(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def finished_training(trained: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> FinishedTraining:
    """What an evaluation gets, without a run around it."""
    outer: Any = SimpleNamespace(world_size=1, precision_plugin=SimpleNamespace(forward_context=nullcontext))
    data: Any = SimpleNamespace(load_tokenizer=lambda: tokenizer)
    task: Any = SimpleNamespace(backbone=trained)
    return FinishedTraining(task, data, 0, tmp_path, outer)


@pytest.fixture
def evaluated(finished_training: FinishedTraining, data_dir: Path) -> Callable[..., dict[str, Any]]:
    def run(tasks: list[str] = FIVE, **settings: Any) -> dict[str, Any]:
        settings = {"data_dir": str(data_dir), "chat": True, "samples": 2, "k": [1, 2], "temperature": 0.1, **settings}
        return LanguageEvaluation(tasks, allow_code_execution=True, max_new_tokens=64, **settings).evaluate(
            finished_training
        )

    return run


def test_the_five_evaluations_find_what_the_model_has_learnt(
    evaluated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    section = evaluated()
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert section["metrics"] == {
        "language/arc_easy": 1.0,
        "language/arc_challenge": 1.0,
        "language/mmlu": 1.0,
        "language/gsm8k": 1.0,
        "language/gsm8k_flexible": 1.0,
        "language/humaneval_pass@1": 1.0,
        "language/humaneval_pass@2": 1.0,
        "language/average": 1.0,
    }
    assert section["settings"]["scoring"] == "letters"
    assert section["tasks"]["mmlu"]["subjects"] == {"mmlu_anatomy": 1.0, "mmlu_astronomy": 1.0}
    assert [section["tasks"][task]["questions"] for task in FIVE] == [4, 2, 3, 2, 2]
    assert capsys.readouterr() == ("", "")
