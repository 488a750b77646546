"""Tasks of lm-evaluation-harness over given questions. Imports ``lm_eval``, so import it only where it is needed.

Prompts, answers and metrics are those of the harness's own task files. They differ in what follows: no examples stand
before a question (the harness gives GSM8K five), and HumanEval runs its programs by `code_execution`, as the harness's
own metric has to be fetched from the hub. Letter scoring replaces prompt and choices by those that fine-tuning uses.
"""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from lapbench.datamodules.conversations import LETTERS
from lapbench.datamodules.convert import chat_schemas
from lapbench.errors import UserError
from lapbench.evaluation.code_execution import run_programs
from lapbench.evaluation.language_data import SPLIT
from lapbench.evaluation.language_settings import LanguageSettings
from lapbench.evaluation.pass_at_k import pass_at_k
from lapbench.evaluation.processes import Processes

Row = dict[str, Any]

_FILES = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "humaneval": "humaneval/humaneval.yaml",
}
_MMLU = "mmlu/default"
_PROGRAMS = 16  # that a process runs in one go
_FENCE = re.compile(r"```(?:python)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LETTER_QUESTION = {"mmlu": chat_schemas.mmlu, "arc_easy": chat_schemas.arc, "arc_challenge": chat_schemas.arc}


def build_task(task: str, rows: Sequence[Row], settings: LanguageSettings, processes: Processes) -> dict[str, Any]:
    """What ``lm_eval.evaluator.evaluate`` takes: the task, or for MMLU one for each subject and their group.

    Raises:
        UserError: MMLU without any question of a subject that the harness knows.
    """
    if task != "mmlu":
        return {"tasks": {task: _task(_FILES[task], task, rows, settings, processes)}}
    of_subject: dict[str, list[Row]] = {}
    for row in rows:
        of_subject.setdefault(row["subject"], []).append(row)
    tasks = {}
    group = Group.from_config({**_load(f"{_MMLU}/_mmlu.yaml"), "task": []})
    for subject, own in sorted(of_subject.items()):
        file = f"{_MMLU}/mmlu_{subject}.yaml"
        if not (_root() / file).is_file():
            raise UserError(f"task mmlu: lm-evaluation-harness knows no subject {subject!r:.60}")
        tasks[f"mmlu_{subject}"] = _task(file, "mmlu", own, settings, processes)
        group.add(tasks[f"mmlu_{subject}"])
    return {"tasks": tasks, "groups": {"mmlu": group}}


def by_letters(task: str, settings: LanguageSettings) -> bool:
    """Whether the answer to ``task`` is a letter."""
    return task in _LETTER_QUESTION and settings.scoring == "letters"


def _root() -> Path:
    return Path(lm_eval.tasks.__file__).parent


def _load(file: str) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(_root() / file, resolve_func=False)
    return config


def _task(file: str, name: str, rows: Sequence[Row], settings: LanguageSettings, processes: Processes) -> Any:
    config = _load(file)
    for key in ("dataset_path", "dataset_name", "training_split", "validation_split", "fewshot_split", "tag"):
        config.pop(key, None)
    config |= {
        "custom_dataset": lambda **ignored: {SPLIT: datasets.Dataset.from_list(list(rows))},
        "test_split": SPLIT,
        "num_fewshot": 0,
    }
    if by_letters(name, settings):
        config |= _letters(name, settings)
    elif settings.chat:
        config["target_delimiter"] = ""  # an assistant's turn begins without a blank
    if "generation_kwargs" in config:
        config["generation_kwargs"]["max_gen_toks"] = settings.max_new_tokens
    if name == "gsm8k" and settings.chat:
        config["doc_to_text"] = "{{question}}"
    if name == "humaneval":
        config |= _humaneval(config["generation_kwargs"], settings, processes)
    return ConfigurableTask(config=config)


def _letters(name: str, settings: LanguageSettings) -> dict[str, Any]:
    """The question as fine-tuning puts it, the letters as its choices."""
    messages = _LETTER_QUESTION[name]
    # In plain text the answer stands on a line of its own, where a letter is one token as after <|assistant_start|>.
    end = "" if settings.chat else "\n"

    def choices(row: Row) -> list[str]:
        texts = row["choices"]["text"] if isinstance(row["choices"], dict) else row["choices"]
        return list(LETTERS[: len(texts)])

    return {
        "description": "",
        "doc_to_text": lambda row: messages(row)[0]["content"] + end,
        "doc_to_choice": choices,
        "doc_to_target": lambda row: LETTERS.index(messages(row)[1]["content"]),
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _humaneval(generation: dict[str, Any], settings: LanguageSettings, processes: Processes) -> dict[str, Any]:
    """Several sampled answers to each question; whether each passes takes the answer's place, then pass@k."""

    def passed(answers: Sequence[Sequence[str]], rows: Sequence[Row]) -> list[list[bool]]:
        programs = [
            program_of(row, answer, settings.chat) for row, own in zip(rows, answers, strict=True) for answer in own
        ]
        parts = [programs[i : i + _PROGRAMS] for i in range(0, len(programs), _PROGRAMS)]
        # All processes may be on this machine.
        run = partial(run_programs, workers=max(1, len(os.sched_getaffinity(0)) // processes.count))
        outcomes = iter([outcome for part in processes.map(run, parts) for outcome in part])
        return [[next(outcomes).passed for _ in own] for own in answers]

    def pass_at(references: Sequence[str], predictions: Sequence[Sequence[bool]]) -> dict[str, float]:
        (own,) = predictions
        return {f"pass@{k}": pass_at_k(len(own), sum(own), k) for k in settings.k}

    return {
        "repeats": settings.samples,
        "generation_kwargs": {
            **generation,
            "until": [] if settings.chat else generation["until"],
            "do_sample": settings.temperature > 0,
            "temperature": settings.temperature,
        },
        "filter_list": [{"name": "passed", "filter": [{"function": "custom", "filter_fn": passed}]}],
        "metric_list": [{"metric": pass_at, "aggregation": "mean", "higher_is_better": True}],
    }


def program_of(row: Row, answer: str, chat: bool) -> str:
    """The program that decides whether an answer to a question of HumanEval passes.

    In a chat the answer is what stands in its first code block, or all of it; where it does not define the function
    again, it continues the prompt. What the prompt defines and imports is there in any case.
    """
    if chat:
        block = _FENCE.search(answer)
        answer = block.group(1) if block else answer
        if re.search(rf"^\s*def\s+{re.escape(row['entry_point'])}\b", answer, re.MULTILINE):
            head = row["prompt"][: row["prompt"].rfind(f"def {row['entry_point']}")]
            return f"{head}\n{answer}\n\n{row['test']}\ncheck({row['entry_point']})\n"
    return f"{row['prompt']}{answer}\n\n{row['test']}\ncheck({row['entry_point']})\n"
