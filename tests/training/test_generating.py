"""``lapbench generate``: what it prints, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.cli import main
from lapbench.datamodules.conversations import render_prompt
from lapbench.datamodules.tokenizer import Tokenizer

Command = Callable[..., Any]
PROMPT = "The import statement"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps on the embedded documents."""
    folder = tmp_path_factory.mktemp("generating")
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 3, "limit_val_batches": 0},
        "model": {
            "class_path": "lapbench.tasks.LanguageModeling",
            "init_args": {
                "backbone": {"name": "tiny", "heads": 1, "depth": 1, "width": 16, "num_heads": 2, "context": 48},
                "vocab_size": 300,
                "optimizer": {"lr": 0.05},
            },
        },
        "data": {
            "class_path": "lapbench.datamodules.PyDocs",
            "init_args": {"data_dir": str(folder / "data"), "vocab_size": 300, "context": 32},
        },
        "run": {"test": "none", "monitor": "val/loss"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(folder / "config.yaml"), "--run.dir", str(folder / "run")]) == 0
    return folder / "run"


def test_a_text_is_continued(run: Path, lapbench: Command) -> None:
    outcome = lapbench("generate", run, "--prompt", PROMPT, "--max-tokens", 8)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith(PROMPT)
    assert len(outcome.out) > len(PROMPT) + 1
    assert lapbench("generate", run, "--prompt", PROMPT, "--max-tokens", 8) == outcome
    assert lapbench("generate", run, "--prompt", PROMPT, "--max-tokens", 8, "--seed", 1).out != outcome.out


def test_texts_are_continued_as_each_would_be_alone(run: Path, lapbench: Command) -> None:
    prompts = ("def", PROMPT)
    both = lapbench("generate", run, *(part for text in prompts for part in ("--prompt", text)), "--max-tokens", 5)
    alone = [
        lapbench("generate", run, "--prompt", text, "--max-tokens", 5, "--seed", i) for i, text in enumerate(prompts)
    ]
    assert both.out == "\n---\n".join(outcome.out[:-1] for outcome in alone) + "\n"


def test_the_likeliest_tokens_by_hand(run: Path, lapbench: Command) -> None:
    """Greedy, as a question: the model's own logits after the rendered prompt, without a cache."""
    from lapbench.backbones import DecoderSettings
    from lapbench.tasks import LanguageModeling

    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    settings = DecoderSettings(**checkpoint["hyper_parameters"]["backbone"])
    model = LanguageModeling(settings, checkpoint["hyper_parameters"]["vocab_size"])
    model.load_state_dict(checkpoint["state_dict"])
    tokenizer = Tokenizer.load(run.parent / "data/tokenizer.json")
    tokens = render_prompt([{"role": "user", "content": "Why?"}], tokenizer)
    start = len(tokens)
    stop = {tokenizer.bos, tokenizer.special["<|assistant_end|>"]}
    while len(tokens) < start + 6:
        best = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if best in stop:
            break
        tokens.append(best)
    arguments = ("--prompt", "Why?", "--chat", "--temperature", 0, "--max-tokens", 6)
    assert lapbench("generate", run, *arguments).out == tokenizer.decode(tokens[start:]) + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: --prompt"),
        (("--prompt", " "), "--prompt: expected a text, got ' '"),
        (("--prompt", "word " * 99), "prompt 0: expected 1 to 47 tokens (the model's context is 48), got"),
        (("--prompt", "a", "--ckpt", "best"), "best.ckpt: no such file"),
        (("--prompt", "a", "--max-tokens", 0), "--max-tokens: expected a whole number of at least 1, got '0'"),
        (("--prompt", "a", "--top-k", "x"), "--top-k: expected a whole number of at least 1, got 'x'"),
        (("--prompt", "a", "--seed", -1), "--seed"),
        (("--prompt", "a", "--temperature", -1), "--temperature: expected a number of at least 0, got -1.0"),
    ],
)
def test_refused(arguments: tuple[object, ...], said: str, run: Path, lapbench: Command) -> None:
    outcome = lapbench("generate", run, *arguments)
    assert outcome.status == 2
    (line,) = outcome.err.splitlines()
    assert said in line


def test_a_run_of_another_task_is_refused(finished: Path, lapbench: Command) -> None:
    outcome = lapbench("generate", finished, "--prompt", "a")
    assert (
        outcome.err
        == f"lapbench: error: {finished}: expected a run of LanguageModeling, got one of ImageClassification\n"
    )


def test_a_folder_without_a_run_is_refused(tmp_path: Path, lapbench: Command) -> None:
    outcome = lapbench("generate", tmp_path, "--prompt", "a")
    assert outcome.err == f"lapbench: error: {tmp_path}: expected the folder of a run, it has no config.yaml\n"


def test_predictions_are_of_images(run: Path, lapbench: Command) -> None:
    outcome = lapbench("predict", "--config", run / "config.yaml", "--run.dir", run)
    assert outcome.status == 2
    assert outcome.err == "lapbench: error: predict: expected an image classifier, got a run of LanguageModeling\n"
