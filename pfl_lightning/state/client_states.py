"""Per-client state store, in memory or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State
from pfl_lightning.state.row_storage import Rows, first_rows

__all__ = ["ClientStates", "Journal", "spill_to_disk"]


class Journal:
    """Earlier states of the clients that have stored something else since the journal was begun.

    Attributes:
        rows: Earlier state of each such client; ``None`` for one that had stored nothing. In the order of the changes.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Tensor] | None] = {}


class ClientStates:
    """Per-client state store on the host: one array per name, one row per client.

    A client that never stored anything has the initial value and costs nothing: rows are assigned in the order in
    which clients first store something.

    Args:
        initial: Initial state of every client, by name; may be empty.
        num_clients: Number of clients, m.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.client_states import ClientStates
        >>> states = ClientStates({"head": torch.zeros(2)}, num_clients=1000)
        >>> states.set(7, {"head": torch.tensor([1.0, 2.0])})
        >>> states.get(7), states.get(8)
        ({'head': tensor([1., 2.])}, {'head': tensor([0., 0.])})
        >>> states.num_bytes, states.most_bytes  # one client of 1000 has a row of two float32
        (8, 8000)
    """

    def __init__(self, initial: State, num_clients: int) -> None:
        self.num_clients = num_clients
        self.initial = {name: tensor.detach().cpu().clone() for name, tensor in initial.items()}
        self._rows: Rows | None = None  # made when first needed
        self._row_of: dict[int, int] = {}  # in the order of the rows
        self._folder: str | None = None  # of the file, where the rows are in one
        self._journals: WeakSet[Journal] = WeakSet()  # each is kept for as long as a snapshot holds it

    def __len__(self) -> int:
        return self.num_clients

    @property
    def on_disk(self) -> bool:
        """Whether the rows are stored in a file."""
        return self._folder is not None

    def move_to_disk(self, folder: str | None = None) -> None:
        """Keep all rows in a file from now on, those already stored included.

        Args:
            folder: Folder of the file; ``None`` is the system's folder for temporary files.

        Raises:
            FederationError: The file cannot be made, or the disk is full.
        """
        stored, place = self._stored(), folder or tempfile.gettempdir()
        self._rows, self._folder = Rows(self.initial, self.num_clients, place), place
        self._write(stored)

    def written(self, client: int) -> bool:
        """Whether the client's state was ever stored."""
        return client in self._row_of

    def get(self, client: int) -> dict[str, Tensor]:
        """State of the client; views into the store, read only."""
        row = self._row_of.get(client)
        if row is None or self._rows is None:
            return dict(self.initial)
        return {name: array[row] for name, array in self._rows.arrays.items()}

    def set(self, client: int, state: State) -> None:
        """Store a copy of the client's state.

        Raises:
            IndexError: There is no such client.
            FederationError: The memory or the disk is full.
        """
        if not 0 <= client < self.num_clients:
            raise IndexError(f"there is no client {client}; clients are 0 to {self.num_clients - 1}")
        if not self.initial:
            return
        for journal in self._journals:
            if client not in journal.rows:
                own = self.get(client).items() if self.written(client) else None
                journal.rows[client] = None if own is None else {name: tensor.clone() for name, tensor in own}
        row = self._row_of.get(client, len(self._row_of))
        for name in self.initial:
            self._room.write(name, row, state[name][None])
        self._row_of[client] = row

    def journal(self) -> Journal:
        """Begin to keep what clients have stored before they store something else."""
        journal = Journal()
        self._journals.add(journal)
        return journal

    def undo(self, journal: Journal) -> None:
        """Let all clients have again what they had stored when the journal was begun."""
        for client, state in journal.rows.items():
            if state is None:  # its row is behind those of all clients that had one
                self._row_of.pop(client, None)
            else:
                for name, tensor in state.items():
                    self._room.write(name, self._row_of[client], tensor[None])
        journal.rows.clear()

    @property
    def _room(self) -> Rows:
        if self._rows is None:
            self._rows = Rows(self.initial, self.num_clients)
        return self._rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the written rows."""
        return self._row_bytes * len(self._row_of)

    @property
    def most_bytes(self) -> int:
        """Bytes of the rows of all clients, written or not."""
        return self._row_bytes * self.num_clients

    @property
    def _row_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.initial.values())

    def _stored(self) -> dict[str, Tensor]:
        """Written rows by name, not copied."""
        if self._rows is None:
            return {name: tensor.new_empty((0, *tensor.shape)) for name, tensor in self.initial.items()}
        return {name: first_rows(array, len(self._row_of)) for name, array in self._rows.arrays.items()}

    def _write(self, rows: State) -> None:
        for name, values in rows.items():
            if len(values):
                self._room.write(name, 0, values)

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: only the written rows, not copied, and their clients."""
        written = torch.tensor(list(self._row_of), dtype=torch.int64)
        return {
            "num_clients": self.num_clients,
            "written": written,
            "rows": self._stored(),
            "initial": dict(self.initial),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, from memory or disk.

        Raises:
            CheckpointError: Another number of clients, other names or other shapes, or rows are missing.
            FederationError: The memory or the disk is full.
        """
        if state["num_clients"] != self.num_clients:
            raise CheckpointError(
                f"the checkpoint holds {state['num_clients']} clients, this federation has {self.num_clients}; "
                "use the partition that the checkpoint was made with"
            )
        shapes = {name: tuple(t.shape) for name, t in self.initial.items()}
        found = {name: tuple(t.shape) for name, t in state["initial"].items()}
        if shapes != found:
            raise CheckpointError(
                f"the checkpoint's personal state has shapes {found}, this federation's has {shapes}; "
                "use the method and the encoder that the checkpoint was made with"
            )
        clients = state["written"].tolist()
        self._check_rows(clients, state["rows"])
        self.initial = {name: state["initial"][name].to(own.dtype, copy=True) for name, own in self.initial.items()}
        self._write(state["rows"])
        self._row_of = {client: row for row, client in enumerate(clients)}

    def _check_rows(self, clients: Sequence[int], rows: State) -> None:
        """Refuse rows that do not belong to the clients one by one: what is missing would be uninitialized memory."""
        if len(set(clients)) < len(clients) or not set(clients) <= set(range(self.num_clients)):
            raise CheckpointError(
                f"the checkpoint is damaged: the clients that have stored states are {clients[:20]}, expected "
                f"different numbers from 0 to {self.num_clients - 1}"
            )
        for name, own in self.initial.items():
            found, expected = tuple(rows[name].shape) if name in rows else None, (len(clients), *own.shape)
            if found != expected:
                raise CheckpointError(
                    f"the checkpoint is incomplete: the clients' stored {name} has shape {found}, expected {expected}; "
                    "use another checkpoint"
                )

    # A file and its map cannot be copied as they are.
    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.state_dict(), "folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state["content"]
        self.__init__(content["initial"], content["num_clients"])  # type: ignore[misc]
        if state["folder"] is not None:
            self.move_to_disk(state["folder"])
        self.load_state_dict(content)


def spill_to_disk(limit_gb: float | None, stores: Sequence[ClientStates], folder: str | None = None) -> None:
    """Move all stores to disk if together they can outgrow a limit.

    Args:
        limit_gb: Limit in gigabytes (10^9 bytes), compared with the rows of all clients together; ``None`` for no
            limit.
        stores: The stores.
        folder: Folder of the files; ``None`` is the system's folder for temporary files.

    Raises:
        FederationError: The files cannot be made.

    Example:
        >>> import torch
        >>> from pfl_lightning.state.client_states import ClientStates, spill_to_disk
        >>> store = ClientStates({"head": torch.zeros(250)}, num_clients=10)  # 10^4 bytes
        >>> spill_to_disk(limit_gb=1.0, stores=[store])
        >>> store.on_disk
        False
        >>> spill_to_disk(limit_gb=1e-6, stores=[store])  # 10^3 bytes
        >>> store.on_disk
        True
    """
    if limit_gb is not None and sum(store.most_bytes for store in stores) > limit_gb * 1e9:
        for store in stores:
            if store.most_bytes:
                store.move_to_disk(folder)
