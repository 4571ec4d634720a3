"""What an import path of a config may stand for."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.text import did_you_mean

__all__ = ["is_own_code", "method_named", "stands_for"]

PACKAGE = __name__.partition(".")[0]


def method_named(given: str) -> Any:
    """What a method's name (``"FedPer"``) or its import path stands for.

    Raises:
        ConfigurationError: Nothing has this name.
    """
    path, _, name = given.rpartition(".")
    try:
        module = import_module(path or "pfl_lightning.methods")
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"method {given!r} cannot be found ({error}): {_METHOD}") from error
    if not hasattr(module, name):
        raise ConfigurationError(
            f"method {given!r} cannot be found: {_METHOD}{did_you_mean(name, getattr(module, '__all__', dir(module)))}"
        )
    return getattr(module, name)


_METHOD = "give a name of pfl_lightning.methods, such as 'FedPer', or an import path, such as 'my_module.MyMethod'"


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


def is_own_code(found: Any) -> bool:
    """Whether a class or function is defined in a file of the user's, and not in Python or an installed package.

    Example:
        >>> import os, torch
        >>> is_own_code(os.system), is_own_code(torch.load), is_own_code(is_own_code)
        (False, False, False)
    """
    module = getattr(found, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] in {*sys.stdlib_module_names, PACKAGE}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _is_installed(Path(file).absolute())


def _is_installed(file: Path) -> bool:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    within = any(file.is_relative_to(folder) for folder in folders)
    return within or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
