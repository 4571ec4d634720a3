"""Partition files: index lists that are written with a checksum, and read, checked and handed out as a rule."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView, views_from_arrays, views_to_arrays
from pfl_lightning.datamodules.counting import Ints, Labels, Parts
from pfl_lightning.datamodules.partition.base import AS_STORED, Partitioner, PartitionError, check_labels, whole_numbers
from pfl_lightning.state.files import replace_file

SPLITS = ("train", "validation", "test", "unlabeled")
VIEWS = ("rotations", "label_maps")
NUMBERS = ("checksum", "num_samples", "labels_checksum")

_REMEDY = "make it again with `pfl partition` or save_partition, or use an intact copy"


@dataclass(frozen=True)
class PartitionContent:
    """Content of a partition file.

    Attributes:
        parts: One array of indices per client, by split.
        views: View of each client; empty if every client sees the samples as stored.
        num_samples: Number of samples of the data set that ``train`` counts; None if the file does not say so.
        labels: Checksum of their classes, see :func:`checksum_of`; None if the file does not say it.
    """

    parts: Mapping[str, Parts]
    views: Sequence[ClientView] = ()
    num_samples: int | None = None
    labels: int | None = None

    def checksum(self) -> int:
        """Checksum, the same for both kinds of files and on every machine."""
        found = 0 if self.num_samples is None else crc32(f"num_samples {self.num_samples}".encode())
        found = found if self.labels is None else crc32(f"labels_checksum {self.labels}".encode(), found)
        for name, array in views_to_arrays(self.views).items():
            numbers = array.astype("<f8" if name == "rotations" else "<i8")
            found = crc32(numbers.tobytes(), crc32(f"{name} {numbers.shape}".encode(), found))
        for name in SPLITS:
            for own in self.parts.get(name, ()):
                found = crc32(own.astype("<i8", copy=False).data, crc32(f"{name} {len(own)}".encode(), found))
        return found


class FromFile(Partitioner):
    r"""Partition given by index lists in a file.

    The file has a split ``train`` and optionally ``test``, ``validation`` and ``unlabeled``, each with one index list
    per client. An ``.npz`` file has them as integer arrays of shape (clients, samples), or, if clients differ in size,
    as one flat array and an array ``<split>_sizes``. A ``.json`` file has an object of lists of lists.

    Indices count samples in the data set's own order (an image folder: classes sorted, files sorted). ``train`` and
    ``validation`` count the training set, ``test`` the test set; if the data set has no test set, all three count the
    whole set. Samples that the data module holds back (``public``) are not counted. ``unlabeled`` counts the unlabeled
    samples. Without it, they are assigned as under any other rule.

    A file saved from clients with views (:class:`FeatureShift`, :class:`ConceptShift`) also has ``rotations`` (degrees,
    one per client) or ``label_maps`` (shape (clients, classes)), which are applied again.

    A saved file tells the number of samples and their classes (``labels_checksum``): it is refused where they are in
    another order. It also has a ``checksum``, against which its content is checked. Remove both from a file that you
    edit; files that you write yourself need none.

    Args:
        path: The file, ``.npz`` or ``.json``; :func:`save_partition` writes both.

    Raises:
        FileNotFoundError: If there is no such file.
        PartitionError: If the file is not such a partition, or damaged.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import FromFile, save_partition
        >>> path = Path(tempfile.mkdtemp()) / "partition.json"
        >>> save_partition(path, train=[np.array([0, 2]), np.array([1, 3])])
        >>> path.read_text()
        '{"train": [[0, 2], [1, 3]], "checksum": 2489633417}\n'
        >>> [indices.tolist() for indices in FromFile(str(path)).partition(np.zeros(4, dtype=int))]
        [[0, 2], [1, 3]]
    """

    needs_labels = False
    fixed_train = True

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self._content = content = read_partition(Path(path))
        self._parts, self.fixed_test = content.parts, "test" in content.parts
        if not self._parts.get("train"):
            raise PartitionError(f"{path}: expected index lists named 'train', found {[*self._parts] or 'nothing'}")
        super().__init__(len(self._parts["train"]))
        given = {**self._parts, **({"rotations or label_maps": content.views} if content.views else {})}
        for name, lists in given.items():
            if len(lists) != self.num_clients:
                raise PartitionError(
                    f"{path}: 'train' has {self.num_clients} clients, {name!r} has {len(lists)}: give one per client"
                )
        for name, part in self._parts.items():
            wrong = (part.sizes == 0) & (name == "train")
            wrong[part.owners[part.values < 0]] = True
            order = np.lexsort((part.values, part.owners))
            values, owners = part.values[order], part.owners
            wrong[owners[1:][(values[1:] == values[:-1]) & (owners[1:] == owners[:-1])]] = True
            if wrong.any():
                raise PartitionError(
                    f"{path}: the indices {name!r} of client {wrong.argmax()} must be unique numbers of samples, and "
                    "at least one for training: make the file again"
                )

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Training indices of the file, checked against the labels, see :meth:`Partitioner.partition`."""
        array, content = check_labels(labels), self._content
        if content.num_samples not in (None, len(array)):
            raise PartitionError(
                f"{self.path} divides a data set of {content.num_samples} samples, this one has {len(array)}: use the "
                "file of this data set, or make it again with `pfl partition` or save_partition"
            )
        classes = checksum_of(array)
        if None not in (content.labels, classes) and content.labels != classes:
            raise PartitionError(
                f"{self.path} divides {len(array)} samples whose classes are in another order than those of this data "
                "set: its indices would name other samples. It may have other files, domains in another order, or "
                "public samples drawn by another seed; make the file again with `pfl partition` or save_partition"
            )
        listed = [self._listed(name, len(array)) for name in ("train", "validation") if name in self._parts]
        everything = np.concatenate([parts.values for parts in listed])
        repeated = len(everything) - np.count_nonzero(np.bincount(everything, minlength=len(array)))
        if repeated:
            warnings.warn(
                f"{self.path}: {repeated} training indices belong to more than one client or split", stacklevel=2
            )
        return self._parts["train"]

    def partition_test(
        self, test_labels: Labels, train_labels_per_client: Sequence[Labels], samples_per_client: int | None = None
    ) -> Sequence[Ints]:
        """Test indices of the file; drawn to match the training splits if the file has none.

        Args:
            test_labels: Class of each test sample, shape (M,).
            train_labels_per_client: Classes of each client's training samples; not used if the file has test indices.
            samples_per_client: Greatest size of a client's test split; not used if the file has test indices.

        Returns:
            One index array into ``test_labels`` per client.

        Raises:
            PartitionError: If an index is out of range.
        """
        if not self.fixed_test:
            return super().partition_test(test_labels, train_labels_per_client, samples_per_client)
        return self._listed("test", len(test_labels))

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of the client according to the file.

        Raises:
            PartitionError: If its label map has another number of classes than the data.
        """
        view = self._content.views[client] if self._content.views else AS_STORED
        if view.label_map is not None and len(view.label_map) != num_classes:
            raise PartitionError(
                f"{self.path}: 'label_maps' of client {client} has {len(view.label_map)} classes, the data have "
                f"{num_classes}: is the file for another data set?"
            )
        return view

    def fixed_validation(self) -> Sequence[Ints] | None:
        """Validation indices of the file; None if it has none."""
        return self._parts.get("validation")

    def fixed_unlabeled(self, num_samples: int) -> Sequence[Ints] | None:
        """Indices of unlabeled samples in the file; None if it has none.

        Raises:
            PartitionError: If an index is out of range.
        """
        return self._listed("unlabeled", num_samples) if "unlabeled" in self._parts else None

    def _listed(self, name: str, num_samples: int) -> Parts:
        """The clients' lists of a split, after a check against the number of samples."""
        lists = self._parts[name]
        if len(above := np.flatnonzero(lists.values >= num_samples)):
            client = lists.owner(above[0])
            raise PartitionError(
                f"{self.path}: {name!r} of client {client} has index {lists[client].max()}, and there are "
                f"{num_samples} samples (0 to {num_samples - 1}): is the file for another data set?"
            )
        return lists


