"""Names that users give: what they stand for, and which ones were probably meant. Needs no import of torch."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError

PACKAGE = __name__.partition(".")[0]
LONGEST = 120
"""Characters of a value in a ``repr``."""


def imported(path: str) -> Any:
    """What an import path names.

    Raises:
        ConfigurationError: Its module cannot be imported, or has nothing of this name.
    """
    module, _, name = path.rpartition(".")
    try:
        there = import_module(module)
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigurationError(f"{path!r} cannot be imported: {error}") from error
    if not hasattr(there, name):
        near = did_you_mean(name, getattr(there, "__all__", dir(there)))
        raise ConfigurationError(f"the module {module!r} has no {name!r}{near}")
    return getattr(there, name)


def method_named(given: str) -> Any:
    """What a method's name (``"FedPer"``) or its import path stands for.

    Raises:
        ConfigurationError: Nothing has this name.
    """
    try:
        return imported(given if "." in given else f"pfl_lightning.methods.{given}")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"method {given!r} cannot be found: give a name of pfl_lightning.methods, such as 'FedPer', or an import "
            f"path, such as 'my_module.MyMethod' ({error})"
        ) from error


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


PART, BEGINNING = 3, 6
"""Letters from which a word may be a part of one name alone, and the misspelled beginning of one."""


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that is most like a word, in whatever case; empty if none is.

    "Fed" and "pFed", with which most methods begin, make no two of them alike.

    Args:
        word: What was given.
        names: What is known.
        cutoff: How alike they are at least, from 0 to 1.

    Example:
        >>> from pfl_lightning.names import nearest
        >>> nearest("fedpak", ["FedAvg", "FedPAC"]), nearest("xyz", ["FedAvg"]), nearest("FedNova", ["FedBN"])
        ('FedPAC', '', '')
        >>> nearest("Dirichlt", ["IID", "DirichletOverClasses"])
        'DirichletOverClasses'
        >>> nearest("accuracy", ["target-accuracy", "labels"]), nearest("out", ["output"])
        ('target-accuracy', 'output')
    """
    distinct = {re.sub(r"^p?fed", "", name.lower()): name for name in names}
    meant = re.sub(r"^p?fed", "", word.lower())
    found = difflib.get_close_matches(meant, distinct, n=1, cutoff=cutoff)
    if not found and len(meant) >= BEGINNING:
        beginnings = {name[: len(meant)]: name for name in reversed(distinct)}
        found = [beginnings[name] for name in difflib.get_close_matches(meant, beginnings, n=1, cutoff=0.85)]
    if not found and len(meant) >= PART:
        begun = [name for name in distinct if name.startswith(meant)]
        within = begun or [name for name in distinct if meant in _parts(name) or name in _parts(meant)]
        found = within if len(within) == 1 else []
    return distinct[found[0]] if found else ""


def _parts(name: str) -> list[str]:
    return re.split(r"[-_]", name)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question after the nearest one; empty if none is near.

    Args:
        word: The unknown name.
        names: What is known.

    Example:
        >>> from pfl_lightning.names import did_you_mean
        >>> did_you_mean("smal_cnn", ["mlp", "small_cnn"])
        "; did you mean 'small_cnn'?"
    """
    near = nearest(word, names)
    return f"; did you mean {near!r}?" if near else ""


def parameters_of(made: type) -> dict[str, tuple[inspect.Parameter, type]]:
    """Parameters of a class by name, those that it passes on by ``**options`` included.

    Args:
        made: The class.

    Returns:
        Each with the first class that names it, in the order of the signatures, a class before its bases.
    """
    found: dict[str, tuple[inspect.Parameter, type]] = {}
    given: set[str] = set()  # positional alone, so that a class below gives them itself
    for base in made.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        named = [one for one in own[1:] if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
        further = bool(found)  # what a class passes on is given by name
        given |= {one.name for one in own if one.kind is one.POSITIONAL_ONLY}
        for one in [one for one in named if one.name not in given]:
            found.setdefault(one.name, (one.replace(kind=one.KEYWORD_ONLY) if further else one, base))
        if not any(one.kind is one.VAR_KEYWORD for one in own):
            break
    return found


def show_parameters(made: type, without: str = "") -> None:
    """Let ``help`` and editors show all :func:`parameters_of` a class, without one that it gives its base itself."""
    shown = [parameter for name, (parameter, _) in parameters_of(made).items() if name != without]
    made.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]


def described(one: Any) -> str:
    """A ``repr``: the class, and its parameters where the attribute of this name has another value than the default."""
    own = ((name, p.default, vars(one)[name]) for name, (p, _) in parameters_of(type(one)).items() if name in vars(one))
    texts = [f"{name}={value!r}" for name, default, value in own if repr(value) != repr(default)]
    short = (text if len(text) <= LONGEST else f"{text[:LONGEST]}..." for text in texts)
    return f"{type(one).__name__}({', '.join(short)})"
