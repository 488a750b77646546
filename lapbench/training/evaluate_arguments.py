"""The arguments of ``lapbench evaluate``."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lapbench.errors import ArgumentParser, UserError, positive
from lapbench.evaluation import Evaluation, LanguageEvaluation
from lapbench.evaluation.language import TASKS
from lapbench.training.suite import SUITE, Suite, suite_names

DESCRIPTION = (
    "Evaluate the model of a run and write the scores into its record, or evaluate a timm model as it is, in a run of "
    "its own. Settings of the trainer may follow, such as --trainer.devices 8 --trainer.precision bf16-mixed; one "
    "process is the default."
)
EPILOG = (
    "Settings of the suite follow as --linear.KEY, --knn.KEY and so on; those of a timm model and of its "
    "data as --model.backbone.KEY and --data.KEY."
)


@dataclass(frozen=True)
class Request:
    """What ``lapbench evaluate`` is asked for.

    Attributes:
        options: Its own arguments.
        settings: Arguments for others, by the first part of their keys: "trainer", "linear", "data", ...
    """

    options: argparse.Namespace
    settings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def run(self) -> Path | None:
        """Folder of the run, None if a timm model is to be evaluated."""
        folder = Path(self.options.what)
        return folder if folder.is_dir() else None

    def of(self, *keys: str) -> list[str]:
        """The arguments that begin with one of ``keys``."""
        return [argument for key in keys for argument in self.settings.get(key, [])]

    def suite(self) -> Suite:
        """The evaluations of ``--suite``.

        Raises:
            UserError: A setting that is not right.
        """
        names, name = self.options.suite, self.options.name
        if name is not None and len(names) > 1:
            raise UserError(
                f"--name: expected one evaluation in --suite, got {len(names)}; --{names[0]}.name names one"
            )
        given = [] if name is None else [f"--{names[0]}.name={name}"]
        return Suite(names, [*given, *self.of(*names)], suffix=self._suffix)

    def evaluations(self) -> list[Evaluation]:
        """The evaluations of ``--suite`` or ``--tasks``.

        Raises:
            UserError: Settings out of range.
        """
        o = self.options
        if o.suite:
            return self.suite().evaluations()
        return [
            LanguageEvaluation(
                tasks=o.tasks,
                data_dir=o.data_dir,
                scoring=o.scoring,
                chat=o.chat,
                limit=o.limit,
                samples=o.samples,
                k=o.k,
                temperature=o.temperature,
                max_new_tokens=o.max_new_tokens,
                batch_size=o.batch_size,
                allow_code_execution=o.allow_code_execution,
                name=o.name or f"language{self._suffix}",
            )
        ]

    @property
    def _suffix(self) -> str:
        return "" if self.options.ckpt is None else f"-{_slug(self.options.ckpt)}"


def parse_request(argv: Sequence[str]) -> Request:
    """Reads the arguments.

    Raises:
        UserError: An argument that there is not, one that does not fit the others, or a value out of range.
    """
    parser, language, stock = _parser()
    plain, settings = split(argv)
    if {"-h", "--help"} & {*plain}:
        sys.stdout.write(f"{parser.format_help()}\n{Suite([*SUITE]).help()}")
        raise SystemExit(0)
    request = Request(parser.parse_args(plain), settings)
    if request.options.suite:
        _refuse(request.options, language, "is for --tasks")
    check(request, stock)
    return request


def check(request: Request, stock: argparse._ArgumentGroup) -> None:
    """Refuses what is not for a run, or not for a timm model.

    Args:
        request: Of this command or of one that does the same.
        stock: The arguments that are for timm models only.

    Raises:
        UserError: An argument that does not fit the others.
    """
    if request.run is not None:
        _refuse(request.options, stock, f"is for a timm model, {request.run} is a folder")
    elif request.options.ckpt is not None or request.options.tasks:
        option = "--tasks" if request.options.tasks else "--ckpt"
        raise UserError(f"{option}: expected the folder of a run, {request.options.what} is none")
    allowed = ["trainer", *(request.options.suite or ()), *(() if request.run else ("data", "model"))]
    for key, arguments in request.settings.items():
        if key not in allowed:
            raise UserError(f"unknown key {arguments[0].partition('=')[0][2:]!r}{_hint(key, allowed)}")


def stock_arguments(parser: ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the arguments that are for timm models only."""
    stock = parser.add_argument_group("timm models")
    stock.add_argument(
        "--config",
        metavar="CONFIG",
        action="append",
        default=[],
        help="config whose data section is used, by name or path; may be given again",
    )
    stock.add_argument("--weights", metavar="FILE", help="local weights (.safetensors, .pth, .ckpt)")
    stock.add_argument("--pretrained", action="store_true", help="take timm's pretrained weights, from the hub")
    stock.add_argument("--out", metavar="DIR", help="folder of the run (default: a new one below runs/MODEL)")
    return stock


