"""Pre-training to table as one ``lapbench sweep``: killed between two stages, it goes on and ends as it would have."""

import json
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import language_rows
import pytest
import yaml

from lapbench.datamodules.convert.pydocs import convert
from lapbench.results.record import read_record

VOCABULARY, CONTEXT = 512, 192
STAGES = ("pretrain", "midtrain", "sft")
FIVE = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval_pass@4")


def config(data: dict[str, Any], *callbacks: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    backbone = {"name": "tiny", "depth": 2, "width": 32, "num_heads": 2, "context": CONTEXT}
    return {
        "trainer": {
            "accelerator": "cpu",
            "log_every_n_steps": 1,
            "limit_val_batches": 4,
            "callbacks": [*callbacks],
            **trainer,
        },
        "model": {
            "class_path": "lapbench.tasks.LanguageModeling",
            "init_args": {"backbone": backbone, "vocab_size": VOCABULARY, "muon": {"lr": 0.02}},
        },
        "data": data,
        "run": {"test": "none", "monitor": "val/bits_per_byte", "monitor_mode": "min"},
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of one chain: documents, packed conversations, single conversations and five evaluations."""
    folder = tmp_path_factory.mktemp("chain")
    convert(folder / "pydocs", VOCABULARY)
    lines = [json.dumps({"messages": messages}) for messages in language_rows.conversations()]
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines * 4))
    questions = language_rows.write(folder / "questions")
    documents = {
        "class_path": "lapbench.datamodules.PyDocs",
        "init_args": {"data_dir": str(folder / "pydocs"), "vocab_size": VOCABULARY, "context": CONTEXT},
    }

    def chat(packing: bool) -> dict[str, Any]:
        settings = {
            "sources": [{"file": str(folder / "chat.jsonl")}],
            "tokenizer": str(folder / "pydocs" / "tokenizer.json"),
            "data_dir": str(folder / "chat"),
            "packing": packing,
            "loss_on": "all" if packing else "assistant",
            "context": CONTEXT,
            "batch_size": 4,
            "val_fraction": 0.2,
        }
        return {"class_path": "lapbench.datamodules.Chat", "init_args": settings}

    evaluation = {
        "class_path": "lapbench.evaluation.LanguageEvaluation",
        "init_args": {
            "data_dir": str(questions),
            "chat": True,
            "samples": 4,
            "k": [1, 4],
            "max_new_tokens": 8,
            "allow_code_execution": True,
        },
    }
    configs = {
        "pretrain": config(documents, max_steps=12, max_epochs=-1, val_check_interval=6),
        "midtrain": config(chat(packing=True), max_epochs=1),
        "sft": config(chat(packing=False), evaluation, max_epochs=2, accumulate_grad_batches=2),
    }
    for stage, settings in configs.items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(settings))
    stages: dict[str, dict[str, str]] = {stage: {"config": str(folder / f"{stage}.yaml")} for stage in STAGES}
    for before, stage in pairwise(STAGES):
        stages[stage]["model.init_args.init_from"] = f"{{{before}}}"
    axes = {
        "heads": {"key": "model.init_args.backbone.heads", "values": [1]},
        "seed": {"key": "seed_everything", "values": [0]},
    }
    file = folder / "chain.yaml"
    content = {"stages": stages, "axes": axes, "metric": "language/average"}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def wait_for(what: Path, text: str, process: Any) -> None:
    deadline = time.monotonic() + 240
    while not (what.is_file() and text in what.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)


def test_a_chain_that_is_killed_between_its_stages_goes_on(
    sweep: Path, tmp_path: Path, start_forked: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    start = partial(start_forked, Path(__file__).parents[1] / "sweeps/forked_sweep.py", sweep, "--out", out)
    cell = out / "heads-1_seed-0"
    process = start()
    wait_for(cell / "midtrain" / "config.yaml", "init_from", process)  # the second stage has begun
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pretrain = read_record(cell / "pretrain")
    weights = (cell / "pretrain" / "checkpoints" / "last.ckpt").read_bytes()

    process = start()
    output, errors = process.communicate()
    assert process.returncode == 0, (output, errors)

    assert read_record(cell / "pretrain") == pretrain  # not trained again
    assert (cell / "pretrain" / "checkpoints" / "last.ckpt").read_bytes() == weights
    records = [read_record(cell / stage) for stage in STAGES]
    assert [record.status for record in records] == ["finished"] * 3
    assert [record.data for record in records] == ["PyDocs", "Chat", "Chat"]
    assert all(record.schedule == "1L" for record in records)
    assert pretrain.progress["step"] == 12

    metrics = records[-1].metrics
    five = [metrics[f"language/{name}"] for name in FIVE]
    assert all(0 <= value <= 1 for value in five)
    assert metrics["language/average"] == pytest.approx(sum(five) / 5, abs=1e-12)
    section = records[-1].evaluations["language"]
    assert section["settings"]["scoring"] == "letters"
    assert f"{100 * metrics['language/average']:.2f}" in output  # the table
    assert "after stage sft" in output


def test_a_stage_without_the_run_before_it_is_refused_in_one_line(
    sweep: Path, tmp_path: Path, lapbench: Callable[..., Any]
) -> None:
    config, missing = sweep.with_name("midtrain.yaml"), tmp_path / "nothing"
    refused = lapbench("fit", "--config", config, "--run.dir", tmp_path / "run", "--model.init_from", missing)
    assert refused.status == 2
    *_, last = refused.err.splitlines()
    assert last == f"lapbench: error: init_from: expected the folder of a run or a checkpoint, {missing} is neither"
