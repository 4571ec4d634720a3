"""YAML files of a study and of its runs, read as the command line reads configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from pfl_lightning.cli.options.yaml_keys import refuse_repeated_keys
from pfl_lightning.errors import UsageError
from pfl_lightning.state.files import replace_file

__all__ = ["as_read", "read_yaml", "value_of", "write_yaml"]


def read_yaml(path: Path, named_in: str = "") -> Any:
    """The content of a YAML file.

    Args:
        path: The file.
        named_in: Where the file is named, for the error.

    Raises:
        UsageError: There is no such file, or it is no YAML, or gives a key twice.
    """
    where = f"{named_in}: " if named_in else ""
    try:
        return _load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{where}there is no file {path}") from None
    except IsADirectoryError:
        raise UsageError(f"{where}{path} is a folder, a YAML file is expected") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}{path} is no text file") from error
    except yaml.YAMLError as error:
        text = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise UsageError(f"{where}{path} is no YAML: {text}") from error


def value_of(text: str) -> Any:
    """The value of an option of the command line; what is no YAML is a text."""
    try:
        return _load(text)
    except yaml.YAMLError:
        return text


def write_yaml(path: Path, content: Any) -> None:
    """Write a YAML file, whole or not at all."""
    with replace_file(path, shared=True) as temporary:
        temporary.write_text(_dump(content), encoding="utf-8")


def as_read(content: Any) -> Any:
    """What is read of a file of this content."""
    return _load(_dump(content))


def _dump(content: Any) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def _load(text: str) -> Any:
    refuse_repeated_keys()
    return get_loader("yaml")(text)