def _parser() -> tuple[ArgumentParser, argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """The parser, and its groups of arguments for language models and for timm models."""
    parser = ArgumentParser(prog="lapbench evaluate", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("what", metavar="RUN", help="folder of a run, or the name of a timm model")
    parser.add_argument("--ckpt", metavar="CKPT", help="last, best or a file (default: the one that the run declares)")
    parser.add_argument("--name", help="name in record and tables (default: the evaluation's; with --ckpt linear-CKPT)")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--suite", metavar="NAME,...", type=suite_names, help=f"vision backbones: some of {','.join(SUITE)}"
    )
    which.add_argument(
        "--tasks", metavar="TASK,...", type=_tasks, help=f"language models: some of {','.join(TASKS)}, or all"
    )
    stock = stock_arguments(parser)
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--data-dir", metavar="DIR", help="folder with a folder of local files for each task (default: load the hub's)"
    )
    language.add_argument(
        "--scoring", choices=("letters", "harness"), default="letters", help="of multiple choice (default: letters)"
    )
    language.add_argument("--chat", action="store_true", help="for models fine-tuned on conversations")
    language.add_argument("--limit", metavar="N", type=positive, help="take the first N questions of each task")
    language.add_argument(
        "--samples", metavar="N", type=positive, default=10, help="answers to each question of HumanEval (default: 10)"
    )
    language.add_argument(
        "--k", metavar="K,...", type=_numbers, default=[1, 10], help="the k of pass@k (default: 1,10)"
    )
    language.add_argument("--temperature", type=float, default=0.8, help="of these answers (default: 0.8)")
    language.add_argument(
        "--max-new-tokens", metavar="N", type=positive, default=512, help="of a generated answer (default: 512)"
    )
    language.add_argument(
        "--batch-size", metavar="N", type=positive, default=16, help="sequences in a batch (default: 16)"
    )
    language.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the programs that the model writes for HumanEval, in processes with little time, memory and rights; "
        "a guard, no security boundary",
    )
    return parser, language, stock


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The command's own arguments, and those with a dot in their key, each with its value."""
    plain: list[str] = []
    dotted: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        key, equals, _ = argument.partition("=")
        if not key.startswith("--") or "." not in key:
            plain.append(argument)
            continue
        found = dotted.setdefault(key[2:].partition(".")[0], [])
        found.append(argument)
        if not equals and rest:
            found.append(rest.pop(0))
    return plain, dotted


def _refuse(options: argparse.Namespace, group: argparse._ArgumentGroup, why: str) -> None:
    for action in group._group_actions:
        if getattr(options, action.dest) != action.default:
            raise UserError(f"{action.option_strings[0]} {why}")


def _hint(key: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    if near:
        return f"; did you mean {near[0] + '.'!r}?"
    if key in SUITE:
        return f": {key} is not in --suite"
    return f"; expected one below {', '.join(allowed)}"


def _slug(checkpoint: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in Path(checkpoint).stem.lower())


def _tasks(value: str) -> list[str]:
    return list(TASKS) if value == "all" else value.split(",")


def _numbers(value: str) -> list[int]:
    return [positive(part) for part in value.split(",")]
