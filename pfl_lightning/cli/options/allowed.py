"""Check of what a config names, before anything of it is called: classes and functions must be what they stand for."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import FederatedDataModule, Partitioner
from pfl_lightning.encoders import EncoderAssignment, encoder_class
from pfl_lightning.engines import Engine
from pfl_lightning.errors import UsageError
from pfl_lightning.import_paths import is_of_standard_library, stands_for

__all__ = ["check_names"]

ROLES: dict[str, tuple[type, ...]] = {
    "model.method": (FederatedClient,),
    "model.method.optimizer": (Optimizer,),
    "model.method.lr_scheduler": (LRScheduler,),
    "model.method.partner": (nn.Module,),
    "model.encoder": (nn.Module, EncoderAssignment),
    "model.encoder.encoders": (nn.Module,),
    "model.engine": (Engine,),
    "model.engine.engine": (Engine,),
    "data": (FederatedDataModule,),
    "data.partition": (Partitioner,),
    "trainer.callbacks": (Callback,),
    "trainer.logger": (Logger,),
    "trainer.accelerator": (Accelerator,),
    "trainer.strategy": (Strategy,),
    "trainer.profiler": (Profiler,),
}
"""Options that stand for a class, with the classes that they may be of; ``init_args`` are left out of the names."""

ENCODERS = ("model.encoder", "model.encoder.encoders", "model.method.partner")
"""Options that may be the name of an encoder."""


def check_names(config: Namespace) -> None:
    """Refuse classes and functions that are not what they stand for. Modules are imported, and nothing is called.

    Where an option of a class of your own may be anything, it is nothing of Python's standard library.

    Args:
        config: The parsed config of a subcommand.

    Raises:
        UsageError: Names the option, what it must be, and what came; or the encoder that is unknown.
    """
    for option, found in _named(config, ""):
        if isinstance(found, str):
            try:
                encoder_class(found)
            except ValueError as error:
                raise UsageError(str(error)) from None
            continue
        bases = ROLES.get(option)
        name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__qualname__)}"
        if bases is not None and not stands_for(found, bases):
            expected = " or ".join(base.__name__ for base in bases)
            raise UsageError(
                f"{option} must be a subclass of {expected}, or a function that is declared to return one, got {name}"
            )
        if bases is None and is_of_standard_library(found):
            raise UsageError(f"{option}: {name} is not accepted: a config names nothing of Python's own library")


def _named(value: Any, option: str) -> Iterator[tuple[str, Any]]:
    """Classes and functions in a config, and names of encoders, with the options that they are given for."""
    if isinstance(value, Namespace | Mapping):
        entries = vars(value) if isinstance(value, Namespace) else value
        if isinstance(entries.get("class_path"), str):
            yield option, _imported(option, entries["class_path"])
        for name, entry in entries.items():
            within = option if name in ("init_args", "dict_kwargs") else f"{option}.{name}".lstrip(".")
            if name != "class_path":
                yield from _named(entry, within)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _named(entry, option)
    elif callable(value) or (isinstance(value, str) and option in ENCODERS):
        yield option, value


def _imported(option: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{option}: {path} cannot be imported: {error}") from error
