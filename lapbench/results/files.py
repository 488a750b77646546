"""Files that are either the old or the new one, never half of the new one."""

import json
import math
import os
from pathlib import Path
from typing import Any

from lapbench.errors import UserError


def write_atomically(path: Path, content: str | bytes | memoryview, mode: int | None = None) -> None:
    """Write ``content`` to ``path`` through a temporary file in the same folder; the folder is made if it is missing.

    Args:
        path: The file.
        content: Text is written as UTF-8.
        mode: The file's permissions; None leaves them to the process's mask.

    Raises:
        UserError: the disk is full, the folder is read-only, ...; what ``path`` held before is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # there only if the lines above failed
    except OSError as error:
        kept = "; the file written before is intact" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror or error}{kept}") from error


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as strict JSON: NaN and infinities, which JSON lacks, become strings (see `plain`)."""
    write_atomically(path, json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file ``path``. UserError: unreadable, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid JSON: byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:  # an absurdly long number, absurdly deep nesting
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def plain(value: Any) -> Any:
    """``value`` with each non-finite float as one of the strings "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def unplain(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {key: unplain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unplain(item) for item in value]
    return value
