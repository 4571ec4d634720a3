"""Storage of many clients' tensors, row by row: in memory, or in a memory-mapped file."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pfl_lightning.errors import FederationError
from pfl_lightning.messages import State

__all__ = ["FileRows", "MemoryRows", "Rows", "first_rows"]


class Rows(ABC):
    """Array for each name, with a row for every client that has one.

    A row that was never written has no meaning, and costs neither memory nor disk.

    Attributes:
        arrays: Arrays by name, (capacity, ...); read only, since :meth:`write` alone changes them.
    """

    arrays: dict[str, Tensor]

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Store consecutive rows, from the row ``first`` on.

        Raises:
            ValueError: The values do not have the shape of rows.
            FederationError: The disk is full.
        """
        if values.shape[1:] != self.arrays[name].shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(values.shape[1:])}, expected {tuple(self.arrays[name].shape[1:])}"
            )
        self._write(name, first, values)

    @abstractmethod
    def _write(self, name: str, first: int, values: Tensor) -> None: ...


class MemoryRows(Rows):
    """Rows in memory.

    Args:
        like: One row, by name.
        capacity: Greatest number of rows.

    Raises:
        FederationError: The operating system refuses to reserve the memory.
    """

    def __init__(self, like: State, capacity: int) -> None:
        try:
            # torch.empty does not touch the memory, so that it becomes resident row by row.
            self.arrays = {name: torch.empty((capacity, *t.shape), dtype=t.dtype) for name, t in like.items()}
        except RuntimeError as error:
            raise FederationError(
                f"no memory for the state of {capacity} clients ({_gigabytes(_size(like, capacity))}): {error}. "
                "Set client_state_memory_gb of the Federation, beyond which the state is stored on disk"
            ) from error

    def _write(self, name: str, first: int, values: Tensor) -> None:
        self.arrays[name][first : first + len(values)].copy_(values)


class FileRows(Rows):
    """Rows in one temporary file, mapped into memory, of which the operating system caches as much as fits.

    The file is sparse and has no name: its space is free again as soon as the process ends, however it ends. It is read
    through the map and written by write calls. On a full disk these fail with an error, whereas a write through the map
    would end the process by a signal (SIGBUS).

    Args:
        like: One row, by name.
        capacity: Greatest number of rows.
        folder: Folder of the file; ``None`` is the system's folder for temporary files.

    Raises:
        FederationError: The file cannot be made.
    """

    def __init__(self, like: State, capacity: int, folder: str | None = None) -> None:
        self._folder = folder or tempfile.gettempdir()
        self._most = _size(like, capacity)
        self._starts: dict[str, int] = {}
        end = 0
        for name, tensor in like.items():
            self._starts[name] = end
            size = capacity * tensor.numel() * tensor.element_size()
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  # open as long as the rows
            self._file.truncate(end)
            mapped = mmap.mmap(self._file.fileno(), end) if end else None
        except OSError as error:
            raise self._failure(error) from error
        self.arrays = {
            name: torch.frombuffer(mapped, dtype=t.dtype, count=capacity * t.numel(), offset=self._starts[name]).view(
                capacity, *t.shape
            )
            if capacity * t.numel()
            else torch.empty((capacity, *t.shape), dtype=t.dtype)
            for name, t in like.items()
        }

    def _write(self, name: str, first: int, values: Tensor) -> None:
        array = self.arrays[name]
        plain = values.detach().to("cpu", array.dtype).contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().data
        try:
            self._file.seek(self._starts[name] + first * array.stride(0) * array.element_size())
            while len(data):
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> FederationError:
        try:
            free = f", {_gigabytes(shutil.disk_usage(self._folder).free)} are free"
        except OSError:
            free = ""
        return FederationError(
            f"the clients' state cannot be stored in {self._folder}: {error.strerror or error} (it can grow to "
            f"{_gigabytes(self._most)}{free}). Give the Federation a spill_dir with more free space, or a "
            "client_state_memory_gb that keeps the state in memory; a checkpoint of the run can be resumed with either"
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


def _size(like: State, capacity: int) -> int:
    return capacity * sum(t.numel() * t.element_size() for t in like.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
