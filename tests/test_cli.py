"""The ``lapbench`` command: what it lists, what it loads, and that every option says what it does."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapbench import __version__
from lapbench.cli import COMMANDS
from lapbench.errors import ArgumentParser
from lapbench.results.record import Record, write_record

Command = Callable[..., Any]
TRAINING = ("fit", "validate", "test", "predict")
HEAVY = ("torch", "torchvision", "lightning", "timm", "numpy", "jsonargparse", "webdataset", "sklearn", "pyarrow")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two finished runs, to print a table of."""
    for seed in (0, 1):
        folder = tmp_path / f"runs/seed-{seed}"
        folder.mkdir(parents=True)
        metrics = {"test/top1": 0.9 + seed / 100}
        write_record(folder, Record("T", "Digits", "vit", "2L", seed, "finished", metrics, checkpoint="last"))
    return tmp_path / "runs"


def python(code: str, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **settings)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments: tuple[str, ...], lapbench: Command) -> None:
    outcome = lapbench(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.help)}$", outcome.out, re.MULTILINE)
    assert all(len(line) <= 120 for line in outcome.out.splitlines())


def test_version(lapbench: Command) -> None:
    assert lapbench("--version") == (0, f"lapbench {__version__}\n", "")


def test_commands_that_do_not_train_load_no_libraries_for_it(records: Path) -> None:
    code = """
import contextlib, io, json, sys
before = io.StringIO()
with contextlib.redirect_stdout(before), contextlib.redirect_stderr(before):
    from lapbench.cli import main
loaded = {}
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    assert not status, arguments
    assert out.getvalue(), arguments
    loaded[" ".join(arguments[:2])] = [name for name in sys.argv[2:] if name in sys.modules]
print(json.dumps([before.getvalue(), loaded]))
"""
    commands = (
        *(
            ["--help"],
            ["--version"],
            ["table", str(records)],
            ["table", "--help"],
            ["compare", "--help"],
            ["sweep", "--help"],
        ),
        *(["sweep", "quickstart", "--dry-run"], ["data", "--help"], ["data", "cifar10", "--help"]),
    )
    done = python(code, json.dumps(commands), *HEAVY, cwd=records)
    assert done.returncode == 0, done.stderr
    printed, loaded = json.loads(done.stdout)
    assert printed == ""  # importing lapbench is silent
    assert {command: names for command, names in loaded.items() if names} == {}


def test_the_module_runs_as_the_command(records: Path) -> None:
    command = [sys.executable, "-m", "lapbench", "table", str(records), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.905" in done.stdout or "90.5" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["table", "."]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str], records: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lapbench", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=records, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in TRAINING])
def test_every_option_of_a_command_says_what_it_does(
    command: str, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: list[ArgumentParser] = []
    original = ArgumentParser.parse_known_args

    def keep(self: ArgumentParser, *arguments: Any, **named: Any) -> Any:
        parsers.append(self)
        return original(self, *arguments, **named)

    monkeypatch.setattr(ArgumentParser, "parse_known_args", keep)
    outcome = lapbench(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: lapbench {command} ")
    while parsers:
        parser = parsers.pop()
        assert parser.description
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert all(choice.help for choice in action._choices_actions)
                parsers += action.choices.values()
            else:
                assert action.help, f"{parser.prog}: {action.dest}"


def explained(text: str) -> dict[str, str]:
    """The options of a help text with their explanations, types and defaults taken off."""
    options: dict[str, str] = {}
    key = None
    for line in text.splitlines():
        if match := re.match(r"  (?:-\w \w+, )?--([\w.]+)(.*)", line):
            key = match[1]
            options[key] = match[2].lstrip().partition("  ")[2].strip()
        elif line.startswith("      ") and key is not None:
            options[key] += " " + line.strip()
        else:
            key = None
    return {key: re.split(r"\((?:type|required|default):?", text)[0].strip() for key, text in options.items()}


@pytest.mark.parametrize("command", TRAINING)
def test_every_option_of_a_training_command_says_what_it_does(
    command: str, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcome = lapbench(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: lapbench {command} ")
    assert "Task and model (their settings: --model.help ImageClassification)" in outcome.out
    options = explained(outcome.out)
    assert {"config", "seed_everything", "trainer.max_epochs", "model", "data", "run.dir", "run.monitor_mode"} <= set(
        options
    )
    assert ("ckpt_path" in options) == (command != "fit")
    assert [name for name, text in options.items() if len(text) < 10] == []


@pytest.mark.parametrize(
    ("cls", "some"),
    [
        ("model ImageClassification", {"model.backbone.heads", "model.mixing.cutmix", "model.ema_decay"}),
        ("data Digits", {"data.batch_size", "data.train_transform.erase_prob", "data.val_fraction"}),
        ("data ImageNet", {"data.data_dir", "data.repeats", "data.shards_url"}),
    ],
)
def test_every_setting_of_a_class_says_what_it_does(
    cls: str, some: set[str], lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    key, name = cls.split()
    outcome = lapbench("fit", f"--{key}.help", name)
    assert (outcome.status, outcome.err) == (0, "")
    options = explained(outcome.out)
    assert some <= set(options)
    assert [name for name, text in options.items() if len(text) < 10] == []
