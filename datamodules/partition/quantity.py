"""Random client sizes on top of any partition rule."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.counting import Ints, apportion, take_per_class
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_labels
from pfl_lightning.datamodules.partition.checks import check_parts
from pfl_lightning.datamodules.partition.transform import PartitionTransform
from pfl_lightning.seeding import DataStream


class Quantity(PartitionTransform):
    """Random client sizes on top of any rule (FedPAC, appendix C.6: 300, 600 or 1200 samples).

    A rule with ``samples_per_client`` is asked for the drawn sizes directly. With any other rule (a file, a
    user-defined rule), each client keeps a random subset of the drawn size, in the class proportions of its samples.

    Args:
        base: Rule that assigns the classes; its own sizes are replaced.
        sizes: Sizes to draw from, all equally likely.
        seed: Seed of the drawn sizes.

    Raises:
        ValueError: If there is no size, or one is below 1.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import ClassesPerClient, Quantity
        >>> rule = Quantity(ClassesPerClient(num_clients=4, classes_per_client=2), sizes=(10, 20))
        >>> [len(indices) for indices in rule.partition(np.repeat(np.arange(4), 50))]
        [10, 20, 10, 10]
    """

    def __init__(self, base: Partitioner, sizes: Sequence[int] = (300, 600, 1200), seed: int = 0) -> None:
        super().__init__(base, seed)
        if len(sizes) == 0 or not all(isinstance(size, Integral) and size >= 1 for size in sizes):
            raise ValueError(f"sizes must be at least one whole number of at least 1, got {sizes}")
        self.sizes = [int(size) for size in sizes]

    def client_sizes(self) -> Ints:
        """Drawn size of each client, shape (m,)."""
        return self.rng(DataStream.QUANTITY).choice(np.asarray(self.sizes), self.num_clients).astype(np.int64)

    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        sized = self._sized_base()
        if sized is not None:
            return list(sized.partition(labels))
        sizes, array = self.client_sizes(), check_labels(labels)
        parts = check_parts(self.base, self.base.partition(array), len(array))
        return [self._thin(client, part, array[part], sizes[client]) for client, part in enumerate(parts)]

    def partition_test(
        self,
        test_labels: npt.NDArray[Any],
        train_labels_per_client: Sequence[npt.NDArray[Any]],
        samples_per_client: int | None = None,
    ) -> list[Ints]:
        """Test indices of the base rule, which match the training samples of the drawn sizes."""
        rule = self._sized_base() or self.base  # a rule by domains tests on what its clients of these sizes leave
        return rule.partition_test(test_labels, train_labels_per_client, samples_per_client)

    def with_sizes(self, sizes: list[int]) -> None:
        """Return None, since the sizes are drawn."""
        return None

    @property
    def fixed_sizes(self) -> bool:
        """True, since the sizes are drawn from those that the user gives."""
        return True

    def fixed_validation(self) -> None:
        """Return None, since a file's validation samples belong to the sizes that are replaced."""
        return None

    def _sized_base(self) -> Partitioner | None:
        return self.base.with_sizes(self.client_sizes().tolist())

    def _thin(self, client: int, part: Ints, labels: Ints, size: int) -> Ints:
        if len(part) < size:
            raise PartitionError(
                f"client {client} has {len(part)} samples, {size} drawn for it ({size - len(part)} short): "
                "lower sizes, or give the base rule more samples per client"
            )
        held = np.bincount(labels)[None]
        counts = apportion(held * (size / len(part)), np.array([size]), np.zeros_like(held), held)
        return part[take_per_class(labels, counts[0], self.rng(DataStream.QUANTITY, client))]
