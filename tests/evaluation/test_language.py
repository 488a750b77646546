"""The five language evaluations on small local files, through the harness, for a tiny decoder trained to answer."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import language_rows
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lapbench.backbones import Decoder, build_decoder
from lapbench.datamodules.conversations import LETTERS, letter_tokens, render, render_prompt
from lapbench.datamodules.convert import chat_schemas
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError
from lapbench.evaluation import LanguageEvaluation
from lapbench.evaluation.base import FinishedTraining
from lapbench.evaluation.code_execution import run_program
from lapbench.evaluation.pass_at_k import pass_at_k
from lapbench.evaluation.processes import Processes

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


def test_letter_scoring_is_the_likeliest_letter(
    evaluated: Callable[..., dict[str, Any]], trained: Decoder, tokenizer: Tokenizer, data_dir: Path
) -> None:
    """For untrained contexts too, where the model's choices vary."""
    letters = torch.tensor(letter_tokens(tokenizer))
    rows = [*language_rows.ROWS["arc_easy"], *language_rows.ROWS["arc_challenge"]]
    right = {}
    for chat in (True, False):
        right[chat] = []
        for row in rows:
            user, answer = chat_schemas.arc(row)
            prompt = (
                render_prompt([user], tokenizer) if chat else [tokenizer.bos, *tokenizer.encode(user["content"] + "\n")]
            )
            with torch.no_grad():
                logits = trained(torch.tensor([prompt]))[0, -1]
            chosen = int(logits[letters[: len(row["choices"]["text"])]].argmax())
            right[chat].append(LETTERS[chosen] == answer["content"])
        section = evaluated(["arc_easy", "arc_challenge"], chat=chat)
        assert section["metrics"]["language/arc_easy"] == np.mean(right[chat][:4])
        assert section["metrics"]["language/arc_challenge"] == np.mean(right[chat][4:])
    assert all(right[True])
    assert not all(right[False])


def test_harness_scoring_compares_the_texts_of_the_answers(
    evaluated: Callable[..., dict[str, Any]], trained: Decoder, tokenizer: Tokenizer
) -> None:
    """The harness's own prompt for ARC, recomputed: likelihood of each text, and for each of its characters."""
    rows = language_rows.ROWS["arc_easy"]
    plain, normed = [], []
    for row in rows:
        context = f"Question: {row['question']}\nAnswer:"
        prefix = [tokenizer.bos, *tokenizer.encode(context)]
        scores = []
        for text in row["choices"]["text"]:
            tokens = torch.tensor([tokenizer.bos, *tokenizer.encode(f"{context} {text}")])
            with torch.no_grad():
                log_probs = trained(tokens[None, :-1]).log_softmax(-1)[0]
            scores.append(float(log_probs.gather(1, tokens[1:, None])[len(prefix) - 1 :].sum()))
        gold = row["choices"]["label"].index(row["answerKey"])
        plain.append(int(np.argmax(scores)) == gold)
        normed.append(int(np.argmax([s / len(t) for s, t in zip(scores, row["choices"]["text"], strict=True)])) == gold)
    section = evaluated(["arc_easy", "mmlu"], chat=False, scoring="harness")
    assert section["metrics"]["language/arc_easy"] == np.mean(plain)
    assert section["metrics"]["language/arc_easy_acc_norm"] == np.mean(normed)
    assert section["settings"]["scoring"] == "harness"
    assert "language/average" not in section["metrics"]


ADD, LAST = language_rows.ROWS["humaneval"]
RIGHT = {"add": "    return a + b\n", "last": "    return items[-1]\n"}
BAD = [
    "    while True: pass\n",
    "    x = bytearray(2 << 30)\n    return a + b\n",
    "    import os\n    for _ in range(3):\n        os.fork()\n    return a + b\n",
    "    raise SystemExit(0)\n",
    "    return a - b\n",
    "    return (\n",
]


def test_bad_answers_to_humaneval_are_failures_and_the_others_go_on(
    evaluated: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lapbench.evaluation.harness_model import HarnessModel

    samples = len(BAD) + 2
    answers = {"add": [*BAD, RIGHT["add"], RIGHT["add"]], "last": [RIGHT["last"]] * samples}
    monkeypatch.setattr(
        HarnessModel,
        "generate_until",
        lambda self, requests: [answers[r.doc["entry_point"]].pop(0) for r in requests],
    )
    section = evaluated(["humaneval"], chat=False, samples=samples, k=[1, 5])
    metrics = section["metrics"]
    assert metrics["language/humaneval_pass@1"] == pytest.approx((pass_at_k(samples, 2, 1) + 1) / 2)
    assert metrics["language/humaneval_pass@5"] == pytest.approx((pass_at_k(samples, 2, 5) + 1) / 2)


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{ADD['prompt']}    return a + b\n```\nIt adds.\nassert False",
        "```\ndef add(a, b):\n    return a + b\n```",
        "def add(a, b):\n    return a + b",
        "    return a + b\n",
    ],
)
def test_an_answer_in_a_chat_is_its_code(answer: str) -> None:
    from lapbench.evaluation.harness_tasks import program_of

    assert run_program(program_of(ADD, answer, chat=True)).passed


def test_the_prompt_of_a_chat_keeps_its_imports_and_helpers() -> None:
    from lapbench.evaluation.harness_tasks import program_of

    row = {**ADD, "prompt": f"import math\n\ndef one():\n    return 1\n\n{ADD['prompt']}"}
    answer = "```python\ndef add(a, b):\n    return math.floor(a) + b * one()\n```"
    assert run_program(program_of(row, answer, chat=True)).passed


def test_settings_out_of_range_are_refused() -> None:
    for settings, message in (
        ({"tasks": []}, "expected one of arc_easy"),
        ({"tasks": ["humaneval"]}, "--allow-code-execution"),
        ({"tasks": ["gsm8k"], "limit": 0}, "limit: expected at least 1, got 0"),
        ({"tasks": ["gsm8k"], "samples": 4, "k": [5]}, "k: expected numbers from 1 to the 4 samples"),
        ({"tasks": ["gsm8k"], "temperature": float("nan")}, "temperature: expected a finite number"),
        ({"tasks": ["gsm8k"], "scoring": "letter"}, "scoring: expected letters or harness, got letter"),
    ):
        with pytest.raises(UserError, match=message):
            LanguageEvaluation(**settings)


def test_a_tokenizer_of_another_size_is_refused(finished_training: FinishedTraining, tmp_path: Path) -> None:
    other = train_tokenizer(["a b c"], 265, tmp_path / "other.json")
    data: Any = SimpleNamespace(load_tokenizer=lambda: other)
    with pytest.raises(UserError, match=r"other.json has 265 tokens, the model 500"):
        LanguageEvaluation(["mmlu"]).evaluate(replace(finished_training, data=data))


def test_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    from lapbench.evaluation.harness_scores import Progress

    progress = Progress("language: mmlu", Processes(), every_seconds=0.0)
    progress(1, 2)
    assert capsys.readouterr().err == "language: mmlu: batch 1/2\n"
    Progress("language: mmlu", Processes(), every_seconds=60.0)(1, 2)
    Progress("language: mmlu", Processes(1, 2), every_seconds=0.0)(1, 2)
    assert capsys.readouterr().err == ""
