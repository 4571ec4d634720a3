"""Advice for errors that a local fit may end in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.errors import ClientError, ConfigurationError

__all__ = ["explained", "needs_no_trainer", "single_item_advice"]


def explained(
    error: Exception, client: FederatedClient, phase: Phase, context: FitContext, trainer_given: bool
) -> Exception:
    """Return the error with the advice that it needs, or as it is.

    Batch normalization cannot train on a batch of one sample, and a module may ask for a Trainer that is not there.

    Args:
        error: The error.
        client: The client that trained.
        phase: The phase that it was in.
        context: The client, the round and the data.
        trainer_given: Whether the engine gives modules a Trainer.
    """
    if _misses_trainer(error):
        return _not_attached(client.step_module, context) if trainer_given else _no_trainer(client.step_module)
    if not str(error).startswith("Expected more than 1 value per channel"):
        return error
    count, size = context.data.num_samples, context.data.batch_size
    if phase.plain and count == 1:
        return ClientError(
            context.client,
            context.round,
            f"batch normalization cannot train in phase {phase.name!r} on the client's only training sample; give "
            "it more samples, or train the head alone",
        )
    return ConfigurationError(
        f"client {context.client}, round {context.round + 1}: batch normalization cannot train on a batch of one "
        f"sample, and {count} training sample{'s' * (count > 1)} in batches of {size} leave such a "
        f"batch; {single_item_advice([count], size, phase.plain)}"
    )


def single_item_advice(counts: Sequence[int], size: int, plain: bool = False) -> str:
    """Advice for clients with so many items each in batches of a size.

    Args:
        counts: Training items of each client.
        size: Items in a batch.
        plain: Whether ``drop_last`` does not count.

    Example:
        >>> single_item_advice([65, 100, 6], size=64)
        'set batch_size to 63, which leaves no such batch'
    """
    if min(counts) == 1:
        return (
            "a client with one item has no other batch, whatever the batch_size: give it more (min_samples of "
            "DirichletOverClients, fewer clients), leave such clients out, or use a network without batch normalization"
        )
    others = sorted(range(2, 2 * size + 2), key=lambda other: (abs(other - size), other))
    fitting = next((other for other in others if all(count % other != 1 for count in counts)), None)
    ways = [] if fitting is None else [f"set batch_size to {fitting}, which leaves no such batch"]
    if not plain and size > 1 and min(counts) >= size:
        ways.append("set drop_last to true")
    return ", or ".join(ways) or "divide the data otherwise, or use a network without batch normalization"


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


def _not_attached(module: nn.Module, context: FitContext) -> ConfigurationError:
    name = type(module).__name__
    return ConfigurationError(
        f"client {context.client}, round {context.round + 1}: a LightningModule inside {name} uses self.trainer, which "
        f"Lightning gives to {name} and to modules that are attributes of it, not to modules in lists or dictionaries, "
        f"or inside a plain nn.Module: make it an attribute of {name}, or pass it what it needs"
    )


def _no_trainer(module: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"{type(module).__name__} uses self.trainer (or self.optimizers(), self.lr_schedulers() or the like), and "
        "SequentialEngine has no Trainer: use TrainerEngine"
    )
