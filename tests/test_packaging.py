"""The wheel: lapbench and nothing else, which works away from its source."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from lapbench.config_files import CONFIGS, config_names

ROOT = Path(__file__).parents[1]
SOURCES = ("lapbench", "tasks", "datamodules", "configs")
FILES = ("pyproject.toml", "LICENSE", "README.md")


def run(*command: object, **settings: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False, **settings
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the build leaves nothing in the source."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the wheel is found before the source, which is not at hand anyway."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*pip, "--no-compile", "--target", target, wheel)
    return {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"lapbench", info}
    modules = {
        f"lapbench/{prefix}{path.relative_to(base).as_posix()}"
        for base, prefix in (
            (ROOT / "lapbench", ""),
            (ROOT / "tasks", "tasks/"),
            (ROOT / "datamodules", "datamodules/"),
        )
        for path in base.rglob("*.py")
    }
    configs = {f"lapbench/configs/{name}.yaml" for name in config_names()}
    assert {name for name in names if name.startswith("lapbench/")} == modules | configs | {"lapbench/py.typed"}
    assert {name.removeprefix(f"{info}/") for name in names if name.startswith(info)} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"),
    }


def test_the_command_works_in_another_folder(installed: dict[str, str], tmp_path: Path) -> None:
    script = Path(installed["PYTHONPATH"]) / "bin/lapbench"
    assert run(sys.executable, script, "--help", cwd=tmp_path, env=installed).startswith("usage: lapbench <command>")
    where = run(sys.executable, "-c", "import lapbench; print(lapbench.__file__)", cwd=tmp_path, env=installed)
    assert where.startswith(installed["PYTHONPATH"])
    planned = run(sys.executable, script, "sweep", "quickstart", "--dry-run", cwd=tmp_path, env=installed)
    assert planned.count("--config supervised/digits") == 9
    assert list(tmp_path.iterdir()) == []


def test_a_config_by_name_works_in_another_folder(installed: dict[str, str], tmp_path: Path) -> None:
    script = Path(installed["PYTHONPATH"]) / "bin/lapbench"
    arguments = ("fit", "--config", "supervised/digits", "--model.backbone.heads", "2", "--print_config")
    config = yaml.safe_load(run(sys.executable, script, *arguments, cwd=tmp_path, env=installed))
    assert config["model"]["class_path"] == "lapbench.tasks.ImageClassification"
    assert config["model"]["init_args"]["backbone"]["heads"] == 2
    source = yaml.safe_load((CONFIGS / "supervised/digits.yaml").read_text())
    assert config["trainer"]["max_epochs"] == source["trainer"]["max_epochs"]
    assert config["data"]["init_args"]["data_dir"] == "data/digits"
    assert list(tmp_path.iterdir()) == []
