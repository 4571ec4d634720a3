"""Options that a client of a user's module does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pfl_lightning.errors import ConfigurationError

__all__ = ["TRAINING", "refuse_options"]

TRAINING = {"lr", "momentum", "weight_decay", "optimizer", "lr_scheduler", "schedule"}
"""Options of clients that make their optimizers themselves."""


def refuse_options(made: type, options: dict[str, Any], only: Collection[str] | None = None) -> None:
    """Refuse options that a client of a user's module does not have.

    Args:
        made: The client's class.
        options: What is given and has no place.
        only: Which of them to refuse; ``None`` for all.

    Raises:
        ConfigurationError: Names them.
    """
    refused = sorted(options if only is None else options.keys() & set(only))
    if not refused:
        return
    training = [name for name in refused if name in TRAINING]
    raise ConfigurationError(
        f"{', '.join(training)}: not for a user's LightningModule, whose configure_optimizers says how it is trained "
        "(federate and FederatedLoop have an option schedule of their own)"
        if training
        else f"{made.__name__} has no option {', '.join(refused)}"
    )
