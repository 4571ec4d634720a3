"""All clients of a federation: a module for each architecture; every client's stored state and resume state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State
from pfl_lightning.state.architectures import ArchitectureSummary
from pfl_lightning.state.client_states import ClientStates, spill_to_disk
from pfl_lightning.state.tensors import select_state


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
        >>> from pfl_lightning.state.clients import GroupedStates
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
        self.stores: list[ClientStates] = [
            ClientStates(initial, size) for initial, size in zip(initials, sizes, strict=True)
        ]

    @property
    def num_clients(self) -> int:
        """Number of clients, m."""
        return len(self._group)

    def written(self, client: int) -> bool:
        """Whether the client's state was ever stored."""
        return self.stores[int(self._group[client])].written(int(self._place[client]))

    def get(self, client: int) -> dict[str, Tensor]:
        """The client's state; views into the store, not to be changed."""
        store = self.stores[int(self._group[client])]
        return store.get(int(self._place[client])) if store.initial else {}

    def set(self, client: int, state: State) -> None:
        """Store a copy of the client's state."""
        self.stores[int(self._group[client])].set(int(self._place[client]), state)

    @property
    def num_bytes(self) -> int:
        """Bytes that the written rows take."""
        return sum(store.num_bytes for store in self.stores)

    @property
    def _assignment(self) -> str:
        """A hash of who has which architecture: the checkpoint of many clients needs no more."""
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
        found = [content["num_clients"] for content in state["stores"]]
        own = [store.num_clients for store in self.stores]
        if state["assignment"] != self._assignment or len(found) != len(own):
            raise CheckpointError(
                f"the checkpoint assigns its architectures to {found} clients, this federation to {own}, and not to "
                "the same ones; use the encoders that the checkpoint was made with"
            )
        for store, content in zip(self.stores, state["stores"], strict=True):
            store.load_state_dict(content)


_STEP = 256
"""Rows are multiples of this many bytes long."""

_MARK = b"attributes"
_LENGTH = 8


def with_attributes(content: bytes, attributes: bytes) -> bytes:
    """Resume state of a local fit, and behind it the attributes that evaluations of the client need, too.

    Example:
        >>> from pfl_lightning.state.clients import split_attributes, with_attributes
        >>> split_attributes(with_attributes(b"schedules", b"temperature"))
        (b'schedules', b'temperature')
        >>> split_attributes(b"schedules alone")
        (b'schedules alone', b'')
    """
    return content + attributes + len(attributes).to_bytes(_LENGTH, "little") + _MARK if attributes else content


def split_attributes(content: bytes) -> tuple[bytes, bytes]:
    """The two parts that :func:`with_attributes` was given."""
    if not content.endswith(_MARK):
        return content, b""
    end = len(content) - len(_MARK) - _LENGTH
    start = end - int.from_bytes(content[end : end + _LENGTH], "little")
    return content[:start], content[start:end]


