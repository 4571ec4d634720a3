"""Partition files as a rule: index lists that are read, checked and handed out, or written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_labels
from pfl_lightning.datamodules.partition.storage import (
    SPLITS,
    PartitionContent,
    checksum_of,
    read_partition,
    to_ints,
    write_partition,
)


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

    def __init__(self, path: str) -> None:
        self.path = str(path)
        content = read_partition(Path(path))
        parts, views = content.parts, content.views
        if "train" not in parts:
            raise PartitionError(f"{path}: expected index lists named 'train', found {sorted(parts) or 'nothing'}")
        super().__init__(max(len(parts["train"]), 1))
        for name, lists in parts.items():
            if len(lists) != len(parts["train"]):
                raise PartitionError(
                    f"{path}: 'train' has {len(parts['train'])} clients, {name!r} has {len(lists)}: "
                    "every split needs one index list per client"
                )
            _check_lists(f"{path}: {name!r}", lists)
        empty = [client for client, part in enumerate(parts["train"]) if len(part) == 0]
        if empty or not parts["train"]:
            raise PartitionError(
                f"{path}: 'train' has no samples for client(s) {empty}: every client needs at least one"
            )
        self._parts = parts
        self._views = views
        self._num_samples, self._labels = content.num_samples, content.labels
        if views and len(views) != self.num_clients:
            raise PartitionError(
                f"{path}: 'train' has {self.num_clients} clients, 'rotations' or 'label_maps' {len(views)}: give one "
                "per client"
            )

    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """Training indices of the file, checked against the labels, see :meth:`Partitioner.partition`."""
        array = check_labels(labels)
        num_samples = len(array)
        if self._num_samples not in (None, num_samples):
            raise PartitionError(
                f"{self.path} divides a data set of {self._num_samples} samples, this one has {num_samples}: give the "
                "file of this data set, or make it again with `pfl partition` or save_partition"
            )
        classes = checksum_of(array)
        if None not in (self._labels, classes) and self._labels != classes:
            raise PartitionError(
                f"{self.path} divides {num_samples} samples whose classes are in another order than those of this data "
                "set: its indices would name other samples. It may have other files, domains in another order, or "
                "public samples drawn by another seed; make the file again with `pfl partition` or save_partition"
            )
        for name in ("train", "validation"):
            self._check_range(name, num_samples, "training set")
        everything = np.concatenate([*self._parts["train"], *self._parts.get("validation", [])])
        repeated = len(everything) - len(np.unique(everything))
        if repeated:
            warnings.warn(
                f"{self.path}: {repeated} training indices belong to more than one client or split", stacklevel=2
            )
        return list(self._parts["train"])

    def partition_test(
        self,
        test_labels: npt.NDArray[Any],
        train_labels_per_client: Sequence[npt.NDArray[Any]],
        samples_per_client: int | None = None,
    ) -> list[Ints]:
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
        if "test" not in self._parts:
            return super().partition_test(test_labels, train_labels_per_client, samples_per_client)
        self._check_range("test", len(check_labels(test_labels)), "test set")
        return list(self._parts["test"])

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of the client according to the file.

        Raises:
            PartitionError: If its label map has another number of classes than the data.
        """
        view = self._views[client] if self._views else ClientView()
        if view.label_map is not None and len(view.label_map) != num_classes:
            raise PartitionError(
                f"{self.path}: 'label_maps' of client {client} has {len(view.label_map)} classes, the data have "
                f"{num_classes}: is the file for another data set?"
            )
        return view

    @property
    def fixed_test(self) -> bool:
        """True if the file has test indices."""
        return "test" in self._parts

    @property
    def fixed_train(self) -> bool:
        """True: the file's indices count the data set's own order."""
        return True

    def fixed_validation(self) -> list[Ints] | None:
        """Validation indices of the file; None if it has none."""
        return list(self._parts["validation"]) if "validation" in self._parts else None

    def fixed_unlabeled(self, num_samples: int) -> list[Ints] | None:
        """Indices of unlabeled samples in the file; None if it has none.

        Raises:
            PartitionError: If an index is out of range.
        """
        if "unlabeled" not in self._parts:
            return None
        self._check_range("unlabeled", num_samples, "unlabeled set")
        return list(self._parts["unlabeled"])

    def _check_range(self, name: str, num_samples: int, what: str) -> None:
        for client, part in enumerate(self._parts.get(name, [])):
            if len(part) and int(part.max()) >= num_samples:
                raise PartitionError(
                    f"{self.path}: {name!r} of client {client} has index {part.max()}, the {what} has {num_samples} "
                    f"samples (0 to {num_samples - 1}): is the file for another data set?"
                )


def save_partition(
    path: str | Path,
    train: Sequence[npt.NDArray[Any]],
    test: Sequence[npt.NDArray[Any]] | None = None,
    validation: Sequence[npt.NDArray[Any]] | None = None,
    views: Sequence[ClientView] | None = None,
    unlabeled: Sequence[npt.NDArray[Any]] | None = None,
    num_samples: int | None = None,
    labels: npt.NDArray[Any] | None = None,
) -> None:
    """Write index lists to a file that :class:`FromFile` reads back unchanged.

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
    given = zip(SPLITS, (train, validation, test, unlabeled), strict=True)
    parts = {name: [to_ints(own) for own in part] for name, part in given if part is not None}
    if not parts["train"]:
        raise ValueError("train has no index list: give one for each client")
    classes = None if labels is None else checksum_of(check_labels(labels))
    write_partition(Path(path), PartitionContent(parts, views or (), num_samples, classes))


def _check_lists(where: str, lists: Sequence[Ints]) -> None:
    for client, own in enumerate(lists):
        if len(own) and own.min() < 0:
            raise PartitionError(f"{where} of client {client} has a negative index {own.min()}: indices count from 0")
        values, times = np.unique(own, return_counts=True)
        if (times > 1).any():
            raise PartitionError(f"{where} of client {client} has index {values[times > 1][0]} more than once")
