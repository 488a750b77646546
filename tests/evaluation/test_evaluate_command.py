"""``lapbench fit`` with a language evaluation, and ``lapbench evaluate``: what is written, what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import language_rows
import pytest
import torch
import yaml

from lapbench.cli import main
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.evaluation import language as language_module
from lapbench.process import lock_folder
from lapbench.results.record import read_record

Command = Callable[..., Any]
TASKS = "arc_easy,arc_challenge,mmlu,gsm8k"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_rows.write(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory, questions: Path) -> Path:
    """A tiny decoder fine-tuned on the answers, then asked ARC-Easy."""
    folder = tmp_path_factory.mktemp("language")
    conversations = language_rows.conversations()
    texts = [str(message["content"]) for messages in conversations for message in messages]
    train_tokenizer(texts, 500, folder / "tokenizer.json")
    lines = (json.dumps({"messages": messages}) for messages in conversations)
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))
    evaluation = {"tasks": ["arc_easy"], "data_dir": str(questions), "chat": True}
    config = {
        "seed_everything": 0,
        "trainer": {
            "max_epochs": 50,
            "accelerator": "cpu",
            "log_every_n_steps": 1,
            "callbacks": [{"class_path": "lapbench.evaluation.LanguageEvaluation", "init_args": evaluation}],
        },
        "run": {"test": "none"},
        "model": {
            "class_path": "lapbench.tasks.LanguageModeling",
            "init_args": {
                "backbone": {
                    "name": "tiny",
                    "heads": 1,
                    "depth": 2,
                    "width": 64,
                    "num_heads": 2,
                    "context": 192,
                    "head_std": 0.02,
                },
                "vocab_size": 500,
                "optimizer": {"name": "adamw", "lr": 0.01, "options": {"betas": [0.9, 0.95]}},
            },
        },
        "data": {
            "class_path": "lapbench.datamodules.Chat",
            "init_args": {
                "sources": [{"file": str(folder / "chat.jsonl")}],
                "tokenizer": str(folder / "tokenizer.json"),
                "data_dir": str(folder / "data"),
                "context": 192,
                "batch_size": len(conversations),
            },
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(folder / "config.yaml"), "--run.dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(_run: Path, tmp_path: Path) -> Path:
    """The test's own copy."""
    return shutil.copytree(_run, tmp_path / "run")


def test_fit_evaluates_the_trained_model(run: Path) -> None:
    record = read_record(run)
    assert record.status == "finished"
    assert record.metrics["language/arc_easy"] == 1.0
    section = record.evaluations["language"]
    assert section["settings"]["scoring"] == "letters"
    assert section["tasks"]["arc_easy"]["questions"] == 4


def test_evaluate_adds_to_the_record_and_prints_json(
    run: Path, questions: Path, lapbench: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (run / "config.yaml").read_bytes()
    arguments = ("evaluate", run, "--tasks", TASKS, "--data-dir", questions, "--chat")
    outcome = lapbench(*arguments)
    assert outcome.status == 0, outcome.err
    metrics = json.loads(outcome.out)
    names = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "gsm8k_flexible")
    assert metrics == {f"language/{name}": 1.0 for name in names}
    record = read_record(run)
    assert {key: record.metrics[key] for key in metrics} == metrics
    assert record.evaluations["language"]["checkpoint"] == "last"
    assert (run / "config.yaml").read_bytes() == config
    assert lapbench("table", run, "--metric", "language/mmlu").out.count("100.00") == 1


def test_another_checkpoint_gets_a_name_of_its_own(run: Path, questions: Path, lapbench: Command) -> None:
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    for tensor in state["state_dict"].values():
        tensor.zero_()
    torch.save(state, run / "Epoch 3.ckpt")
    outcome = lapbench(
        "evaluate", run, "--tasks", "mmlu", "--data-dir", questions, "--ckpt", run / "Epoch 3.ckpt", "--limit", 1
    )
    assert outcome.status == 0, outcome.err
    record = read_record(run)
    assert record.metrics["language-epoch-3/mmlu"] == 0.5  # equal likelihoods choose A: right in one of two subjects
    assert record.metrics["language/arc_easy"] == 1.0


def test_done_tasks_are_not_done_again(
    run: Path, questions: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lapbench.evaluation import harness_scores

    asked: list[str] = []
    score = harness_scores.score
    monkeypatch.setattr(harness_scores, "score", lambda task, *rest: asked.append(task) or score(task, *rest))
    arguments = ("evaluate", run, "--data-dir", questions, "--chat", "--tasks")
    assert lapbench(*arguments, "arc_easy,arc_challenge").status == 0
    assert asked == ["arc_challenge"]  # fit has asked the other one
    assert lapbench(*arguments, "arc_easy,arc_challenge", "--scoring", "harness").status == 0
    assert asked == ["arc_challenge", "arc_easy", "arc_challenge"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "arc"), "unknown task 'arc'; expected arc_easy"),
        (("--tasks", "arc_easy,arc_easy"), "arc_easy stands twice"),
        (("--tasks", "humaneval"), "--allow-code-execution"),
        (("--tasks", "mmlu", "--k", "1,0"), "argument --k: expected a whole number of at least 1, got '0'"),
        (("--tasks", "mmlu", "--k", "20"), "LanguageEvaluation.k: expected numbers from 1 to the 10 samples"),
        (("--tasks", "mmlu", "--data_dir", "x"), "unrecognized arguments: --data_dir"),
        (("--tasks", "mmlu", "--data-dir", "nowhere"), "data_dir nowhere: no such folder"),
        (("--tasks", "mmlu", "--ckpt", "best"), "best.ckpt: no such file"),
        (("--tasks", "mmlu", "--name", "Big"), "name of an evaluation"),
        ((), "one of the arguments --suite --tasks is required"),
    ],
)
def test_mistakes_are_one_line(run: Path, lapbench: Command, arguments: tuple[str, ...], message: str) -> None:
    outcome = lapbench("evaluate", run, *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_only_runs_of_language_models_are_evaluated(finished: Path, tmp_path: Path, lapbench: Command) -> None:
    outcome = lapbench("evaluate", finished, "--tasks", "mmlu")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "expected a language model, got ImageClassification" in outcome.err
    outcome = lapbench("evaluate", tmp_path, "--tasks", "mmlu")
    assert "expected the folder of a run, it has no config.yaml" in outcome.err


def test_a_run_that_is_in_use_is_left_alone(run: Path, questions: Path, lapbench: Command) -> None:
    with lock_folder(run, "a test"):
        outcome = lapbench("evaluate", run, "--tasks", "mmlu", "--data-dir", questions)
    assert outcome.status == 2
    assert "is at work in" in outcome.err


def test_without_the_harness_its_extra_is_named(
    run: Path, questions: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_module.importlib.util, "find_spec", lambda name: None)
    outcome = lapbench("evaluate", run, "--tasks", "mmlu", "--data-dir", questions)
    assert outcome.status == 2
    assert "pip install 'lapbench[language]'" in outcome.err
