"""YAML files as the command line reads them: one that cannot be read, or gives a key twice, is told by its name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean


def check_config_files(argv: Sequence[str]) -> None:
    """Refuse what ``--config`` names if it is no file or holds no mapping: the parser would not say what is meant.

    Args:
        argv: The command line.

    Raises:
        UsageError: Names the file and what it holds, and where it is wrong.
    """
    for word, following in itertools.pairwise([*argv, ""]):
        option, equals, value = word.partition("=")
        path = Path(value if equals else following)
        if option == "--config" and path.suffix in (".yaml", ".yml") and not path.is_file():
            beside = [one.name for pattern in ("*.yaml", "*.yml") for one in path.parent.glob(pattern)]
            raise UsageError(f"--config: there is no file {path}{did_you_mean(path.name, beside)}")
        if option == "--config" and path.is_file() and not isinstance(content := read_yaml(path), Mapping):
            found = "is empty" if content is None else f"holds {type(content).__name__}"
            raise UsageError(f"{path} {found}; a config is a mapping with keys such as model, data and trainer")


def read_yaml(path: Path, named_in: str = "") -> Any:
    """The content of a YAML file.

    Args:
        path: The file.
        named_in: Where the file is named, for the error.

    Raises:
        UsageError: It cannot be read, is no YAML, or gives a key twice.
    """
    import yaml  # not for commands without a config

    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(getattr(error, "strerror", "") or error).replace('in "<unicode string>", ', "in ").split())
        raise UsageError(f"{named_in}{': ' * bool(named_in)}{path} cannot be read as YAML: {text}") from None


def load_yaml(text: str) -> Any:
    """The content of a YAML text, in which no mapping has a key twice: YAML would take the last without a word.

    Args:
        text: The text.

    Raises:
        yaml.YAMLError: It is no YAML, or names a key that is given twice, and its lines.
    """
    import yaml
    from jsonargparse import get_loader

    waiting, seen = [yaml.compose(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(
                        f"{key.value!r} is given twice, in lines {lines[name]} and {line}: keep one of them"
                    )
                lines[name] = line
    return get_loader("yaml")(text)
