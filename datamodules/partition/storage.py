"""Files of index lists: written whole, with a checksum, and checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView, views_from_arrays, views_to_arrays
from pfl_lightning.datamodules.counting import Ints, split_by_sizes
from pfl_lightning.datamodules.memory import check_memory
from pfl_lightning.datamodules.partition.base import PartitionError
from pfl_lightning.state.files import replace_file

SPLITS = ("train", "validation", "test", "unlabeled")
VIEWS = ("rotations", "label_maps")
CHECKSUM = "checksum"
NUM_SAMPLES = "num_samples"
LABELS = "labels_checksum"

_PER_BYTE = 8
"""Bytes of memory that a byte of a text file may take as Python's numbers."""


@dataclass(frozen=True)
class PartitionContent:
    """Content of a partition file.

    Attributes:
        parts: One array of indices per client, by split.
        views: View of each client; empty if every client sees the samples as stored.
        num_samples: Number of samples of the data set that ``train`` counts; None if the file does not say so.
        labels: Checksum of their classes, see :func:`checksum_of`; None if the file does not say it.
    """

    parts: Mapping[str, Sequence[Ints]]
    views: Sequence[ClientView] = ()
    num_samples: int | None = None
    labels: int | None = None

    def checksum(self) -> int:
        """Checksum, the same for both kinds of files and on every machine."""
        found = 0 if self.num_samples is None else crc32(f"{NUM_SAMPLES} {self.num_samples}".encode())
        found = found if self.labels is None else crc32(f"{LABELS} {self.labels}".encode(), found)
        for name, array in views_to_arrays(self.views).items():
            numbers = array.astype("<f8" if name == "rotations" else "<i8")
            found = crc32(numbers.tobytes(), crc32(f"{name} {numbers.shape}".encode(), found))
        for name in SPLITS:
            for own in self.parts.get(name, ()):
                found = crc32(own.astype("<i8").tobytes(), crc32(f"{name} {len(own)}".encode(), found))
        return found


def checksum_of(labels: Ints) -> int | None:
    """Checksum of classes in the order of the samples; None where all are equal, as where there are no classes.

    Args:
        labels: Class of each sample, shape (N,).
    """
    return crc32(labels.astype("<i8").tobytes()) if len(labels) and (labels != labels[0]).any() else None


def write_partition(path: Path, content: PartitionContent) -> None:
    """Write index lists and views with a checksum; the file appears whole or not at all.

    Args:
        path: The file, ``.npz`` or ``.json``; missing folders are created.
        content: The index lists and views.

    Raises:
        ValueError: If the file name ends in something else.
    """
    if path.suffix not in (".json", ".npz"):
        raise ValueError(f"a partition is saved as .npz or .json, got {path.name!r}: change the file name")
    numbers = {CHECKSUM: content.checksum()}  # first: not lost where the end is
    if content.num_samples is not None:
        numbers[NUM_SAMPLES] = content.num_samples
    if content.labels is not None:
        numbers[LABELS] = content.labels
    seen = views_to_arrays(content.views)
    with replace_file(path, shared=True) as temporary:
        if path.suffix == ".json":
            lists: dict[str, Any] = {name: [own.tolist() for own in part] for name, part in content.parts.items()}
            lists |= {name: array.tolist() for name, array in seen.items()}
            temporary.write_text(json.dumps(lists | numbers) + "\n", encoding="utf-8")
        else:
            arrays: dict[str, npt.NDArray[Any]] = {name: np.array(number) for name, number in numbers.items()} | seen
            for name, part in content.parts.items():
                arrays[name] = np.concatenate(part)
                arrays[f"{name}_sizes"] = np.array([len(own) for own in part], dtype=np.int64)
            with temporary.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_partition(path: Path) -> PartitionContent:
    """Read index lists and views.

    Raises:
        FileNotFoundError: If there is no such file.
        PartitionError: If it is damaged, or is something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no partition file at {path}: expected an .npz or .json file of index lists")
    if path.suffix not in (".json", ".npz"):
        raise PartitionError(f"{path}: expected a file that ends in .npz or .json")
    if path.stat().st_size == 0:
        raise PartitionError(f"{path} is empty; {_ADVICE}")
    try:
        content = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
        read = _from_array if path.suffix == ".npz" else _from_lists
        parts = {name: read(content, name) for name in SPLITS if name in content}
        known = (NUM_SAMPLES, LABELS, CHECKSUM)
        num_samples, labels, checksum = (int(content[n]) if n in content else None for n in known)
        found = PartitionContent(parts, views_from_arrays(content), num_samples, labels)
    except Exception as error:  # reading damaged files raises errors of any class
        raise PartitionError(
            f"{path} is not a partition (index lists named train, validation, test), or damaged: {_words(error)}; "
            f"{_ADVICE}"
        ) from error
    if checksum is not None and checksum != found.checksum():
        raise PartitionError(
            f"{path} is damaged: its content does not fit its checksum; {_ADVICE}. If you have edited it yourself, "
            f"remove {CHECKSUM!r} from it"
        )
    return found


_ADVICE = "make it again with `pfl partition` or save_partition, or use an intact copy"


def _read_npz(path: Path) -> dict[str, Any]:
    arrays = np.load(path)
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise ValueError("expected an archive of arrays, got a single array")
    with arrays:
        infos = arrays.zip.infolist() if arrays.zip is not None else []
        check_memory("unpacked, it", sum(info.file_size for info in infos), "it is no partition")
        _check_names(arrays.files)
        return {name: arrays[name] for name in arrays.files}


def _read_json(path: Path) -> dict[str, Any]:
    check_memory("read as text, it", _PER_BYTE * path.stat().st_size, "save it as .npz")
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got a {type(content).__name__}")
    _check_names(name for name, value in content.items() if isinstance(value, list))  # a note does no harm
    return content


def _check_names(names: Iterable[str]) -> None:
    """Refuse lists under unknown names: of a split ``tests`` nothing would be used, and test samples drawn instead."""
    known = {*SPLITS, *VIEWS, *(f"{name}_sizes" for name in SPLITS), CHECKSUM, NUM_SAMPLES, LABELS}
    given = set(names)
    unknown = sorted(given - known)
    if unknown and given & set(SPLITS):  # or else it is a file of something else
        raise ValueError(f"unknown {', '.join(map(repr, unknown))}, known are {', '.join((*SPLITS, *VIEWS))}")


def _from_lists(content: Mapping[str, Any], name: str) -> list[Ints]:
    return [to_ints(own) for own in content[name]]


def _from_array(content: Mapping[str, npt.NDArray[Any]], name: str) -> list[Ints]:
    array = content[name]
    if f"{name}_sizes" in content:
        sizes = to_ints(content[f"{name}_sizes"])
        fits = array.ndim == 1 and not ((sizes < 0) | (sizes > len(array))).any() and sizes.sum() == len(array)
        if not fits:
            raise ValueError(f"{name!r} has shape {array.shape}, {name}_sizes adds up to {sizes.sum()}")
        return split_by_sizes(to_ints(array), sizes)
    if array.ndim != 2:
        raise ValueError(f"{name!r} should have shape (clients, samples), got {array.shape}")
    return [to_ints(row) for row in array]


def to_ints(values: Any) -> Ints:
    """Indices as int64.

    Raises:
        ValueError: They are no list of whole numbers.
    """
    array = np.asarray(values)
    if array.ndim != 1 or not (len(array) == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"expected a list of whole numbers, got {array.dtype} of shape {array.shape}")
    if len(array) and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"an index is {array.max()}, which no sample has")
    return array.astype(np.int64)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
