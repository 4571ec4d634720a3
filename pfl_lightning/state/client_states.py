"""Per-client state store, in memory or on disk."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl_lightning.errors import CheckpointError, FederationError
from pfl_lightning.functional.tensor_lists import HOST, moved
from pfl_lightning.messages import State

__all__ = ["ClientStates", "Journal", "spill_to_disk"]

SAID_GB = 1.0
"""Gigabytes (10^9 bytes) from which a federation says before its first round where the clients' states are kept."""


class Journal:
    """Earlier states of the clients that have stored something else since the journal was begun.

    Attributes:
        rows: Earlier state of each such client; ``None`` for one that had stored nothing. In the order of the changes.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Tensor] | None] = {}


class ClientStates:
    """Per-client state store on the host: one array per name, one row per client, in memory or in a temporary file.

    A client that never stored anything has the initial value and costs nothing: rows are assigned in the order in
    which clients first store something, and one that was never written takes neither memory nor disk.

    The file is mapped into memory, of which the operating system caches as much as fits. It is sparse and has no name:
    its space is free again as soon as the process ends, however it ends. It is read through the map and written by
    write calls. On a full disk these fail with an error, whereas a write through the map would end the process by a
    signal (SIGBUS).

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
        self._arrays: dict[str, Tensor] | None = None  # made when first needed; `_write` alone changes them
        self._row_of: dict[int, int] = {}  # in the order of the rows
        self._folder: str | None = None  # of the file, where the rows are in one
        self._file: Any = None
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
        stored = self._stored()
        self._folder, self._arrays = folder or tempfile.gettempdir(), None
        self._write(0, stored)

    def written(self, client: int) -> bool:
        """Whether the client's state was ever stored."""
        return client in self._row_of

    def get(self, client: int) -> dict[str, Tensor]:
        """State of the client; views into the store, read only."""
        row = self._row_of.get(client)
        if row is None or self._arrays is None:
            return dict(self.initial)
        return {name: array[row] for name, array in self._arrays.items()}

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
        rows = moved([state[name] for name in self.initial], HOST)
        self._write(row, {name: one[None] for name, one in zip(self.initial, rows, strict=True)})
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
                self._write(self._row_of[client], {name: tensor[None] for name, tensor in state.items()})
        journal.rows.clear()

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

    # ------------------------------------------------------------------ rows

    def _reserve(self) -> dict[str, Tensor]:
        """Arrays of all clients by name, (m, ...), of which nothing is written yet."""
        count = self.num_clients
        if self._folder is None:  # torch.empty does not touch the memory, so that it becomes resident row by row
            return {name: torch.empty((count, *t.shape), dtype=t.dtype) for name, t in self.initial.items()}
        sizes = {name: count * t.numel() * t.element_size() for name, t in self.initial.items()}
        starts = [0, *accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes.values())]
        self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  # open as long as the rows
        self._file.truncate(starts[-1])
        whole = torch.empty(0, dtype=torch.uint8)
        if starts[-1]:
            whole = torch.frombuffer(mmap.mmap(self._file.fileno(), starts[-1]), dtype=torch.uint8)
        return {
            name: whole[start : start + sizes[name]].view(t.dtype).view(count, *t.shape)
            for start, (name, t) in zip(starts, self.initial.items(), strict=False)
        }

    def _write(self, first: int, rows: State) -> None:
        """Store consecutive rows, from the row ``first`` on."""
        try:
            if self._arrays is None:
                self._arrays = self._reserve()
            for name, values in rows.items():
                self._write_array(name, self._arrays[name], first, values)
        except (OSError, RuntimeError) as error:
            raise self._no_room(error) from error

    def _write_array(self, name: str, array: Tensor, first: int, values: Tensor) -> None:
        if values.shape[1:] != array.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(values.shape[1:])}, expected {tuple(array.shape[1:])}")
        if self._folder is None:
            array[first : first + len(values)].copy_(values)
        elif values.numel():
            data = values.detach().to("cpu", array.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._file.seek((array.storage_offset() + first * array.stride(0)) * array.element_size())
            while len(data):
                data = data[self._file.write(data) :]

    def _no_room(self, error: OSError | RuntimeError) -> FederationError:
        free = ""
        with suppress(OSError):
            free = f", {shutil.disk_usage(self._folder).free / 1e9:.3g} GB are free" if self._folder else ""
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return FederationError(
            f"the clients' state cannot be stored in {self._folder or 'memory'}: {reason} (it can grow to "
            f"{self.most_bytes / 1e9:.3g} GB{free}). Give the Federation a spill_dir with more free space, or a "
            f"{'higher' if self._folder else 'lower'} client_state_memory_gb, the limit of what is kept in memory, and "
            "resume from the last checkpoint"
        )

    # ------------------------------------------------------------------ checkpoints

    def _stored(self) -> dict[str, Tensor]:
        """Written rows by name, not copied: over memory of which ``torch.save`` writes no more than these rows.

        (Of a plain slice it would write the whole array.)
        """
        count, stored = len(self._row_of), dict[str, Tensor]()
        for name, like in self.initial.items():
            if self._arrays is None or not count or not like.numel():
                stored[name] = like.new_empty((count, *like.shape))
                continue
            data = self._arrays[name][:count].reshape(-1).view(torch.uint8).numpy()
            stored[name] = torch.frombuffer(data, dtype=like.dtype).view(count, *like.shape)
        return stored

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
        if clients:
            self._write(0, state["rows"])
        self._row_of = {client: row for row, client in enumerate(clients)}

    def _check_rows(self, clients: Sequence[int], rows: State) -> None:
        """Refuse rows that do not belong to the clients one by one: what is missing would be uninitialized memory."""
        if len(set(clients)) < len(clients) or not set(clients) <= set(range(self.num_clients)):
            raise CheckpointError(
                f"the checkpoint is damaged: it has states of the clients {clients[:20]}, expected unique numbers from "
                f"0 to {self.num_clients - 1}; use another checkpoint"
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
    """Move all stores to disk if together they can outgrow a limit; say where they are if they can be large.

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
    most, folder = sum(store.most_bytes for store in stores), folder or tempfile.gettempdir()
    to_disk = limit_gb is not None and most > limit_gb * 1e9
    for store in stores if to_disk else ():
        if store.most_bytes:
            store.move_to_disk(folder)
    if most < SAID_GB * 1e9:
        return
    said = f"what the clients store can grow to {most / 1e9:,.3g} GB, as they train, and is kept in "
    free = shutil.disk_usage(folder).free if to_disk else most
    said += f"files in {folder}, where {free / 1e9:,.3g} GB are free" if to_disk else "memory"
    if free < most:
        warnings.warn(
            f"{said}: not enough for all clients. Give the Federation a spill_dir with more space, use fewer "
            "clients, or a method that keeps less for each",
            stacklevel=2,
        )
    else:
        rank_zero_info(said)
