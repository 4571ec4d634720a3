"""Files of a run, which may have been cut or changed: what they hold, or an error that names the one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError

__all__ = ["damaged", "read_json"]


def damaged(path: Path, why: object, without: str = "") -> ConfigurationError:
    """What is said of a file that no run of this package leaves so.

    Args:
        path: The file.
        why: An error, or what is wrong in words.
        without: What the run is read without if the file is removed; empty for a file that a run must have.
    """
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    rest = f"repair the file, or remove it: the run is then read without {without}" if without else "or run it again"
    return ConfigurationError(f"{path} is not what a run of this package leaves ({reason}); leave the run out, {rest}")


def read_json(path: Path, without: str = "") -> Any:
    """The content of a file in JSON.

    Args:
        path: The file.
        without: See :func:`damaged`.

    Raises:
        ConfigurationError: It is cut, or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise damaged(path, error, without) from error
