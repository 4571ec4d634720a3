"""Check of what a config names, before anything of it is called: classes and functions must be what they stand for."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.cli.messages import KINDS
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import FederatedDataModule, Partitioner
from pfl_lightning.encoders import EncoderAssignment, encoder_class
from pfl_lightning.engines import Engine
from pfl_lightning.errors import UsageError
from pfl_lightning.names import imported, is_own_code, stands_for
from pfl_lightning.robust import Robust

ROLES: dict[str, tuple[type, ...]] = {
    # An objective may be whatever makes one.
    **{o: (imported(f"{m}.{base}"),) for o, (_, m, base) in KINDS.items() if base not in ("", "Objective")},
    "model.method.lr_scheduler": (LRScheduler,),
    "model.method.partner": (nn.Module,),
    "model.encoder": (nn.Module, EncoderAssignment),
    "model.encoder.encoders": (nn.Module,),
    "model.engine.engine": (Engine,),
    "trainer.accelerator": (Accelerator,),
    "trainer.strategy": (Strategy,),
    "trainer.profiler": (Profiler,),
}
"""Options that stand for a class, with the classes that they may be of; ``init_args`` are left out of the names."""

ENCODERS = ("model.encoder", "model.encoder.encoders", "model.method.partner")
"""Options that may be the name of an encoder."""


PLUGGABLE = (
    *(FederatedClient, FederatedDataModule, Partitioner, Engine, EncoderAssignment, Robust),
    *(LightningDataModule, Callback, Logger, Profiler, Strategy, Accelerator, Optimizer, LRScheduler),
)
"""A class of an installed package that is one of these may stand wherever an option takes it."""

CLASSES = (
    *(f"pfl_lightning.{name}" for name in ("callbacks", "datamodules", "encoders", "phases", "self_supervised")),
    *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "plugins", "profilers")),
    *("lightning.fabric.plugins", "lightly.loss", "lightly.models", "timm.models", "torchmetrics"),
    *("torch.nn.modules", "torchvision.datasets", "torchvision.models", "torchvision.ops", "torchvision.transforms"),
    *(f"torch.utils.data.{name}" for name in ("dataloader", "dataset", "sampler")),
)
"""Modules of installed packages whose further classes a config may name."""

FUNCTIONS = (
    *("pfl_lightning.encoders", "pfl_lightning.functional", "torchmetrics.functional"),
    *("torch.nn.functional", "torch.nn.init", "torch.optim.swa_utils", "torch.utils.data._utils.collate"),
    *("torch.profiler.profiler.schedule", "torch.profiler.profiler.tensorboard_trace_handler"),
    *("torchvision.models", "torchvision.transforms", "torchvision.datasets.folder.default_loader"),
    *("torchvision.datasets.folder.accimage_loader", "torchvision.datasets.folder.pil_loader"),
)
"""Functions of installed packages, and modules of such functions, that a config may name."""


def check_names(config: Namespace) -> None:
    """Refuse classes and functions that are not what they stand for. Modules are imported, and nothing is called.

    What the user's own files define may be anything where an option takes anything; what is installed must be listed
    here, since a function of some package runs a command, or loads a file that does.

    Args:
        config: The parsed config of a subcommand.

    Raises:
        UsageError: Names the option, what it must be, and what came; or the encoder that is unknown.
    """
    for option, found in _named(config, ""):
        if isinstance(found, str):
            try:
                found = encoder_class(found)
            except ValueError as error:
                raise UsageError(str(error)) from None
        bases = ROLES.get(option)
        name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__qualname__)}"
        if bases is not None and not stands_for(found, bases):
            expected = " or ".join(base.__name__ for base in bases)
            raise UsageError(
                f"{option} must be a subclass of {expected}, or a function that is declared to return one, got {name}"
            )
        if not (is_own_code(found) or _is_listed(found, name)):
            raise UsageError(
                f"{option}: {name} is not accepted: from installed packages a config may name only what belongs in a "
                "run (docs/command_line.md lists it). If you trust it, call it from a class or function in your own "
                "file, and name that"
            )


def _is_listed(found: Any, name: str) -> bool:
    """Whether something of an installed package may be named; ``name`` is where it is defined."""
    if inspect.isclass(found):
        # Of torch itself, optimizers and modules elsewhere start servers, or run source code that they are given.
        pluggable = issubclass(found, PLUGGABLE) and (name.startswith("torch.optim.") or not name.startswith("torch."))
        return pluggable or _is_within(name, CLASSES)
    public = inspect.isfunction(found) and found.__qualname__ == found.__name__ and not found.__name__.startswith("_")
    return public and _is_within(name, FUNCTIONS)


def _is_within(name: str, places: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def _named(value: Any, option: str) -> Iterator[tuple[str, Any]]:
    """Classes and functions in a config, and names of encoders, with the options that they are given for."""
    if isinstance(value, Namespace | Mapping):
        entries = vars(value) if isinstance(value, Namespace) else value
        if isinstance(entries.get("class_path"), str):
            try:
                yield option, pkgutil.resolve_name(entries["class_path"])
            except (ImportError, AttributeError, ValueError) as error:
                raise UsageError(f"{option}: {entries['class_path']} cannot be imported: {error}") from error
        for name, entry in entries.items():
            within = option if name in ("init_args", "dict_kwargs") else f"{option}.{name}".lstrip(".")
            if name != "class_path":
                yield from _named(entry, within)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _named(entry, option)
    elif isinstance(value, PathLike):  # of the config itself, which can be called
        return
    elif callable(value) or (isinstance(value, str) and option in ENCODERS):
        yield option, value
