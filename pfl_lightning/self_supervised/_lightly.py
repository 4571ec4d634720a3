"""Imports of lightly, delayed until an objective is made: the package can be imported without it."""

from __future__ import annotations

import importlib
import os
from typing import Any

from pfl_lightning.errors import ConfigurationError

__all__ = ["heads", "losses"]


def heads(objective: str) -> Any:
    """Module ``lightly.models.modules.heads``, for the objective of this name."""
    return _import("lightly.models.modules.heads", objective)


def losses(objective: str) -> Any:
    """Module ``lightly.loss``, for the objective of this name."""
    return _import("lightly.loss", objective)


def _import(module: str, objective: str) -> Any:
    os.environ.setdefault("LIGHTLY_DID_VERSION_CHECK", "True")  # else versions before 1.6 ask for it over the network
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{objective} is made of parts of lightly, which cannot be imported ({error}); "
            "install it: pip install 'pfl-lightning[ssl]'"
        ) from error
