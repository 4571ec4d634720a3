"""Where many clients' tensors lie: in memory, or in a file that is mapped into it."""

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
    """For each name an array with a row for every client that has one.

    A row that was never written has no meaning, and costs neither memory nor disk.

    Attributes:
        arrays: By name, (capacity, ...); to be read, and changed by :meth:`write` alone.
    """

    arrays: dict[str, Tensor]

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Store consecutive rows, from the row ``first`` on.

        Raises:
            ValueError: The values do not have the shape of rows.
            FederationError: There is no room for them.
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
        FederationError: The operating system does not give so much memory, not even to be filled row by row.
    """

    def __init__(self, like: State, capacity: int) -> None:
        try:
            # torch.empty does not touch the memory, so that it becomes resident row by row.
            self.arrays = {name: torch.empty((capacity, *t.shape), dtype=t.dtype) for name, t in like.items()}
        except RuntimeError as error:
            raise FederationError(
                f"no memory for the state of {capacity} clients ({_gigabytes(_size(like, capacity))}): {error}. "
                "Set client_state_memory_gb of the Federation, beyond which the state rests on disk"
            ) from error

    def _write(self, name: str, first: int, values: Tensor) -> None:
        self.arrays[name][first : first + len(values)].copy_(values)


class FileRows(Rows):
    """Rows in one temporary file, mapped into memory; the operating system keeps there what it has room for.

    The file is sparse and has no name: its space is free again as soon as the process ends, however it ends. It is read
    through the map and written by write calls: on a full disk these fail with an error, where a write through the map
    would end the process by a signal (SIGBUS).

    Args:
        like: One row, by name.
        capacity: Greatest number of rows.
        folder: Where the file lies; ``None`` is the system's folder for temporary files.

    Raises:
        FederationError: There can be no such file.
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
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  # open while rows rest
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
            f"the clients' state cannot rest in {self._folder}: {error.strerror or error} (it can grow to "
            f"{_gigabytes(self._most)}{free}). Give the Federation a spill_dir with more room, or a "
            f"client_state_memory_gb "
            "that keeps the state in memory; a checkpoint of the run goes on under either"
        )


def first_rows(array: Tensor, count: int) -> Tensor:
    """The first rows of an array as a tensor of its own over the same memory, which ``torch.save`` writes alone.

    (Of a plain slice it would write the whole array.)
    """
    if not count or not array.numel():
        return array.new_empty((count, *array.shape[1:]))
    data = array[:count].reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(data, dtype=array.dtype).view(count, *array.shape[1:])


def _size(like: State, capacity: int) -> int:
    return capacity * sum(t.numel() * t.element_size() for t in like.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
