"""How long a user waits for `lapbench --help` and for a table of 100 records."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.timing import Result, seconds


def run(arguments: Sequence[str]) -> None:
    """Runs the installed command."""
    command = Path(sys.executable).with_name("lapbench")
    subprocess.run([str(command), *arguments], check=True, capture_output=True)


def imports_torch(arguments: Sequence[str]) -> bool:
    """Whether a command imports torch."""
    code = (
        "import json, sys; from lapbench.cli import main; "
        f"main({list(arguments)!r}); print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return bool(json.loads(done.stdout.splitlines()[-1]))


def results() -> Iterator[Result]:
    """Seconds, medians of nine."""
    from lapbench.results.record import Record, write_record

    with tempfile.TemporaryDirectory() as root:
        for i in range(100):
            folder = Path(root) / f"run{i}"
            folder.mkdir()
            write_record(
                folder,
                Record(
                    task="ImageClassification",
                    data="Digits",
                    backbone="vit",
                    schedule=f"{i % 20}L",
                    seed=i // 20,
                    status="finished",
                    metrics={"test/top1": 0.9 + i / 2000},
                    checkpoint="last",
                ),
            )
        for name, arguments, bound in (("--help", ["--help"], 0.2), ("table, 100 records", ["table", root], 1.0)):
            value = statistics.median(seconds(lambda a=arguments: run(a)) for _ in range(9))  # type: ignore[misc]
            detail = "imports torch" if imports_torch(arguments) else "torch not imported"
            yield Result(f"lapbench {name}, seconds", value, bound, True, detail)
