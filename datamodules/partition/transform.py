"""Base of the rules that modify another rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner


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
