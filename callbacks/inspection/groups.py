"""Groups of similar clients, for the order and the marks in a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClientGroups", "group_clients"]

SHARE_OF_LARGEST = 0.5  # a client's own classes are those with at least half the samples of its largest one


@dataclass(frozen=True)
class ClientGroups:
    """Clients that have the same classes and the same design (domain, rotation, labels).

    Attributes:
        names: A name for each group, in their order; a single "" if there is only one group.
        group_of: Group of each client, shape (m,).
    """

    names: tuple[str, ...]
    group_of: NDArray[np.int64]

    def order(self, clients: Sequence[int]) -> list[int]:
        """Positions of ``clients`` sorted by group, and by id within a group."""
        return sorted(range(len(clients)), key=lambda place: (self.group_of[clients[place]], clients[place]))


def group_clients(
    counts: NDArray[np.int64], class_names: Sequence[str], design: Sequence[str] | None = None
) -> ClientGroups:
    """Groups of clients with the same design and the same dominant classes.

    Dominant classes are those with at least half the samples of the client's largest class. If that makes more groups
    than half the clients, groups are by design alone; if the design does so too, there is a single group.

    Args:
        counts: Number of training samples of each class at each client, shape (m, C).
        class_names: A name for each class.
        design: Label of each client by design, such as its domain; ``None`` for none.

    Example:
        >>> counts = np.array([[9, 1], [8, 0], [1, 9], [0, 7]])
        >>> groups = group_clients(counts, class_names=["cat", "dog"])
        >>> groups.names, groups.group_of.tolist()
        (('cat', 'dog'), [0, 0, 1, 1])
    """
    own = [tuple(np.flatnonzero(row >= SHARE_OF_LARGEST * max(row.max(), 1)).tolist()) for row in counts]
    labels = list(design) if design is not None else [""] * len(counts)
    for keys in ([(label, classes) for label, classes in zip(labels, own, strict=True)], [(la, ()) for la in labels]):
        distinct = list(dict.fromkeys(keys))  # in the order of their first clients
        if 1 < len(distinct) <= len(counts) / 2:
            every = all(len(classes) == counts.shape[1] for _, classes in distinct)
            names = [_name(label, () if every else classes, class_names) for label, classes in distinct]
            return ClientGroups(tuple(names), np.array([distinct.index(key) for key in keys], dtype=np.int64))
    return ClientGroups(("",), np.zeros(len(counts), dtype=np.int64))


def _name(label: str, classes: Sequence[int], class_names: Sequence[str]) -> str:
    named = [str(class_names[c]) for c in classes[:4]] + (["..."] if len(classes) > 4 else [])
    return ": ".join(filter(None, (label, " ".join(named))))
