"""Storage of many clients' tensors, row by row: in memory, or in a memory-mapped file."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from contextlib import suppress

import torch
from torch import Tensor

from pfl_lightning.errors import FederationError
from pfl_lightning.messages import State

__all__ = ["Rows", "first_rows"]


class Rows:
    """Array for each name, with a row for every client that has one: in memory, or in a temporary file.

    A row that was never written has no meaning, and costs neither memory nor disk.

    The file is mapped into memory, of which the operating system caches as much as fits. It is sparse and has no name:
    its space is free again as soon as the process ends, however it ends. It is read through the map and written by
    write calls. On a full disk these fail with an error, whereas a write through the map would end the process by a
    signal (SIGBUS).

    Args:
        like: One row, by name.
        capacity: Greatest number of rows.
        folder: Folder of the file; ``None`` keeps the rows in memory.

    Attributes:
        arrays: Arrays by name, (capacity, ...); read only, since :meth:`write` alone changes them.

    Raises:
        FederationError: The memory cannot be reserved, or the file cannot be made.
    """

    def __init__(self, like: State, capacity: int, folder: str | None = None) -> None:
        self._folder = folder
        self._size = capacity * sum(t.numel() * t.element_size() for t in like.values())
        try:
            if folder is None:
                # torch.empty does not touch the memory, so that it becomes resident row by row.
                self.arrays = {name: torch.empty((capacity, *t.shape), dtype=t.dtype) for name, t in like.items()}
            else:
                self.arrays = self._map_file(like, capacity)
        except (OSError, RuntimeError) as error:
            raise self._failure(error) from error

    def _map_file(self, like: State, capacity: int) -> dict[str, Tensor]:
        self._starts: dict[str, int] = {}
        end = 0
        for name, tensor in like.items():
            self._starts[name] = end
            size = capacity * tensor.numel() * tensor.element_size()
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  # open as long as the rows
        self._file.truncate(end)
        mapped = mmap.mmap(self._file.fileno(), end) if end else None
        return {
            name: torch.frombuffer(mapped, dtype=t.dtype, count=capacity * t.numel(), offset=self._starts[name]).view(
                capacity, *t.shape
            )
            if capacity * t.numel()
            else torch.empty((capacity, *t.shape), dtype=t.dtype)
            for name, t in like.items()
        }

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Store consecutive rows, from the row ``first`` on.

        Raises:
            ValueError: The values do not have the shape of rows.
            FederationError: The disk is full.
        """
        array = self.arrays[name]
        if values.shape[1:] != array.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(values.shape[1:])}, expected {tuple(array.shape[1:])}")
        if self._folder is None:
            array[first : first + len(values)].copy_(values)
            return
        plain = values.detach().to("cpu", array.dtype).contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().data
        try:
            self._file.seek(self._starts[name] + first * array.stride(0) * array.element_size())
            while len(data):
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError | RuntimeError) -> FederationError:
        free = ""
        with suppress(OSError):
            free = f", {shutil.disk_usage(self._folder).free / 1e9:.3g} GB are free" if self._folder else ""
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return FederationError(
            f"the clients' state cannot be stored in {self._folder or 'memory'}: {reason} (it can grow to "
            f"{self._size / 1e9:.3g} GB{free}). Give the Federation a spill_dir with more free space, or another "
            "client_state_memory_gb, the limit of what is kept in memory; a checkpoint of the run can be resumed with "
            "either"
        )


def first_rows(array: Tensor, count: int) -> Tensor:
    """First rows of an array as a tensor over the same memory, of which ``torch.save`` writes no more than these rows.

    (Of a plain slice it would write the whole array.)

    Example:
        >>> import torch
        >>> from pfl_lightning.state.row_storage import first_rows
        >>> rows = first_rows(torch.zeros(1000, 2), count=3)
        >>> rows.shape, rows.untyped_storage().nbytes()  # six float32
        (torch.Size([3, 2]), 24)
    """
    if not count or not array.numel():
        return array.new_empty((count, *array.shape[1:]))
    data = array[:count].reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(data, dtype=array.dtype).view(count, *array.shape[1:])
