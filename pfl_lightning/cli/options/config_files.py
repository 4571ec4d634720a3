"""Config files that cannot be read, told by their names before the parser merges them; keys that are given twice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pfl_lightning.errors import UsageError

if TYPE_CHECKING:
    import yaml

__all__ = ["check_config_files", "read_nodes"]


def check_config_files(argv: Sequence[str]) -> None:
    """Refuse what ``--config`` names if it is a file without a mapping, or one that gives a key twice.

    Args:
        argv: The command line.

    Raises:
        UsageError: Names the file and what it holds, and where it is wrong.
    """
    for word, following in itertools.pairwise([*argv, ""]):
        option, equals, value = word.partition("=")
        if option == "--config" and Path(value if equals else following).is_file():
            _check(Path(value if equals else following))


def _check(path: Path) -> None:
    import yaml  # not for commands without a config

    try:
        text = path.read_text(encoding="utf-8")
        root = read_nodes(text)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text file; a config is a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise UsageError(f"{path}{place}: this is no YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError:  # whose position counts bytes or characters
        found = yaml.reader.Reader.NON_PRINTABLE.search(text)
        raise UsageError(f"{path}: this is no YAML{'' if found is None else _unprintable(text, found)}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        found = {None: "is empty", yaml.SequenceNode: "holds a list"}.get(root and type(root), "holds a single value")
        raise UsageError(f"{path} {found}; a config is a mapping with keys such as model, data and trainer")


def read_nodes(text: str) -> yaml.Node | None:
    """The tree of a YAML text, in which no mapping has a key twice: YAML would take the last without a word.

    Args:
        text: The text.

    Raises:
        yaml.YAMLError: It is no YAML, or names a key that is given twice, and its lines.
    """
    import yaml

    root = yaml.compose(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
    waiting, seen = [root], set()
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
    return root


def _unprintable(text: str, found: re.Match[str]) -> str:
    """Where a character stands that YAML has none of, and what to write."""
    line, column = text.count("\n", 0, found.start()) + 1, found.start() - text.rfind("\n", 0, found.start())
    return (
        f": line {line}, column {column} has the control character {found[0]!r}; remove it, or write it as "
        f'"\\u{ord(found[0]):04x}" in double quotes'
    )
