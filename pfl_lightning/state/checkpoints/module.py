"""Checkpoints of a project: files that the module's ``load_from_checkpoint`` takes, with the federation in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["FEDERATION", "as_federation_wrote", "as_module_would_write", "plain", "python_numbers"]

FEDERATION = "pfl_lightning_federation"
"""Key of the federation's ``state_dict`` in a file whose ``state_dict`` is the module's own."""


def as_module_would_write(checkpoint: dict[str, Any], state: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Give a checkpoint the ``state_dict`` that a plain run of the module would write, and keep the federation's apart.

    Args:
        checkpoint: A federation's checkpoint, which is changed.
        state: The global model under the module's own names, as its ``on_save_checkpoint`` has left it.
        content: What the module's ``on_save_checkpoint`` has put into it.
    """
    checkpoint[FEDERATION] = checkpoint["state_dict"]
    checkpoint["state_dict"] = state
    for key, value in content.items():
        checkpoint.setdefault(key, value)


def as_federation_wrote(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`as_module_would_write`, in place; other checkpoints stay as they are."""
    if FEDERATION in checkpoint:
        checkpoint["state_dict"] = checkpoint.pop(FEDERATION)
    return checkpoint


def plain(value: Any) -> bool:
    """Whether a hyper-parameter is made of numbers, words, lists and dictionaries, so that every reader takes it.

    Example:
        >>> [plain(value) for value in ((1, 28, 28), {"lr": 0.1}, print)]
        [True, True, False]
    """
    if isinstance(value, Mapping):
        return type(value) is dict and all(plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)


def python_numbers(value: Any) -> Any:
    """A hyper-parameter with Python's numbers in place of NumPy's, such as those of ``np.logspace``: it is plain then.

    Example:
        >>> python_numbers({"lr": np.float64(0.5), "sizes": (np.int64(3), 4)})
        {'lr': 0.5, 'sizes': (3, 4)}
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {python_numbers(name): python_numbers(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(python_numbers, value))
    return value
