"""Objects as bytes, buffers of tensors and references to what the receiver has, sent or shared between processes.

Ordinary pickling copies tensors twice and sends them in every message that holds them. Here a tensor becomes a buffer
that goes into shared memory without a further copy. Its layout (the strides of its dimensions, those of size 1
included) is kept, since it decides which kernel runs and the order of sums, and so the last bits of a result.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Place = tuple[int, int]
"""Reference to what the receiver has: number of its bundle, position in it."""

DATA_SETS = -1
"""Number of the bundle of the data's own Datasets, which a user's module may hold, too."""

ALIGNMENT = 64
"""Of buffers in shared memory, as torch aligns its own: it may decide the last bits of a product."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Packed:
    """Object as bytes.

    Attributes:
        content: Bytes of the object without its buffers.
        buffers: Bytes of its tensors and arrays.
    """

    content: bytes
    buffers: tuple[NDArray[np.uint8], ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return len(self.content) + sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any, known: Mapping[int, Place] | None = None) -> Packed:
    """Serialize an object; functions and classes that cannot be imported (lambdas, a script's classes) go by value.

    Args:
        value: The object.
        known: References to what the receiver has (tensors, data sets), by ``id``; a tensor must not have changed.

    Returns:
        The bytes; its buffers share the memory of the tensors, which must not change before they have been sent.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _pickler(file, buffers, known or {}).dump(value)
    return Packed(file.getvalue(), tuple(np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers))


def unpack(packed: Packed, known: Mapping[int, Sequence[Any]] | None = None, *, copy: bool = True) -> Any:
    """Deserialize an object.

    Args:
        packed: The result of :func:`pack`.
        known: The bundles that it refers to.
        copy: Whether tensors get memory of their own. Otherwise they share that of the buffers, which may be read-only
            memory of other processes: such a tensor must not be written to.
    """
    buffers: list[Any] = [bytearray(buffer.data) if copy else buffer for buffer in packed.buffers]
    return _Unpickler(io.BytesIO(packed.content), buffers, known or {}, copy).load()


def pack_error(error: Exception) -> Packed:
    """Serialize an exception without its traceback, or what it says where it does not survive pickling."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        packed = pack(error)
        unpack(packed)
        return packed
    except Exception:
        likeness = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            likeness.add_note(note)
        return pack(likeness)


def _pickler(file: io.BytesIO, buffers: list[pickle.PickleBuffer], known: Mapping[int, Place]) -> Any:
    class Pickler(_base_pickler()):  # type: ignore[misc]
        """Pickler of tensors by buffer, and of what is known by reference."""

        def persistent_id(self, value: Any) -> Place | None:
            return known.get(id(value))

        def reducer_override(self, value: Any) -> Any:
            if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
                return _tensor, _as_arguments(value)
            return super().reducer_override(value) if hasattr(super(), "reducer_override") else NotImplemented

    return Pickler(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer))


def _base_pickler() -> type:
    """Ray's pickler where Ray has been imported (its nodes have it), else cloudpickle's if it is there, or Python's."""
    for module in ("ray.cloudpickle",) if "ray" in sys.modules else ("cloudpickle",):
        with suppress(ImportError):
            found: type = import_module(module).Pickler
            return found
    return pickle.Pickler


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[Any], known: Mapping[int, Sequence[Any]], copy: bool) -> None:
        super().__init__(file, buffers=buffers)
        self._known, self._copy = known, copy

    def persistent_load(self, pid: Any) -> Any:
        bundle, position = pid
        return self._known[bundle][position]

    def find_class(self, module: str, name: str) -> Any:
        """Copy tensors into torch's memory, if asked: its alignment may decide the last bits of a product."""
        found = super().find_class(module, name)
        return _own_tensor if found is _tensor and self._copy else found


def _as_arguments(tensor: Tensor) -> tuple[NDArray[Any], torch.dtype, tuple[int, ...], tuple[int, ...], bool]:
    value = tensor.detach().cpu().resolve_conj().resolve_neg()
    shape, strides = tuple(value.shape), value.stride()
    # Dimensions of size 1 take no part in the layout: their strides may be anything, and are sent as they are, since
    # kernels of convolutions are chosen by all strides.
    order = sorted((d for d in range(value.ndim) if shape[d] != 1), key=lambda d: (-strides[d], d))
    dense = value.squeeze().permute([sum(shape[i] != 1 for i in range(d)) for d in order])
    if not dense.is_contiguous() or not value.numel():  # a slice of a larger tensor: its layout is of no use
        dense = value.contiguous()
        strides = dense.stride()
    # NumPy knows fewer types: the bytes are sent as integers of the same size.
    flat = dense.reshape(-1)
    integers = _INTEGERS.get(flat.element_size())
    array = flat.numpy() if integers is None else flat.view(integers).numpy()
    return array, value.dtype, shape, strides, tensor.requires_grad


def _tensor(
    array: NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        flat = torch.from_numpy(array)
    value = (flat if flat.dtype == dtype else flat.view(dtype)).as_strided(shape, strides)
    return value.requires_grad_() if requires_grad else value


def _own_tensor(
    array: NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Tensor:
    value = torch.empty_strided(shape, strides, dtype=dtype).copy_(_tensor(array, dtype, shape, strides, False))
    return value.requires_grad_() if requires_grad else value


# ---------------------------------------------------------------------- to other processes


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
        OSError: The connection is broken.
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
        """State for another process, without the open file."""
        return {"path": self.path, "sizes": self.sizes, "_file": None}
