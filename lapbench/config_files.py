"""Configs by name: "supervised/digits" is ``lapbench/configs/supervised/digits.yaml``; and YAML read strictly."""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapbench.errors import UserError

if TYPE_CHECKING:
    import yaml

CONFIGS = Path(__file__).parent / "configs"


def config_names(below: str = "") -> list[str]:
    """Names of the shipped configs below a folder of them ("sweeps"), without suffix, sorted."""
    return sorted(p.relative_to(CONFIGS).with_suffix("").as_posix() for p in (CONFIGS / below).rglob("*.yaml"))


def find_config(name: str, below: str = "") -> Path:
    """The file of a config, given as a path or by name.

    Args:
        name: path of a YAML file, or name of a shipped config: "supervised/digits".
        below: folder of the shipped configs whose name may be left out: with "sweeps", "quickstart" is found too.

    Raises:
        UserError: there is no such file; names the nearest configs there are.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix not in (".yaml", ".yml") and name and not path.is_absolute():
        for folder in dict.fromkeys((CONFIGS, CONFIGS / below)):
            if (found := folder / f"{name}.yaml").is_file():
                return found
    names = config_names(below)
    stem = re.sub(r"\.ya?ml$", "", name)
    wanted = (
        {n: n for n in names}
        | {n.removeprefix(f"{below}/"): n for n in names}
        | {n.rpartition("/")[2]: n for n in names}
    )
    near = difflib.get_close_matches(stem, wanted, n=3) or difflib.get_close_matches(path.stem, wanted, n=3)
    hint = " or ".join(dict.fromkeys(wanted[match] for match in near)) or ", ".join(names) or "none are installed"
    raise UserError(f"no config {name!r}: expected the path of a YAML file or a name such as {hint}")


def load_yaml(path: Path) -> Any:
    """The content of a YAML file. UserError with file and line: unreadable, bad syntax, a key that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, of which YAML otherwise keeps the last without a word."""

        def construct_mapping(self, node: "yaml.MappingNode", deep: bool = False) -> dict[Hashable, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, Hashable):
                    if key in seen:
                        raise UserError(f"{path}: line {key_node.start_mark.line + 1}: key {key!r} stands twice")
                    seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{path}: {where}not valid YAML: {getattr(error, 'problem', None) or error}") from error
