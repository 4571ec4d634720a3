"""Advice for errors that a local fit may end in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.errors import ClientError, ConfigurationError

SINGLE_ITEM = (
    "set another batch_size, or drop_last to true, so that no such batch is left; a client with one item needs more "
    "(min_samples of DirichletOverClients, fewer clients), or a network without batch normalization"
)
"""Advice where a batch of one item is left, which batch normalization cannot train on."""


def explained(error: Exception, client: FederatedClient, phase: Phase, context: FitContext) -> Exception:
    """Return the error with the advice that it needs, or as it is.

    Batch normalization cannot train on a batch of one sample, and a module may ask for a Trainer that is not there.

    Args:
        error: The error.
        client: The client that trained.
        phase: The phase that it was in.
        context: The client, the round and the data.
    """
    if _misses_trainer(error):
        return _no_trainer(client.step_module)
    if not str(error).startswith("Expected more than 1 value per channel"):
        return error
    count, size = context.data.num_samples, context.data.batch_size
    reason = (
        f"batch normalization cannot train on a batch of one item in phase {phase.name!r}, which {count} training "
        f"item{'s' * (count > 1)} in batches of {size} leave; {SINGLE_ITEM}"
    )
    if phase.plain and count == 1:
        return ClientError(context.client, context.round, reason)
    return ConfigurationError(f"{context.who}, round {context.round + 1}: {reason}")


@contextmanager
def needs_no_trainer(module: nn.Module) -> Iterator[None]:
    """Explain what to do when a module asks for a Trainer that is not there."""
    try:
        yield
    except RuntimeError as error:
        if not _misses_trainer(error):
            raise
        raise _no_trainer(module) from error


def _misses_trainer(error: Exception) -> bool:
    return "not attached to a `Trainer`" in str(error)


def _no_trainer(module: nn.Module) -> ConfigurationError:
    name = type(module).__name__
    return ConfigurationError(
        f"{name} uses self.trainer (or self.optimizers(), self.lr_schedulers() or the like) where there is none: "
        f"TrainerEngine has a Trainer, for {name} and for modules that are attributes of it, not for those in lists or "
        "dictionaries, or inside a plain nn.Module"
    )
