"""A part of the state for every client, at rest."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State
from pfl_lightning.state.row_storage import FileRows, MemoryRows, Rows, first_rows

__all__ = ["ClientStates", "spill_to_disk"]


class ClientStates:
    """A part of the state for every client, at rest on the host: one array per name, one row per client.

    A client that never stored anything has the initial value and costs nothing: rows are handed out in the order in
    which clients first store something.

    Args:
        initial: What every client starts from; may be empty.
        num_clients: Number of clients, m.
    """

    def __init__(self, initial: State, num_clients: int) -> None:
        self.num_clients = num_clients
        self.initial = {name: tensor.detach().cpu().clone() for name, tensor in initial.items()}
        self._rows: Rows | None = None  # made when first needed
        self._row_of: dict[int, int] = {}  # in the order of the rows
        self._on_disk = False
        self._folder: str | None = None

    def __len__(self) -> int:
        return self.num_clients

    @property
    def on_disk(self) -> bool:
        """Whether the rows rest in a file."""
        return self._on_disk

    def rest_on_disk(self, folder: str | None = None) -> None:
        """Keep all rows in a file, those that were stored already, too.

        Args:
            folder: Where the file lies; ``None`` is the system's folder for temporary files.

        Raises:
            FederationError: There can be no such file, or no room for the rows.
        """
        stored = self._stored()
        self._rows, self._on_disk, self._folder = FileRows(self.initial, self.num_clients, folder), True, folder
        self._write(stored)

    def written(self, client: int) -> bool:
        """Whether the client's state was ever stored."""
        return client in self._row_of

    def get(self, client: int) -> dict[str, Tensor]:
        """The client's state; views into the store, not to be changed."""
        row = self._row_of.get(client)
        if row is None or self._rows is None:
            return dict(self.initial)
        return {name: array[row] for name, array in self._rows.arrays.items()}

    def set(self, client: int, state: State) -> None:
        """Store a copy of the client's state.

        Raises:
            FederationError: There is no room for it.
        """
        if not 0 <= client < self.num_clients:
            raise IndexError(f"there is no client {client}; clients are 0 to {self.num_clients - 1}")
        if not self.initial:
            return
        row = self._row_of.get(client, len(self._row_of))
        for name in self.initial:
            self._room.write(name, row, state[name][None])
        self._row_of[client] = row

    @property
    def _room(self) -> Rows:
        if self._rows is None:
            self._rows = MemoryRows(self.initial, self.num_clients)
        return self._rows

    @property
    def num_bytes(self) -> int:
        """Bytes that the written rows take."""
        return self._row_bytes * len(self._row_of)

    @property
    def most_bytes(self) -> int:
        """Bytes that the rows of all clients would take."""
        return self._row_bytes * self.num_clients

    @property
    def _row_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.initial.values())

    def _stored(self) -> dict[str, Tensor]:
        """The written rows, not copied."""
        if self._rows is None:
            return {name: tensor.new_empty((0, *tensor.shape)) for name, tensor in self.initial.items()}
        return {name: first_rows(array, len(self._row_of)) for name, array in self._rows.arrays.items()}

    def _write(self, rows: State) -> None:
        for name, values in rows.items():
            if len(values):
                self._room.write(name, 0, values)

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: only the rows that were written, not copied, and the clients that they are of."""
        written = torch.tensor(list(self._row_of), dtype=torch.int64)
        return {
            "num_clients": self.num_clients,
            "written": written,
            "rows": self._stored(),
            "initial": dict(self.initial),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, wherever the rows rested then.

        Raises:
            CheckpointError: Another number of clients, other names or other shapes.
            FederationError: There is no room for it.
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
        self.initial = {name: state["initial"][name].to(own.dtype, copy=True) for name, own in self.initial.items()}
        self._write(state["rows"])
        self._row_of = {client: row for row, client in enumerate(state["written"].tolist())}

    # A file and its map cannot be copied as they are.
    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.state_dict(), "on_disk": self._on_disk, "folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state["content"]
        self.__init__(content["initial"], content["num_clients"])  # type: ignore[misc]
        if state["on_disk"]:
            self.rest_on_disk(state["folder"])
        self.load_state_dict(content)


def spill_to_disk(limit_gb: float | None, stores: Sequence[ClientStates], folder: str | None = None) -> None:
    """Let all stores rest on disk if together they can outgrow a limit.

    Args:
        limit_gb: The limit in gigabytes (10^9 bytes), compared with what all clients together would take; ``None`` for
            no limit.
        stores: The stores.
        folder: Where the files lie; ``None`` is the system's folder for temporary files.

    Raises:
        FederationError: There can be no such files.
    """
    most = sum(store.most_bytes for store in stores)
    if limit_gb is None or most <= limit_gb * 1e9:
        return
    for store in stores:
        if store.most_bytes:
            store.rest_on_disk(folder)
    place = folder or tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if most > free:
        warnings.warn(
            f"the clients' state rests in {place}, where {free / 1e9:.3g} GB are free; it grows with the clients that "
            f"take part, to {most / 1e9:.3g} GB when all of them have. Give the Federation a spill_dir with more "
            "room unless few take part",
            stacklevel=2,
        )
