"""Classes of pytorch_lightning, which is lightning.pytorch under its older name, as classes of the other package.

The two packages have the same code twice, and each refuses objects of the other. Here a class gets the counterparts of
its base classes in front of them, so that it is of both packages, and runs the code of one.
"""

from __future__ import annotations

import copyreg
import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

import lightning as L
from torch import nn

T = TypeVar("T")

OLDER = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
NEWER = {older: newer for newer, older in OLDER.items()}
_WRITTEN = "_class_as_written"


class _Ordered(type):
    """A metaclass of classes that say in which order their bases are asked."""

    def mro(cls) -> list[type]:
        """The class and its bases."""
        return [cls, *vars(cls)["_bases_in_order"]]


def is_older(value: Any) -> bool:
    """Whether an object is a module or data module of pytorch_lightning, and none of lightning."""
    return not isinstance(value, L.LightningModule | L.LightningDataModule) and has_older_base(value)


def has_older_base(value: Any) -> bool:
    """Whether an object is a module or data module of pytorch_lightning, be it one of lightning, too, or not."""
    names = {"LightningModule", "LightningDataModule"}
    return any(base.__name__ in names and _within(base, NEWER) is not None for base in type(value).__mro__)


def as_lightning(value: T) -> T:
    """A data module of pytorch_lightning as one of lightning, with the same attributes; any other object as it is."""
    if not is_older(value):
        return value
    made = object.__new__(_in_order(cast(Any, type(value)), True))
    vars(value).update({n: v for n, v in vars(L.LightningDataModule()).items() if n not in vars(value)})
    object.__setattr__(made, "__dict__", vars(value))
    return made  # type: ignore[no-any-return]


def made_lightning(module: nn.Module) -> None:
    """Make a module, and all modules in it, those of lightning where they are of pytorch_lightning."""
    for layer in module.modules():
        if is_older(layer):
            vars(layer).update({n: v for n, v in vars(L.LightningModule()).items() if n not in vars(layer)})
            object.__setattr__(layer, "__class__", _in_order(cast(Any, type(layer)), True))


def as_written(module: nn.Module) -> None:
    """Give a module, and all modules in it, the classes that their author wrote."""
    for layer in module.modules():
        object.__setattr__(layer, "__class__", written_class(layer))


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module that its author wrote."""
    made = type(module)
    return getattr(made, _WRITTEN, made)


def as_older(value: Any) -> None:
    """Make a module or data module of lightning one that a Trainer of pytorch_lightning takes, too."""
    packages = (L, importlib.import_module("pytorch_lightning"))
    own, other = (".".join(str(package.__version__).split(".")[:2]) for package in packages)
    if own != other:
        warnings.warn(
            f"the project uses pytorch_lightning {other}, but lightning is {own}: rounds are counted in a part of "
            f"the Trainer that may differ between them. Run pip install 'pytorch-lightning=={own}.*'",
            stacklevel=3,
        )
    object.__setattr__(value, "__class__", _in_order(cast(Any, type(value)), False))


def _within(base: type, packages: Mapping[str, str]) -> str | None:
    """The name that the module of a class has in the other package."""
    found = [name for name in packages if f"{base.__module__}.".startswith(f"{name}.")]
    return packages[found[0]] + base.__module__.removeprefix(found[0]) if found else None


def _counterpart(base: type, packages: Mapping[str, str]) -> type | None:
    name = _within(base, packages)
    if name is None:
        return None
    try:
        return getattr(importlib.import_module(name), base.__name__, None)
    except ImportError:  # it was moved between two versions
        return None


@cache
def _in_order(written: Any, newer: bool) -> Any:
    """The class with the bases of one package in front of those of the other."""
    packages = NEWER if newer else OLDER
    order, replaced, first, place = list[type](), list[type](), list[type](), 0
    for base in written.__mro__:
        other = _counterpart(base, packages)
        if other is None:
            order.append(base)
            continue
        replaced.append(base)
        added = [one for one in other.__mro__ if one not in order and one not in written.__mro__]
        if added:
            first.append(other)
        order += added
        place = len(order)
    order[place:place] = replaced
    own: dict[str, Any] = {
        "_bases_in_order": tuple(order),
        _WRITTEN: written,
        "__module__": written.__module__,
        "__qualname__": written.__qualname__,
        "__doc__": written.__doc__,
        "__reduce_ex__": _reduce,
    }
    if not newer and issubclass(written, L.LightningModule):
        # The packages compare code to see what is overridden, and find their own hooks of this name (a deprecated one)
        # to differ: neither is there, so that a Trainer of lightning takes the module, too.
        own["configure_sharded_model"] = None
    kind = type("_Ordered", (_Ordered, type(written)), {}) if type(written) is not type else _Ordered
    first = [one for one in first if not any(other is not one and issubclass(other, one) for other in first)]
    return kind(written.__name__, (written, *first), {**own, "_is_newer": newer})


def _reduce(self: Any, protocol: Any) -> Any:
    """The class is made where it is needed, so that it cannot be found by its name."""
    made = type(self)
    found = super(made, self).__reduce_ex__(protocol)
    if isinstance(found, tuple) and found[0] is getattr(copyreg, "__newobj__") and found[1] == (made,):  # noqa: B009
        return _blank, (vars(made)[_WRITTEN], vars(made)["_is_newer"]), *found[2:]
    return found


def _blank(written: Any, newer: bool) -> Any:
    made = _in_order(written, newer)
    return made.__new__(made)
