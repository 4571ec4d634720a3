"""Clients that the data themselves tell: no rule divides the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfl_lightning.datamodules.counting import Ints, Labels
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError


class AsGiven(Partitioner):
    """The clients' samples as they are given; there is no rule.

    Args:
        num_clients: Number of clients m.
        names: A name for each client, such as those of hospitals; none for clients that have numbers alone.

    Raises:
        ValueError: If a name is empty, or two are the same.
    """

    needs_labels = False
    fixed_train = fixed_test = True

    def __init__(self, num_clients: int, names: Sequence[str] = ()) -> None:
        super().__init__(num_clients)
        self.client_names = checked_client_names(names, self.num_clients) if len(names) else ()

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Refuse: the data module itself knows what is whose."""
        raise PartitionError("silos are already divided among clients: use a rule, such as IID(10), for other data")


def checked_client_names(names: Sequence[str], num_clients: int) -> tuple[str, ...]:
    """Names of clients, without blanks around them.

    Args:
        names: A name for each client.
        num_clients: Number of clients m.

    Raises:
        ValueError: If there are more or fewer, one is empty or has a line break, or two are the same.

    Example:
        >>> checked_client_names(["Lyon", "Nice "], 2)
        ('Lyon', 'Nice')
    """
    found = tuple(str(name).strip() for name in names)
    if len(found) != num_clients:
        raise ValueError(f"client_names must be a name for each of {num_clients} clients, got {len(found)}")
    for client, name in enumerate(found):
        if not name.isprintable() or not name:
            raise ValueError(f"the name of client {client} is {names[client]!r}: expected one line that is not empty")
    name, count = Counter(found).most_common(1)[0]
    if count > 1:
        same = [client for client, own in enumerate(found) if own == name]
        raise ValueError(
            f"clients {', '.join(map(str, same))} are all named {name!r} (spaces around a name do not count): give "
            "each client its own name, or merge their data into one client"
        )
    return found


def clients_of(owners: Sequence[Any]) -> tuple[Ints, AsGiven]:
    """Client of each item, and the rule of these clients.

    Args:
        owners: Whose each item is: whole numbers or strings, shape (N,).

    Returns:
        Numbers of the clients from 0, by their sorted numbers or names; and a rule that names the clients, unless the
        numbers are those of the clients already.

    Raises:
        ValueError: If an entry is neither, or all are the same.

    Example:
        >>> numbers, rule = clients_of(["Nice", "Lyon", "Nice"])
        >>> numbers.tolist(), rule.client_names
        ([1, 0, 1], ('Lyon', 'Nice'))
        >>> clients_of([0, 1, 1])[1].client_names
        ()
    """
    given = [owner.item() if hasattr(owner, "item") else owner for owner in owners]
    wrong = [place for place, owner in enumerate(given) if isinstance(owner, bool) or not isinstance(owner, int | str)]
    if wrong or len({type(owner) for owner in given}) > 1:
        place = wrong[0] if wrong else 0
        raise ValueError(
            f"clients must be whole numbers, or strings, one for each item, got {given[place]!r} for item {place}"
            + ("" if wrong else " and others of another kind")
        )
    present = sorted(set(given))
    if len(present) < 2:
        raise ValueError(f"all {len(given)} items belong to one client, {present}: a federation needs at least two")
    places = {owner: client for client, owner in enumerate(present)}
    names = () if present == [*range(len(present))] else tuple(map(str, present))
    return np.array([places[owner] for owner in given], dtype=np.int64), AsGiven(len(present), names)
