"""Stored states of clients with several architectures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State
from pfl_lightning.state.client_states import ClientStates

__all__ = ["GroupedStates"]


class GroupedStates:
    """:class:`ClientStates` of several architectures, by client number.

    Args:
        initials: Initial state of each architecture's clients.
        groups: The architecture of each client, as an index into ``initials``.

    Attributes:
        stores: One for each architecture.

    Example:
        Clients 0 and 2 have the first architecture, client 1 the second:

        >>> import torch
        >>> from pfl_lightning.state.grouped_states import GroupedStates
        >>> initials = [{"head": torch.zeros(2)}, {"head": torch.zeros(3)}]
        >>> states = GroupedStates(initials, groups=[0, 1, 0])
        >>> states.set(2, {"head": torch.tensor([1.0, 2.0])})
        >>> states.get(2), states.get(1)
        ({'head': tensor([1., 2.])}, {'head': tensor([0., 0., 0.])})
        >>> states.num_bytes  # one row of two float32
        8
    """

    def __init__(self, initials: Sequence[State], groups: Sequence[int]) -> None:
        self._group = np.array(groups, dtype=np.int32)
        self._place = np.zeros(len(groups), dtype=np.int64)  # of a client among those of its architecture
        sizes = np.bincount(self._group, minlength=len(initials)).tolist()
        for group, size in enumerate(sizes):
            self._place[self._group == group] = np.arange(size)
        self.stores = [ClientStates(initial, size) for initial, size in zip(initials, sizes, strict=True)]

    @property
    def num_clients(self) -> int:
        """Number of clients, m."""
        return len(self._group)

    def written(self, client: int) -> bool:
        """Whether the client's state was ever stored."""
        store, place = self._of(client)
        return store.written(place)

    def get(self, client: int) -> dict[str, Tensor]:
        """State of the client; views into the store, read only."""
        store, place = self._of(client)
        return store.get(place)

    def set(self, client: int, state: State) -> None:
        """Store a copy of the client's state."""
        store, place = self._of(client)
        store.set(place, state)

    def _of(self, client: int) -> tuple[ClientStates, int]:
        return self.stores[self._group[client]], int(self._place[client])

    @property
    def num_bytes(self) -> int:
        """Bytes of the written rows."""
        return sum(store.num_bytes for store in self.stores)

    @property
    def _assignment(self) -> str:
        """Hash of the clients' architectures: all that the checkpoint of many clients needs."""
        return hashlib.sha256(self._group.astype("<i4").tobytes()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: only the rows that were written."""
        return {
            "num_clients": self.num_clients,
            "assignment": self._assignment,
            "stores": [store.state_dict() for store in self.stores],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: Other clients, other architectures or another assignment of them.
        """
        if state["num_clients"] != self.num_clients:
            raise CheckpointError(
                f"the checkpoint holds {state['num_clients']} clients, this federation has {self.num_clients}; "
                "use the partition that the checkpoint was made with"
            )
        found = [content["num_clients"] for content in state["stores"]]
        own = [store.num_clients for store in self.stores]
        if state["assignment"] != self._assignment or len(found) != len(own):
            raise CheckpointError(
                f"the checkpoint assigns its architectures to {found} clients, this federation to {own}, and not to "
                "the same ones; use the encoders that the checkpoint was made with"
            )
        for store, content in zip(self.stores, state["stores"], strict=True):
            store.load_state_dict(content)
