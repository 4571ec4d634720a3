"""Messages between processes, and bytes in memory that processes share."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np

from pfl_lightning.engines.workers.packing import Packed, pack, unpack

__all__ = ["SharedBytes", "receive", "send"]

ALIGNMENT = 64
"""Of buffers in shared memory, as torch aligns its own: it may decide the last bits of a product."""


def send(connection: Connection, value: Any) -> None:
    """Send an object; its tensors and arrays go without being copied here.

    Raises:
        OSError: The other process has ended.
    """
    packed = pack(value)
    connection.send((packed.content, len(packed.buffers)))
    for buffer in packed.buffers:
        connection.send_bytes(buffer.data)


def receive(connection: Connection) -> Any:
    """Wait for an object.

    Raises:
        EOFError: The other process has ended.
        OSError: Likewise.
    """
    content, count = connection.recv()
    buffers = tuple(np.frombuffer(connection.recv_bytes(), dtype=np.uint8) for _ in range(count))
    return unpack(Packed(content, buffers), copy=False)


@dataclass
class SharedBytes:
    """A packed object in memory that other processes of this machine read, without a copy of their own.

    On Linux it is memory without a name, elsewhere a temporary file. It lives as long as this object, or a process that
    has opened it.

    Attributes:
        path: Where other processes open it.
        sizes: Bytes of the content, and of each buffer.
    """

    path: str
    sizes: tuple[int, ...]
    _file: BinaryIO | None = field(default=None, repr=False)

    @classmethod
    def of(cls, packed: Packed) -> SharedBytes:
        """Write a packed object."""
        file: Any
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            file = os.fdopen(os.memfd_create("pfl_lightning", os.MFD_CLOEXEC), "wb")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile("wb")  # noqa: SIM115  # it is closed with this object
            path = file.name
        pieces = (memoryview(packed.content), *(buffer.data for buffer in packed.buffers))
        for piece in pieces:
            file.write(piece)
            file.write(bytes(-piece.nbytes % ALIGNMENT))
        file.flush()
        return cls(path, tuple(piece.nbytes for piece in pieces), file)

    def load(self) -> Packed:
        """Read it in any process; what is written to its buffers stays in that process."""
        if not sum(self.sizes):
            return Packed(b"", tuple(np.zeros(0, dtype=np.uint8) for _ in self.sizes[1:]))
        with open(self.path, "rb") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        pieces, start = [], 0
        for size in self.sizes:
            pieces.append(memory[start : start + size])
            start += size + -size % ALIGNMENT
        return Packed(pieces[0].tobytes(), tuple(pieces[1:]))

    def close(self) -> None:
        """Release it here; who has opened it keeps it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs."""
        return {"path": self.path, "sizes": self.sizes, "_file": None}
