"""Warning of a module that asks for counters of a Trainer where there is none."""

from __future__ import annotations

import inspect
import warnings

import lightning as L

__all__ = ["warn_of_counters"]


def warn_of_counters(module: L.LightningModule) -> None:
    """Warn if a module's code asks for its epoch or step: without a Trainer they are always 0."""
    of_lightning = set(dir(L.LightningModule))
    functions = [
        value
        for base in type(module).__mro__
        if not base.__module__.startswith(("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric."))
        for name, value in vars(base).items()
        if inspect.isfunction(value) and (name in of_lightning or not name.startswith("__"))
    ]
    used = {name for function in functions for name in function.__code__.co_names}
    found = sorted(used & {"current_epoch", "global_step"})
    if found:
        warnings.warn(
            f"{type(module).__name__} asks for {' and '.join(found)}, which SequentialEngine does not count: "
            f"always 0. Use TrainerEngine if it matters",
            stacklevel=2,
        )
