"""Assignment of a list of encoders to the clients of a federation."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pfl_lightning.encoders.registry import encoder_class
from pfl_lightning.errors import ConfigurationError

EncoderFactory = Callable[[tuple[int, ...]], nn.Module]


def encoder_label(encoder: str | EncoderFactory) -> str:
    """Return the name of an encoder for tables.

    Args:
        encoder: A registered name, or a factory that makes an encoder from the shape of a sample.

    Returns:
        The name itself; for a factory the name of its class or function, also inside ``functools.partial``.

    Example:
        >>> from pfl_lightning.encoders import MLP
        >>> encoder_label("fedpac_cnn"), encoder_label(functools.partial(MLP, hidden=(32,)))
        ('fedpac_cnn', 'MLP')
    """
    if isinstance(encoder, str):
        return encoder
    made, _ = unwrapped(encoder)
    return str(getattr(made, "__qualname__", type(made).__qualname__))


def unwrapped(made: Any) -> tuple[Any, dict[str, Any]]:
    """What partials call in the end, and the arguments that they give it by name.

    Example:
        >>> from pfl_lightning.encoders import MLP
        >>> unwrapped(functools.partial(MLP, hidden=(32,)))
        (<class 'pfl_lightning.encoders.mlp.MLP'>, {'hidden': (32,)})
    """
    given: dict[str, Any] = {}
    while isinstance(made, functools.partial):
        given = {**made.keywords, **given}
        # jsonargparse passes a class with arguments as a partial of its own function, applied to the class.
        classes = [argument for argument in made.args if inspect.isclass(argument) and issubclass(argument, nn.Module)]
        made = classes[0] if classes else made.func
    return made, given


class EncoderAssignment(ABC):
    """Assignment of a list of encoders to clients. A subclass overrides :meth:`assign`.

    Args:
        encoders: Registered names, or factories that make an encoder from the shape of a sample (a class, a
            ``functools.partial``); the same one may be listed several times.

    Raises:
        ValueError: If a name is unknown.
        ConfigurationError: If there is no list of encoders, or an entry is neither a name nor callable.

    Example:
        The first client gets the first encoder, all other clients the second:

        >>> from pfl_lightning.encoders import EncoderAssignment
        >>> class OneStrongClient(EncoderAssignment):
        ...     def assign(self, num_clients):
        ...         return [0] + [1] * (num_clients - 1)
        >>> assignment = OneStrongClient(["resnet18_small", "small_cnn"])
        >>> [assignment.labels[index] for index in assignment.assign(num_clients=3)]
        ['resnet18_small', 'small_cnn', 'small_cnn']
    """

    def __init__(self, encoders: list[str | EncoderFactory]) -> None:
        listed = isinstance(encoders, Sequence) and not isinstance(encoders, str) and len(encoders) > 0
        if not listed or not all(isinstance(encoder, str) or callable(encoder) for encoder in encoders):
            raise ConfigurationError(
                f"{type(self).__name__} needs a list of encoders, each a registered name or a callable from the shape "
                f"of a sample to an encoder, such as ['small_cnn', 'mlp']; got {encoders!r}"
            )
        for encoder in encoders:
            if isinstance(encoder, str):
                encoder_class(encoder)
        self.encoders: list[str | EncoderFactory] = list(encoders)

    @property
    def labels(self) -> list[str]:
        """Names of the encoders for tables, in the order of ``encoders``."""
        return [encoder_label(encoder) for encoder in self.encoders]

    @abstractmethod
    def assign(self, num_clients: int) -> list[int]:
        """Return each client's encoder.

        Args:
            num_clients: Number of clients.

        Returns:
            For each client the index of its encoder in ``encoders``.

        Raises:
            ValueError: If the assignment is for another number of clients.
        """


class RoundRobin(EncoderAssignment):
    """Encoder k modulo the number of encoders for client k, as in FedClassAvg.

    With fewer clients than encoders, the last encoders have no client.

    Args:
        encoders: See :class:`EncoderAssignment`.

    Example:
        >>> from pfl_lightning.encoders import RoundRobin
        >>> RoundRobin(["resnet18_small", "small_cnn"]).assign(num_clients=5)
        [0, 1, 0, 1, 0]
    """

    def assign(self, num_clients: int) -> list[int]:
        """Return 0, 1, ... and again from 0; see :meth:`EncoderAssignment.assign`."""
        return [client % len(self.encoders) for client in range(num_clients)]


class ByShare(EncoderAssignment):
    """Given share of the clients for each encoder.

    The numbers of clients are rounded by largest remainders (on a tie the first encoder in the list gains), so each is
    less than one client away from its share. An encoder with a share below one client may have none. The encoders are
    spread evenly, not in blocks: partitions often give neighboring clients similar labels, and the first clients of a
    federation are then a fair sample too. Equal shares are assigned as by :class:`RoundRobin`.

    Args:
        encoders: See :class:`EncoderAssignment`.
        shares: For each encoder its share of the clients, positive; they sum to one.

    Raises:
        ValueError: If there are more or fewer shares than encoders, one is not positive, or they do not sum to one.

    Example:
        >>> from pfl_lightning.encoders import ByShare
        >>> ByShare(["resnet18_small", "small_cnn"], shares=[0.25, 0.75]).assign(num_clients=8)
        [1, 0, 1, 1, 1, 0, 1, 1]
    """

    def __init__(self, encoders: list[str | EncoderFactory], shares: list[float]) -> None:
        super().__init__(encoders)
        # Not so with NaN: no comparison with it holds.
        if len(shares) != len(self.encoders) or not min(shares) > 0 or not abs(sum(shares) - 1) <= 1e-6:
            raise ValueError(
                f"ByShare needs a share above 0 for each of {len(self.encoders)} encoders, with the sum 1, got "
                f"{list(shares)}; RoundRobin assigns equal shares"
            )
        self.shares = list(shares)

    def assign(self, num_clients: int) -> list[int]:
        """Return each client's encoder, the one furthest behind its share; see :meth:`EncoderAssignment.assign`."""
        # Rounding makes 0.7 * 10 = 7.000000000000001 and 0.29 * 100 = 28.999999999999996 the numbers that are meant.
        exact = [round(share / sum(self.shares) * num_clients, 6) for share in self.shares]
        counts = [math.floor(number) for number in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
        for index in by_remainder[: num_clients - sum(counts)]:
            counts[index] += 1
        assigned = [0] * len(counts)
        clients = []
        for client in range(1, num_clients + 1):
            # In whole numbers: the count due among the first `client` clients less the assigned one, times num_clients.
            behind = [count * client - num_clients * done for count, done in zip(counts, assigned)]
            chosen = behind.index(max(behind))
            assigned[chosen] += 1
            clients.append(chosen)
        return clients


class ByClient(EncoderAssignment):
    """Explicit list of each client's encoder.

    Args:
        encoders: See :class:`EncoderAssignment`.
        clients: For each client the index of its encoder in ``encoders``, or its name (of a factory: its label, see
            :func:`encoder_label`).

    Raises:
        ValueError: If an index or a name is not in the list of encoders, or a name is there several times.

    Example:
        >>> from pfl_lightning.encoders import ByClient
        >>> assignment = ByClient(["resnet18_small", "small_cnn"], clients=["small_cnn", 0, 0])
        >>> assignment.assign(num_clients=3)
        [1, 0, 0]
    """

    def __init__(self, encoders: list[str | EncoderFactory], clients: list[int | str]) -> None:
        super().__init__(encoders)
        self.clients = [self._index(client, encoder) for client, encoder in enumerate(clients)]

    def assign(self, num_clients: int) -> list[int]:
        """Return the list that was given; see :meth:`EncoderAssignment.assign`."""
        if len(self.clients) != num_clients:
            raise ValueError(
                f"ByClient lists encoders for {len(self.clients)} clients, the federation has {num_clients}; give one "
                "entry per client"
            )
        return list(self.clients)

    def _index(self, client: int, encoder: int | str) -> int:
        known = [index for index, label in enumerate(self.labels) if encoder == label]
        if isinstance(encoder, int) and not isinstance(encoder, bool) and encoder in range(len(self.encoders)):
            known = [encoder]
        if len(known) != 1:
            listed = ", ".join(f"{index}: {label}" for index, label in enumerate(self.labels))
            raise ValueError(
                f"client {client} of ByClient: {encoder!r} is neither an index nor a unique name of the encoders "
                f"{listed}"
            )
        return known[0]
