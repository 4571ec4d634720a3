"""Base of the rules that modify another rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints, apportion, take_per_class
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_labels
from pfl_lightning.datamodules.partition.checks import check_parts
from pfl_lightning.seeding import DataStream


class PartitionTransform(Partitioner):
    """Rule on top of another rule. It delegates everything; a subclass overrides what it changes.

    Args:
        base: The other rule.
        seed: Seed of the transform's own random choices.

    Example:
        A transform that keeps every second sample of each client:

        >>> import numpy as np
        >>> from pfl_lightning.datamodules import IID, PartitionTransform
        >>> class EverySecond(PartitionTransform):
        ...     def partition(self, labels):
        ...         return [indices[::2] for indices in super().partition(labels)]
        >>> [len(indices) for indices in EverySecond(IID(num_clients=2)).partition(np.zeros(12, dtype=int))]
        [3, 3]
    """

    def __init__(self, base: Partitioner, seed: int = 0) -> None:
        super().__init__(base.num_clients, seed)
        self.base = base
        self.needs_labels = base.needs_labels

    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """Training indices of the base rule, see :meth:`Partitioner.partition`."""
        return self.base.partition(labels)

    def partition_test(
        self,
        test_labels: npt.NDArray[Any],
        train_labels_per_client: Sequence[npt.NDArray[Any]],
        samples_per_client: int | None = None,
    ) -> list[Ints]:
        """Test indices of the base rule, see :meth:`Partitioner.partition_test`."""
        return self.base.partition_test(test_labels, train_labels_per_client, samples_per_client)

    def with_domains(self, domains: Ints, names: Sequence[str]) -> Self:
        """Copy of this rule whose base knows the domains, see :meth:`Partitioner.with_domains`."""
        return self._over(self.base.with_domains(domains, names))

    def with_sizes(self, sizes: list[int]) -> Self | None:
        """Copy of this rule with other sizes in its base; None if the base has no ``samples_per_client``."""
        base = self.base.with_sizes(sizes)
        return None if base is None else self._over(base)

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of the client under the base rule."""
        return self.base.client_view(client, num_classes)

    @property
    def fixed_test(self) -> bool:
        """True if the base rule lists the test samples."""
        return self.base.fixed_test

    @property
    def fixed_train(self) -> bool:
        """True if the base rule lists training samples explicitly."""
        return self.base.fixed_train

    @property
    def fixed_sizes(self) -> bool:
        """True if the base rule was given the clients' sizes."""
        return self.base.fixed_sizes

    def fixed_validation(self) -> list[Ints] | None:
        """Validation samples of the base rule; None if it lists none."""
        return self.base.fixed_validation()

    def fixed_unlabeled(self, num_samples: int) -> list[Ints] | None:
        """Unlabeled samples of the base rule; None if it lists none."""
        return self.base.fixed_unlabeled(num_samples)

    def _over(self, base: Partitioner) -> Self:
        other = copy.copy(self)
        other.base = base
        return other


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
