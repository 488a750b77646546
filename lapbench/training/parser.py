"""Command line of fit, validate, test and predict: Lightning's, with configs by name and one-line errors."""

import difflib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

import lapbench.datamodules as datamodules
import lapbench.evaluation as evaluation
import lapbench.tasks as tasks
from lapbench.config_files import find_config, load_yaml
from lapbench.errors import UserError
from lapbench.training.callbacks import fit_callbacks
from lapbench.training.checkpoint_io import AtomicCheckpointIO
from lapbench.training.layout_change import OPTION as LAYOUT_OPTION
from lapbench.training.layout_change import LayoutChange
from lapbench.training.parse_errors import known_keys, one_line
from lapbench.training.run_folder import RunFolder, schedule_name
from lapbench.training.settings import RunSettings
from lapbench.training.stop_signals import StopSignals

DESCRIPTIONS = {
    "fit": "Trains a model and tests it. A run folder with an unfinished run of the same configuration is resumed.",
    "validate": "Scores a checkpoint on the validation split.",
    "test": "Scores a checkpoint on the test split.",
    "predict": "Writes predictions.csv for the test split into the run's folder.",
    "evaluate": "Evaluates the model of a run.",
    "generate": "Lets the language model of a run continue texts.",
}
_TITLES = {
    "model": "Task and model (their settings: --model.help ImageClassification)",
    "data": "Data set (its settings: --data.help Digits)",
}
_TOP_LEVEL = ("seed_everything", "trainer", "model", "data", "run", "ckpt_path")