def save_partition(
    path: str | Path,
    train: Sequence[Labels],
    test: Sequence[Labels] | None = None,
    validation: Sequence[Labels] | None = None,
    views: Sequence[ClientView] | None = None,
    unlabeled: Sequence[Labels] | None = None,
    num_samples: int | None = None,
    labels: Labels | None = None,
) -> None:
    """Write index lists to a file that :class:`FromFile` reads back unchanged; it appears whole or not at all.

    Args:
        path: The file to write, ``.npz`` (compact) or ``.json`` (readable); missing folders are created.
        train: One array of training indices per client.
        test: One array of test indices per client, if there are any.
        validation: One array of validation indices per client, if there are any.
        views: View of each client; None if every client sees the samples as stored.
        unlabeled: One array of indices of unlabeled samples per client, if there are any.
        num_samples: Number of samples of the data set that ``train`` counts: the file is then refused for another one.
        labels: Classes of these samples: the file is then refused for others, or for the same in another order.

    Raises:
        ValueError: If the file name ends in something else, or an index is no whole number.
    """
    path = Path(path)
    given = zip(SPLITS, (train, validation, test, unlabeled), strict=True)
    parts = {name: _as_parts(part) for name, part in given if part is not None}
    if not len(parts["train"]):
        raise ValueError("train has no index list: give one for each client")
    if path.suffix not in (".json", ".npz"):
        raise ValueError(f"a partition is saved as .npz or .json, got {path.name!r}: change the file name")
    classes = None if labels is None else checksum_of(check_labels(labels))
    content = PartitionContent(parts, views or (), num_samples, classes)
    known = zip(NUMBERS, (content.checksum(), num_samples, classes), strict=True)
    numbers = {name: number for name, number in known if number is not None}
    seen = views_to_arrays(content.views)
    with replace_file(path, shared=True) as temporary:
        if path.suffix == ".json":
            lists: dict[str, Any] = {name: [own.tolist() for own in part] for name, part in parts.items()}
            lists |= {name: array.tolist() for name, array in seen.items()}
            temporary.write_text(json.dumps(lists | numbers) + "\n", encoding="utf-8")
        else:  # numbers first: they are not lost where the end is
            arrays: dict[str, npt.NDArray[Any]] = {name: np.array(number) for name, number in numbers.items()} | seen
            for name, part in parts.items():
                arrays[name], arrays[f"{name}_sizes"] = part.values, part.sizes
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
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                given = {name: arrays[name] for name in arrays.files}
        else:
            given = json.loads(path.read_text(encoding="utf-8-sig"))
        _check_names(given)
        parts = {name: _lists_of(given, name) for name in SPLITS if name in given}
        checksum, num_samples, labels = (int(given[name]) if name in given else None for name in NUMBERS)
        found = PartitionContent(parts, views_from_arrays(given), num_samples, labels)
    except Exception as error:  # reading damaged files raises errors of any class
        raise PartitionError(
            f"{path} is not a partition (index lists named train, validation, test in an .npz or .json file), or "
            f"damaged: {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    if checksum is not None and checksum != found.checksum():
        raise PartitionError(
            f"{path} is damaged: its content does not fit its checksum; {_REMEDY}. If you have edited it yourself, "
            "remove 'checksum' from it"
        )
    return found


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse lists under unknown names: of a split ``tests`` nothing would be used, and test samples drawn instead."""
    known = {*SPLITS, *VIEWS, *(f"{name}_sizes" for name in SPLITS), *NUMBERS}
    unknown = [name for name, value in given.items() if name not in known and isinstance(value, list | np.ndarray)]
    if unknown and given.keys() & set(SPLITS):  # or else it is a file of something else
        raise ValueError(f"unknown {', '.join(map(repr, unknown))}, known are {', '.join((*SPLITS, *VIEWS))}")


def _lists_of(given: Mapping[str, Any], name: str) -> Parts:
    if f"{name}_sizes" not in given:
        return _as_parts(given[name])
    array, sizes = whole_numbers(given[name]), whole_numbers(given[f"{name}_sizes"])
    if ((sizes < 0) | (sizes > len(array))).any() or sizes.sum() != len(array):
        raise ValueError(f"{name!r} has shape {array.shape}, {name}_sizes adds up to {sizes.sum()}")
    return Parts(array, sizes)


def checksum_of(labels: Ints) -> int | None:
    """Checksum of classes in the order of the samples; None where all are equal, as where there are no classes.

    Args:
        labels: Class of each sample, shape (N,).
    """
    return crc32(labels.astype("<i8").tobytes()) if len(labels) and (labels != labels[0]).any() else None


def _as_parts(lists: Sequence[Any]) -> Parts:
    return lists if isinstance(lists, Parts) else Parts.of([whole_numbers(own) for own in lists])
