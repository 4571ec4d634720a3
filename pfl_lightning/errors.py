"""Errors of a federation; each message names the expected and the given value, and a remedy."""

from __future__ import annotations

from typing import Any

from pfl_lightning.notices import Names, named_clients


class FederationError(RuntimeError):
    """A federation cannot be set up, or cannot go on."""


class ConfigurationError(FederationError, ValueError):
    """An argument, or a combination of arguments, has no meaning."""


class NoSuchClientError(ConfigurationError, IndexError):
    """There is no client of this number or name."""


class UsageError(ConfigurationError):
    """A command line is mistaken, or a file of settings that it names: ``pfl`` exits with status 2."""


def refused(error: Exception) -> UsageError:
    """What an error says of an option, as a refusal of the command line that has it.

    Args:
        error: The error, whose notes are taken over.
    """
    found = UsageError(str(error))
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no room in memory: Python's, or one of PyTorch's, which have no class.

    Args:
        error: Any error.
    """
    known = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return known or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


class CheckpointError(FederationError):
    """A checkpoint is damaged, or does not fit the federation that loads it."""


class DiskFullError(FederationError):
    """A file does not fit on its disk."""


class RunLockedError(FederationError):
    """A run's folder is in use by another process."""


class ClientError(FederationError):
    """One client cannot take part in a round; the message names both.

    The :class:`~pfl_lightning.callbacks.FederatedLoop` leaves such a client out of the aggregation with a warning and
    goes on while enough clients remain.

    Args:
        client: Number of the client.
        round: Number of the round, from 0; the message counts from 1.
        reason: Reason and remedy.

    Example:
        >>> from pfl_lightning.errors import ClientError
        >>> raise ClientError(client=3, round=1, reason="its loss is NaN; lower the learning rate")
        Traceback (most recent call last):
        pfl_lightning.errors.ClientError: client 3, round 2: its loss is NaN; lower the learning rate
    """

    def __init__(self, client: int, round: int, reason: str) -> None:
        super().__init__(f"client {client}, round {round + 1}: {reason}")
        self.client = client
        self.round = round
        self.reason = reason

    def told(self, names: Names) -> str:
        """The message, with the client's name where clients have names."""
        return f"{named_clients([self.client], names)}, round {self.round + 1}: {self.reason}"

    def __reduce__(self) -> tuple[type[ClientError], tuple[int, int, str]]:
        """Support pickling between processes (the default would call ``__init__`` with the message alone)."""
        return type(self), (self.client, self.round, self.reason)


class NonFiniteLossError(ClientError):
    """A client's loss became NaN or infinite."""


class InvalidMessageError(ClientError):
    """A message holds non-finite or misshapen content."""


class ClientCodeError(ClientError):
    """A client's own code or data has raised an exception in its local fit.

    Args:
        client: Number of the client.
        round: Number of the round, from 0.
        reason: Reason and remedy.
        cause: The exception.
        trace: Its traceback, as text.
    """

    def __init__(self, client: int, round: int, reason: str, cause: Exception | None = None, trace: str = "") -> None:
        super().__init__(client, round, reason)
        self.cause, self.trace = cause, trace

    def __reduce__(self) -> tuple[type[ClientCodeError], tuple[Any, ...]]:  # type: ignore[override]
        """Support pickling between processes."""
        return type(self), (self.client, self.round, self.reason, self.cause, self.trace)
