"""Hyper-parameters of a project as its loggers get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import lightning as L

from pfl_lightning.lightning_private import hyperparameters_of
from pfl_lightning.state.checkpoints.module import plain, python_numbers

__all__ = ["logged_hparams"]


def logged_hparams(method: str, module: L.LightningModule, datamodule: Any = None) -> dict[str, Any]:
    """The module's hyper-parameters and its data module's, as a plain run logs them, and the name of the method.

    Args:
        method: Name of the method, which joins what the module logs.
        module: The module.
        datamodule: The project's data module, if it has one.

    Returns:
        What is made of numbers and words, in lists and dictionaries, too; nothing where neither has any to log.
    """
    own = hyperparameters_of(module)
    found = {} if own is None else {"method": method, **own}
    found |= hyperparameters_of(datamodule) or {}
    return dict(_plain_entries(found))


def _plain_entries(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        made = _made_plain(value)
        if plain(made):
            yield str(name), made


def _made_plain(value: Any) -> Any:
    """Containers of other kinds, such as OmegaConf's, as dictionaries and lists; what cannot be made plain as it is."""
    value = python_numbers(value)
    if plain(value):
        return value
    if isinstance(value, Mapping):
        return dict(_plain_entries(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_made_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, PurePath) else value
