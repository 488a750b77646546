"""What a language model knows and can do: ARC, MMLU, GSM8K and HumanEval, through lm-evaluation-harness."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lapbench.backbones import Decoder
from lapbench.datamodules.conversations import letter_tokens
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.evaluation.code_execution import check_containment
from lapbench.evaluation.language_data import DATA_SETS, Questions, load_questions
from lapbench.evaluation.language_settings import LanguageSettings, Scoring
from lapbench.evaluation.processes import Processes
from lapbench.results.files import read_json, write_json

TASKS = tuple(DATA_SETS)


class LanguageEvaluation(Evaluation):
    """Scores a language model on questions without examples before them (zero-shot), all as fractions.

    - NAME/arc_easy, NAME/arc_challenge, NAME/mmlu: accuracy; of MMLU over all questions of all subjects. With harness
      scoring also NAME/arc_..._acc_norm, by likelihood for each character of an answer.
    - NAME/gsm8k: exact match of the number after ``####``; NAME/gsm8k_flexible: of the last number of the answer.
    - NAME/humaneval_pass@K: the unbiased estimate of pass@K from ``samples`` answers.
    - NAME/average: the mean of the five, HumanEval by its largest K; only where all five are evaluated.

    The number of processes does not change the scores, and the same seed draws the same answers. A task that is done is
    kept in the run's folder, so that an evaluation that was stopped goes on with the next one.

    Args:
        tasks: Which of arc_easy, arc_challenge, mmlu, gsm8k and humaneval.
        data_dir: Folder with a folder for each task that holds ``test.jsonl`` or ``test*.parquet`` in the data set's
            own schema: named like the task, or a copy of its repository on the hub. null loads from the hub.
        scoring: Of multiple choice. "letters": which letter is likeliest after the question with its lettered choices,
            as in nanochat and the paper; "harness": prompts and answers of lm-evaluation-harness.
        chat: Put questions as a user's turn of a conversation; for models fine-tuned on conversations.
        limit: Take the first questions only, so many of each task and of each subject of MMLU; to try things out.
        samples: Answers to each question of HumanEval.
        k: The k of pass@k.
        temperature: Of the answers to HumanEval; those to GSM8K are the likeliest ones.
        max_new_tokens: Most tokens of a generated answer.
        batch_size: Sequences in a batch of one process.
        allow_code_execution: Run the programs that the model writes for HumanEval, each in a process with little time,
            memory and rights. A guard, no security boundary.
        name: Its name in record and tables.

    Raises:
        UserError: An unknown task, a setting out of range, HumanEval without ``allow_code_execution``.
    """

    def __init__(
        self,
        tasks: list[str] = list(TASKS),  # noqa: B006  never mutated; jsonargparse shows it
        data_dir: str | None = None,
        scoring: Scoring = "letters",
        chat: bool = False,
        limit: int | None = None,
        samples: int = 10,
        k: list[int] = [1, 10],  # noqa: B006
        temperature: float = 0.8,
        max_new_tokens: int = 512,
        batch_size: int = 16,
        allow_code_execution: bool = False,
        name: str = "language",
    ) -> None:
        super().__init__(name)
        _check_tasks(tasks, allow_code_execution)
        for setting, value, good, expected in (
            ("scoring", scoring, scoring in ("letters", "harness"), "letters or harness"),
            ("limit", limit, limit is None or limit >= 1, "at least 1"),
            ("samples", samples, samples >= 1, "at least 1"),
            ("k", k, len(k) > 0 and all(1 <= one <= samples for one in k), f"numbers from 1 to the {samples} samples"),
            ("temperature", temperature, 0 <= temperature < float("inf"), "a finite number of at least 0"),
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
        ):
            if not good:
                raise UserError(f"LanguageEvaluation.{setting}: expected {expected}, got {value}")
        self.settings = LanguageSettings(
            tuple(tasks),
            data_dir,
            scoring,
            chat,
            limit,
            samples,
            tuple(sorted(set(k))),
            temperature,
            max_new_tokens,
            batch_size,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            self.check(pl_module, trainer.datamodule)  # type: ignore[attr-defined]

    def check(self, task: pl.LightningModule, data: Any) -> None:
        """Finds out whether everything is there that the evaluation needs, the questions included.

        Raises:
            UserError: It is not.
        """
        model: Any = getattr(task, "backbone", None)
        if not isinstance(model, Decoder):
            raise UserError(f"LanguageEvaluation: expected a language model, got {type(task).__name__}")
        tokenizer = _tokenizer(data, model)
        if self.settings.scoring == "letters":
            letter_tokens(tokenizer)  # raises if the likeliest letter were not the likeliest next token
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(
                "LanguageEvaluation needs lm-evaluation-harness, which is not installed: "
                "pip install 'lapbench[language]'"
            )
        if "humaneval" in self.settings.tasks:
            check_containment()
        if self.settings.data_dir is not None:
            for name in self.settings.tasks:
                self._questions(name)

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Scores the model on each task."""
        self.check(run.task, run.data)
        processes = Processes.of(run.outer)
        model = cast(Decoder, run.task.backbone)
        tokenizer = _tokenizer(run.data, model)
        weights = processes.of_first(_hash(model) if processes.rank == 0 else "")
        with isolate_rng():  # the harness draws from python's generator
            tasks = {name: self._task(name, run, model, tokenizer, weights, processes) for name in self.settings.tasks}
        return {
            "metrics": self._metrics(tasks),
            "settings": asdict(self.settings),
            "tasks": tasks,
            "versions": {"lm_eval": version("lm_eval")},
        }

    def _questions(self, task: str) -> Questions:
        folder = self.settings.data_dir
        return load_questions(task, None if folder is None else Path(folder))

    def _task(
        self,
        name: str,
        run: FinishedTraining,
        model: Decoder,
        tokenizer: Tokenizer,
        weights: str,
        processes: Processes,
    ) -> dict[str, Any]:
        """What is known of one task, from an earlier start if it was done then."""
        questions = self._questions(name)
        settings = asdict(self.settings)
        for key in ("tasks", "data_dir", "batch_size"):
            del settings[key]
        key = json.loads(
            json.dumps(
                {
                    **settings,
                    "questions": questions.sha256,
                    "weights": weights,
                    "tokenizer": tokenizer.sha256,
                    "seed": run.seed,
                    "lm_eval": version("lm_eval"),
                }
            )
        )
        file = run.folder / f"{name}.json"
        earlier = processes.of_first(read_json(file) if file.is_file() else {})
        if earlier.get("key") == key:
            return cast(dict[str, Any], earlier["result"])
        from lapbench.evaluation.harness_scores import score  # imports lm_eval, which takes seconds

        autocast = run.outer.precision_plugin.forward_context
        result = score(name, questions.rows, self.settings, model, tokenizer, run.seed, processes, autocast, self.name)
        if processes.rank == 0:
            write_json(file, {"key": key, "result": result})
        return result

    def _metrics(self, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        metrics = {f"{self.name}/{key}": v for task in tasks.values() for key, v in task["metrics"].items()}
        if set(TASKS) <= set(tasks):
            best = f"humaneval_pass@{max(self.settings.k)}"
            five = [metrics[f"{self.name}/{key}"] for key in (*(t for t in TASKS if t != "humaneval"), best)]
            metrics[f"{self.name}/average"] = sum(five) / len(five)
        return metrics


def _check_tasks(tasks: list[str], allow_code_execution: bool) -> None:
    if not tasks:
        raise UserError(f"LanguageEvaluation.tasks: expected one of {', '.join(TASKS)}, got none")
    for name in tasks:
        if name not in TASKS:
            raise UserError(f"LanguageEvaluation.tasks: unknown task {name!r}; expected {', '.join(TASKS)}")
        if tasks.count(name) > 1:
            raise UserError(f"LanguageEvaluation.tasks: {name} stands twice")
    if "humaneval" in tasks and not allow_code_execution:
        raise UserError(
            "LanguageEvaluation.tasks: humaneval runs programs that the model writes; allow it with "
            "allow_code_execution (--allow-code-execution), or leave it out"
        )


def _tokenizer(data: Any, model: Decoder) -> Tokenizer:
    tokenizer: Tokenizer = data.load_tokenizer()
    if tokenizer.vocab_size != model.vocab_size:
        raise UserError(f"{tokenizer.path} has {tokenizer.vocab_size} tokens, the model {model.vocab_size}")
    return tokenizer


def _hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers."""
    import torch

    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
