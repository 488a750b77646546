"""The one exception for mistakes that a user can make and mend, and the command-line parser that raises it."""

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
