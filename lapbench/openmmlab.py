"""mmsegmentation, imported without its noise."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from lapbench.errors import UserError

# What its modules print and warn of at import, of parts that are not used here.
_PRINTED = "Could not import OneDL"
_WARNED = "Fail to import ``MultiScaleDeformableAttention``"


@contextmanager
def mmseg_imports() -> Iterator[None]:
    """Imports of mmseg, mmcv and mmengine stand in here; everything that they print but the known noise is passed on.

    They take some seconds, and belong into the functions that need them.

    Raises:
        UserError: the packages are not installed.
    """
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(printed):
            warnings.filterwarnings("ignore", message=_WARNED, category=UserWarning)
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mmseg", "mmcv", "mmengine"):
            raise
        raise UserError(
            f"segmentation needs mmsegmentation, {error.name} is not installed: pip install 'lapbench[segmentation]'"
        ) from error
    finally:
        sys.stdout.write("".join(line for line in printed.getvalue().splitlines(True) if line.strip() != _PRINTED))
