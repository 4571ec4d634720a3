"""What an import path of a config may stand for."""

from __future__ import annotations

import inspect
import sys
from typing import Any

__all__ = ["is_of_standard_library", "stands_for"]


def stands_for(found: object, bases: type | tuple[type, ...]) -> bool:
    """Whether an imported object is a subclass of a class, or a function that is declared to return one.

    Nothing is called: a function counts by its return annotation alone.

    Args:
        found: What was imported.
        bases: The class, or classes, that it must be of.

    Example:
        >>> import os
        >>> from torch import nn
        >>> from pfl_lightning.encoders import MLP
        >>> def make(input_shape) -> MLP: ...
        >>> stands_for(MLP, nn.Module), stands_for(make, nn.Module), stands_for(os.system, nn.Module)
        (True, True, False)
    """
    if inspect.isfunction(found):
        try:
            found = inspect.signature(found, eval_str=True).return_annotation
        except Exception:  # such as an annotation for type checkers alone
            return False
    return inspect.isclass(found) and issubclass(found, bases)


def is_of_standard_library(found: Any) -> bool:
    """Whether a class or function belongs to Python itself, or does not say where it belongs.

    Example:
        >>> import os, torch
        >>> is_of_standard_library(os.system), is_of_standard_library(torch.optim.SGD)
        (True, False)
    """
    module = getattr(found, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in sys.stdlib_module_names
