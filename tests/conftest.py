"""Shared by all tests: one thread, a few real digits, a tiny model, and the commands run inside this process."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from lapbench.cli import main
from lapbench.datamodules.convert import pipeline
from lapbench.datamodules.convert.digits import DigitsSource
from lapbench.results.record import read_record

TRAIN, TEST = 160, 37

TINY: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1},
    "model": {
        "class_path": "lapbench.tasks.ImageClassification",
        "init_args": {
            "backbone": {
                "name": "vit_tiny_patch16_224",
                "heads": 1,
                "img_size": 8,
                "patch_size": 4,
                "in_chans": 1,
                "global_pool": "avg",
                "options": {"embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": False},
            },
            "optimizer": {"name": "adamw", "lr": 0.01},
            "lr_schedule": {"warmup_epochs": 0.5},
        },
    },
    "data": {
        "class_path": "lapbench.datamodules.Digits",
        # 120 training images are 10 batches; 40 for validation and 37 for test end in a batch that is not full.
        "init_args": {"val_fraction": 0.25, "batch_size": 12, "eval_batch_size": 16},
    },
}


# What depends on the machine.
TIMED = ("train/samples_per_second", "train/tokens_per_second", "train/mfu")


class Outcome(NamedTuple):
    """What a command returned and printed."""

    status: int
    out: str
    err: str


class Forked:
    """A process that runs as ``python ARGUMENT...`` would, without the seconds that imports take.

    It is a fork of a fresh process in which only imports have happened: nothing of the test's own process is in it.
    """

    context = multiprocessing.get_context("forkserver")

    def __init__(self, arguments: Sequence[object], output: Path, env: dict[str, str], cwd: Path) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.files = [output.with_name(f"{output.name}.{name}") for name in ("out", "err")]
        request = {"ARGUMENTS": self.arguments, "ENVIRONMENT": env, "FOLDER": str(cwd)}
        files = dict(zip(("OUT", "ERR"), map(str, self.files), strict=True))
        script = str(Path(__file__).with_name("forked.py"))
        self.process = self.context.Process(
            target=runpy.run_path, args=(script,), kwargs={"init_globals": {**request, **files}}
        )
        self.process.start()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Waits for its end; what it has printed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            raise subprocess.TimeoutExpired(self.arguments, timeout, *self.printed())
        return self.printed()

    def printed(self) -> tuple[str, str]:
        """Standard output and error so far."""
        out, err = (file.read_text() if file.exists() else "" for file in self.files)
        return out, err


class _FewDigits(DigitsSource):
    """The first digits of each split."""

    sizes = {"train": TRAIN, "test": TEST}  # noqa: RUF012

    def samples(self, split: str, start: int) -> Iterator[pipeline.Sample]:
        yield from islice(super().samples(split, start), self.sizes[split] - start)


def pytest_sessionstart() -> None:
    """Collections during the imports would walk a million lasting objects again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors are slower on several threads, and sums differ in the last bit."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """Puts back what the commands change for their whole process."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def start_forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Forked]:
    """Starts a process that runs as ``python ARGUMENT...`` would: ``start_forked("-m", "lapbench", "fit", ...)``."""
    multiprocessing.set_forkserver_preload(["lapbench.training.commands", "torch.utils.tensorboard", "omegaconf"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    folder, number = tmp_path_factory.mktemp("forked"), count()

    def start(*arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> Forked:
        environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        return Forked(arguments, folder / str(next(number)), environment, cwd or Path.cwd())

    return start


@pytest.fixture(scope="session")
def forked(start_forked: Callable[..., Forked]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs such a process to its end, as ``subprocess.run`` does."""

    def run(*arguments: object, timeout: float = 300, **settings: Any) -> "subprocess.CompletedProcess[str]":
        process = start_forked(*arguments, **settings)
        printed = process.communicate(timeout)
        return subprocess.CompletedProcess(process.arguments, process.returncode, *printed)

    return run


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of 160 train and 37 test digits."""
    folder = tmp_path_factory.mktemp("digits")
    pipeline.convert(_FewDigits(), folder, shard_size=64)
    return folder


@pytest.fixture(scope="session")
def tiny(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that trains a tiny ViT on the few digits in a second."""
    config = {**TINY, "data": {**TINY["data"], "init_args": {**TINY["data"]["init_args"], "data_dir": str(few_digits)}}}
    file = tmp_path_factory.mktemp("config") / "tiny.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="session")
def _trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    environment = dict(os.environ)
    assert main(["fit", "--config", str(tiny), "--run.dir", str(folder)]) == 0
    os.environ.clear()
    os.environ.update(environment)
    return folder


@pytest.fixture
def finished(_trained: Path, tmp_path: Path) -> Path:
    """A finished run of the tiny config: the test's own copy."""
    return shutil.copytree(_trained, tmp_path / "finished")


@pytest.fixture
def scalars() -> Callable[[Path], dict[str, dict[int, float]]]:
    """Values by tag and step of the event files in a folder; where a step was logged twice, the later value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> dict[str, dict[int, float]]:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        events.Reload()
        return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}

    return read


def state(folder: Path, name: str = "last") -> dict[str, Any]:
    """What a checkpoint holds, but for paths and times."""
    checkpoint = torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)
    for name in TIMED:
        checkpoint["lapbench"]["logs"].pop(name, None)
    averages = {key: checkpoint[key] for key in ("current_model_state", "averaging_state") if key in checkpoint}
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "lapbench", "epoch", "global_step")
    return averages | {key: checkpoint[key] for key in keys}


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Equal to the bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}/{index}")
    else:
        assert one == other, where


@pytest.fixture
def assert_same_run(scalars: Callable[[Path], dict[str, dict[int, float]]]) -> Callable[[Path, Path], None]:
    """Compares two runs: weights, averaged weights, optimizer, scheduler, counters, every logged value, the record."""

    def compare(one: Path, other: Path) -> None:
        for name in ("last", "best"):
            assert_equal(state(one, name), state(other, name), name)
        logs = [scalars(folder / "tensorboard") for folder in (one, other)]
        for log in logs:
            assert TIMED[0] in log
            for name in TIMED:
                log.pop(name, None)
        assert logs[0] == logs[1]
        records = [read_record(folder) for folder in (one, other)]
        for record in records:
            assert record.status == "finished"
            assert record.error is None
            assert record.metrics[TIMED[0]] > 0
            for name in TIMED:
                record.metrics.pop(name, None)
        assert records[0].metrics == records[1].metrics
        assert records[0].progress == records[1].progress

    return compare


@pytest.fixture
def lapbench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command: ``lapbench("fit", "--config", file)``."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def fit(lapbench: Callable[..., Outcome], tiny: Path) -> Callable[..., Outcome]:
    """Runs ``lapbench fit`` with the tiny config: ``fit(folder, "--trainer.max_epochs", 3)``."""

    def run(folder: Path, *arguments: object) -> Outcome:
        return lapbench("fit", "--config", tiny, "--run.dir", folder, *arguments)

    return run
