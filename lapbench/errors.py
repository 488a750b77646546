"""The one exception for mistakes that a user can make and mend, the command-line parser that raises it, its numbers."""

import argparse
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake in the user's input: one line that says what is wrong, what was expected, what was got, and where.

    Commands print it as ``lapbench: error: <message>`` without a traceback and exit with status 2.
    """


class ArgumentParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` whose errors are one-line ``UserError`` instead of a usage dump."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def positive(value: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    return _at_least(1, value)


def natural(value: str) -> int:
    """The type of an argument that is a whole number of at least 0."""
    return _at_least(0, value)


def _at_least(least: int, value: str) -> int:
    if not value.isdecimal() or int(value) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {value!r}")
    return int(value)