class Parser(LightningArgumentParser):
    """Lightning's parser; an error is a ``UserError`` of one line instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(one_line(message, known_keys(_classes()))) from ex


class CLI(LightningCLI):
    """Model and data by class name in YAML (subclass mode); nothing runs by itself."""

    run_folder: RunFolder

    def __init__(self, command: str, argv: Sequence[str], name: str | None = None) -> None:
        self.command = command
        names = [Path(value).stem for _, value in _config_arguments(argv)]
        # A new run's folder is runs/NAME/...: by default the last config's.
        self.name = name or (names[-1] if names else "run")
        self.stop_signals = StopSignals()
        _classes()  # are imported, and only then known by their short names
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=None,
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={
                "prog": f"lapbench {command}",
                "description": DESCRIPTIONS[command],
                "allow_abbrev": False,
                "parser_mode": "omegaconf+",
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # runs are rebuilt from config.yaml; it warns of a deprecated call
            args=_with_config_files(argv),
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ``run.*`` and ``--ckpt_path``, and gives the model the data's number of classes."""
        parser.add_class_arguments(RunSettings, "run")
        if self.command == "fit":
            parser.add_argument(
                LAYOUT_OPTION,
                action="store_true",
                help="Resume an unfinished run although batch size, processes, workers, seed or data are others than "
                "it was started with: from the same share of the epoch on, but with other samples in another order.",
            )
        else:
            parser.add_argument(
                "--ckpt_path",
                type=str | None,
                default=None,
                help="Checkpoint to use: last, best or a file. null: the one that run.test declares, of run.dir; "
                "the model as it is built where run.dir is null.",
            )
        assert parser.groups is not None
        for key, title in _TITLES.items():
            parser.groups[key].title = title
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning's, without its warning that arguments are given twice: these are the process's own."""
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """As Lightning's; a ``UserError`` of a class arrives as itself."""
        try:
            self.config_init = self.parser.instantiate(self.config)
        except Exception as error:
            if (found := user_error(error)) is not None:
                raise found from error
            raise
        self.datamodule = self.config_init["data"]
        self.model = self.config_init["model"]
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A trainer with the run folder's logger and callbacks besides the configured ones.

        The folder is taken only now, when model and data are known to be sound.
        """
        settings = RunSettings(**vars(self.config.run))
        seed = self._seed()
        if self.command == "fit":
            self._check_test(settings)
        if self.command != "fit":
            kwargs["enable_checkpointing"] = False
            self.run_folder = RunFolder.existing(settings)
        else:
            label = f"{self.name}/{schedule_name(self.model)}-seed{seed}"
            self.run_folder = RunFolder.take(settings, label, self._dump(), self.config.allow_layout_change)
        trainer = self.config_init["trainer"]
        if trainer["logger"] in (None, True):
            kwargs["logger"] = self.run_folder.logger() if self.command == "fit" else False
        callbacks = trainer["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        ours = fit_callbacks(self.run_folder, seed, self.stop_signals) if self.command == "fit" else []
        if self.command == "fit" and self.config.allow_layout_change:
            ours.append(LayoutChange(self.run_folder))
        kwargs["callbacks"] = [*callbacks, *ours]
        plugins = trainer["plugins"] or []
        plugins = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        if SLURMEnvironment.detect() and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            # Its requeueing saves in the middle of a step: such a run does not go on as it would have.
            plugins.append(SLURMEnvironment(auto_requeue=False))
        kwargs["plugins"] = plugins
        if not sys.stderr.isatty():  # a log file
            kwargs["enable_progress_bar"] = kwargs["enable_model_summary"] = False
        # A sanity check would count as a validation in the record; a fresh run has none to check.
        kwargs["num_sanity_val_steps"] = trainer["num_sanity_val_steps"] or 0
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            self.run_folder.release()
            raise UserError(f"trainer: {' '.join(str(error).split())}") from error

    def _seed(self) -> int:
        seed = self.config.seed_everything
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserError(
                f"seed_everything: expected a whole number, got {seed!r}: a run without a seed cannot resume"
            )
        return seed

    def _check_test(self, settings: RunSettings) -> None:
        """UserError: a test that could not be made once training is done."""
        if settings.test == "none":
            return
        if not is_overridden("test_step", self.model):
            task = type(self.model).__name__
            raise UserError(f"run.test: expected none, as {task} has no score to test, got {settings.test}")
        if settings.test == "best" and self.config_init["trainer"]["max_epochs"] == 0:
            raise UserError("run.test: expected last or none, as trainer.max_epochs 0 validates nothing, got best")

    def _dump(self) -> str:
        """The resolved configuration as YAML; it can be given to --config again."""
        config = self.config.clone()
        config.pop("config", None)
        config.pop("ckpt_path", None)
        config.pop(LAYOUT_OPTION.removeprefix("--"), None)
        text: str = self.parser.dump(config, skip_unset=False)
        return text


def _classes() -> list[type]:
    """The shipped tasks, evaluations and data modules, whose settings a misspelt key is compared with."""
    found = [getattr(room, name) for room in (tasks, evaluation, datamodules) for name in room.__all__]
    wanted = (LightningModule, LightningDataModule, evaluation.Evaluation)
    return [c for c in found if inspect.isclass(c) and issubclass(c, wanted)]


def _config_arguments(argv: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Positions and values of the --config arguments."""
    for i, argument in enumerate(argv):
        if argument in ("--config", "-c") and i + 1 < len(argv):
            yield i + 1, argv[i + 1]
        elif argument.startswith("--config="):
            yield i, argument.removeprefix("--config=")


def _with_config_files(argv: Sequence[str]) -> list[str]:
    """The arguments, names of configs replaced by the files that they name."""
    out = list(argv)
    for i, value in _config_arguments(argv):
        path = find_config(value)
        _check_file(path)
        out[i] = f"--config={path}" if argv[i].startswith("--config=") else str(path)
    return out


def _check_file(path: Path) -> None:
    """What jsonargparse would not say, or not where: file and line of a syntax error, unknown keys at the top."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(_TOP_LEVEL)}, got {content!r:.60}")
    for key in content:
        if key not in _TOP_LEVEL:
            near = difflib.get_close_matches(str(key), _TOP_LEVEL, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(_TOP_LEVEL)}"
            raise UserError(f"{path}: unknown key {key!r}; {hint}")


def user_error(error: BaseException | None) -> UserError | None:
    """The ``UserError`` that another exception was raised from, if any."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None