class ResumeStates:
    """Bytes of each client, which its local fits hand on: optimizers, schedules, and attributes of a user's module.

    Their length is not known before the first local fit, and may grow: rows are as long as the longest, with some room.

    Args:
        num_clients: Number of clients, m.
        limit_gb: They rest on disk if all clients together could take more than this many gigabytes (10^9 bytes);
            ``None`` for no limit.
        folder: Folder of the file; ``None`` is the system's folder for temporary files.

    Example:
        >>> from pfl_lightning.state.clients import ResumeStates
        >>> states = ResumeStates(num_clients=1000)
        >>> states.set(7, b"epoch 3")
        >>> states.get(7), states.get(8)
        (b'epoch 3', b'')
    """

    def __init__(self, num_clients: int, limit_gb: float | None = None, folder: str | None = None) -> None:
        self.num_clients, self._limit_gb, self._folder = num_clients, limit_gb, folder
        self.rows: ClientStates | None = None  # made when first needed

    def get(self, client: int) -> bytes:
        """Resume state that the client's last local fit has left; nothing before its first."""
        if self.rows is None:
            return b""
        row = self.rows.get(client)
        return row["content"][: int(row["length"])].numpy().tobytes()

    def set(self, client: int, content: bytes) -> None:
        """Store what a local fit hands on.

        Raises:
            FederationError: The memory or the disk is full.
        """
        if self.rows is None or len(content) > self.rows.initial["content"].numel():  # begin longer rows
            before, length = copy(self), len(content) + len(content) // 8
            self.rows = self._new_rows(-(-length // _STEP) * _STEP)
            for known in [] if before.rows is None else before.rows.state_dict()["written"].tolist():
                self.set(known, before.get(known))
        assert self.rows is not None
        row = torch.zeros_like(self.rows.initial["content"])
        if content:
            row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.rows.set(client, {"content": row, "length": torch.tensor(len(content))})

    def clear(self) -> None:
        """Forget everything."""
        self.rows = None

    def _new_rows(self, length: int) -> ClientStates:
        first: dict[str, Tensor] = {"content": torch.zeros(length, dtype=torch.uint8), "length": torch.tensor(0)}
        rows = ClientStates(first, self.num_clients)
        spill_to_disk(self._limit_gb, [rows], self._folder)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: only the rows that were written."""
        return {} if self.rows is None else self.rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: Another number of clients, or rows are missing.
        """
        self.rows = None
        if state:
            self.rows = self._new_rows(state["initial"]["content"].numel())
            self.rows.load_state_dict(state)


class Clients:
    """Architecture and stored state of every client.

    Args:
        models: A module for each architecture, which its clients use in turn; they hold the first weights.
        labels: Name of each architecture, for tables.
        architecture_of: The architecture of each client, as an index into ``models``.

    Attributes:
        resume_states: What local fits hand on to the client's next, beside its state; ``None`` where nothing is.
        rounds_trained: For each client, the rounds in which the server has taken an update of it.
    """

    resume_states: ResumeStates | None = None

    def __init__(
        self, models: Sequence[FederatedClient], labels: Sequence[str], architecture_of: Sequence[int]
    ) -> None:
        self.models, self.labels, self.architecture_of = list(models), list(labels), list(architecture_of)
        self.personal = GroupedStates([select_state(model, model.kept_names()) for model in models], architecture_of)
        self._fixed = [select_state(model, model.fixed_names()) for model in models]
        self.rounds_trained: NDArray[np.int64] = np.zeros(len(self.architecture_of), dtype=np.int64)

    @property
    def summaries(self) -> list[ArchitectureSummary]:
        """Summary of each architecture, with its number of clients."""
        rows = []
        for index, (model, label) in enumerate(zip(self.models, self.labels, strict=True)):
            state, features = model.state_dict(), getattr(model.encoder, "out_features", None)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            shared = sum(state[name].numel() for name in model.shared_names())
            clients = sum(own == index for own in self.architecture_of)
            rows.append(ArchitectureSummary(label, features, parameters, shared, clients))
        return rows

    def first_state(self, architecture: int) -> dict[str, Tensor]:
        """Stored state of an architecture's clients before their first local fit, with the fixed tensors."""
        return {**self._fixed[architecture], **self.personal.stores[architecture].initial}

    def model_of(self, client: int) -> FederatedClient:
        """Module of the client's architecture, which all its clients use in turn."""
        return self.models[self.architecture_of[client]]

    def model_and_state(self, client: int) -> tuple[FederatedClient, dict[str, Tensor]]:
        """Module of the client's architecture, and the client's stored state with the fixed tensors, as views."""
        own = self.architecture_of[client]
        return self.models[own], {**self._fixed[own], **self.personal.get(client)}

    def attributes(self, client: int) -> bytes:
        """Plain attributes of a user's module, as the client's last local fit has left them."""
        return b"" if self.resume_states is None else split_attributes(self.resume_states.get(client))[1]

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: the stored states, the fixed tensors, and what local fits have handed on."""
        (trained,) = self.rounds_trained.nonzero()  # the others need no place in the checkpoint of many clients
        return {
            **({} if self.resume_states is None else {"carried": self.resume_states.state_dict()}),
            "personal": self.personal.state_dict(),
            "encoders": list(self.labels),
            "fixed": [dict(fixed) for fixed in self._fixed],
            "rounds_trained": {
                "clients": torch.from_numpy(trained),
                "rounds": torch.from_numpy(self.rounds_trained[trained]),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: Other clients, other architectures or another assignment of them.
        """
        self.personal.load_state_dict(state["personal"])
        self._fixed = [{name: tensor.clone() for name, tensor in fixed.items()} for fixed in state["fixed"]]
        if self.resume_states is not None:
            self.resume_states.load_state_dict(state.get("carried", {}))
        counted = state["rounds_trained"]
        self.rounds_trained = np.zeros(len(self.architecture_of), dtype=np.int64)
        self.rounds_trained[counted["clients"].numpy()] = counted["rounds"].numpy()
