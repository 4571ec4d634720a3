"""Resume states of clients, from one local fit to the next: as bytes, of any length, in memory or on disk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl_lightning.state.client_states import ClientStates, spill_to_disk

__all__ = ["ResumeStates", "split_attributes", "with_attributes"]

_STEP = 256
"""Rows are multiples of this many bytes long."""

_MARK = b"attributes"
_LENGTH = 8


def with_attributes(content: bytes, attributes: bytes) -> bytes:
    """Resume state of a local fit, and behind it the attributes that evaluations of the client need, too.

    Example:
        >>> from pfl_lightning.state.resume_states import split_attributes, with_attributes
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
        >>> from pfl_lightning.state.resume_states import ResumeStates
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
        if self.rows is None or len(content) > self.rows.initial["content"].numel():
            self._make_room(len(content) + len(content) // 8)
        assert self.rows is not None
        row = torch.zeros_like(self.rows.initial["content"])
        if content:
            row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.rows.set(client, {"content": row, "length": torch.tensor(len(content))})

    def clear(self) -> None:
        """Forget everything."""
        self.rows = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the written rows."""
        return 0 if self.rows is None else self.rows.num_bytes

    def _make_room(self, length: int) -> None:
        """Begin longer rows, with the content of the earlier ones."""
        before, self.rows = self.rows, self._new_rows(-(-length // _STEP) * _STEP)
        if before is None:
            return
        for client in before.state_dict()["written"].tolist():
            row = before.get(client)
            content = self.rows.initial["content"].clone()
            content[: row["content"].numel()] = row["content"]
            self.rows.set(client, {"content": content, "length": row["length"]})

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
