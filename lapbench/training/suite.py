"""The evaluations of frozen backbones by name, their settings as arguments: ``--linear.epochs 5``."""

import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse

import lapbench.evaluation as evaluation
from lapbench.errors import UserError
from lapbench.evaluation import Evaluation
from lapbench.training.parse_errors import one_line
from lapbench.training.parser import user_error

SUITE = {
    "linear": "LinearProbe",
    "knn": "NearestNeighbors",
    "segmentation": "Segmentation",
    "geometry": "TokenGeometry",
}
"""Classes of ``lapbench.evaluation``; a further one is one entry."""


def suite_names(value: str) -> list[str]:
    """ "linear,knn" as names.

    Raises:
        UserError: An unknown one, or one twice.
    """
    names = value.split(",")
    for name in names:
        if name not in SUITE:
            near = difflib.get_close_matches(name, SUITE, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected some of {','.join(SUITE)}"
            raise UserError(f"--suite: unknown evaluation {name!r}: {hint}")
        if names.count(name) > 1:
            raise UserError(f"--suite: {name} stands twice")
    return names


class Suite:
    """Chosen evaluations with their settings.

    Args:
        names: Keys of ``SUITE``.
        arguments: Settings, ``--linear.epochs 5`` or ``--linear.epochs=5``.
        suffix: What is added to the names in record and tables.

    Raises:
        UserError: An unknown setting, or a value that does not fit.
    """

    def __init__(self, names: Sequence[str], arguments: Sequence[str] = (), suffix: str = "") -> None:
        self.names = names
        self._parser = _Parser(prog="lapbench evaluate", allow_abbrev=False, add_help=False)
        for name in names:
            self._parser.add_class_arguments(getattr(evaluation, SUITE[name]), name)
        self._parser.set_defaults({f"{name}.name": f"{name}{suffix}" for name in names})
        self._settings = self._parser.parse_args(list(arguments))

    def evaluations(self) -> list[Evaluation]:
        """The evaluations.

        Raises:
            UserError: A setting out of range, or a name that two have.
        """
        try:
            built = self._parser.instantiate(self._settings)
        except Exception as error:
            if (mistake := user_error(error)) is not None:
                raise mistake from error
            raise
        found: list[Evaluation] = [built[name] for name in self.names]
        labels = [each.name for each in found]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"--suite: two evaluations are named {label!r}")
        return found

    def callbacks(self) -> list[dict[str, Any]]:
        """The evaluations as a config's ``trainer.callbacks`` has them."""
        settings = self._settings.as_dict()
        path = f"{evaluation.__name__}."
        return [{"class_path": path + SUITE[name], "init_args": settings[name]} for name in self.names]

    def help(self) -> str:
        """What the settings are."""
        text: str = self._parser.format_help()
        return text[text.index("\n\n") :].lstrip("\n")


class _Parser(jsonargparse.ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = [action.dest for action in self._actions if "." in action.dest]
        raise UserError(one_line(message, known)) from ex
