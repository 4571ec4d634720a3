"""Rules on top of other rules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner


class PartitionTransform(Partitioner):
    """A rule that leaves everything to another one; subclasses override what they change.

    Args:
        base: The other rule.
        seed: Seed of the wrapper's own random choices.
    """

    def __init__(self, base: Partitioner, seed: int = 0) -> None:
        super().__init__(base.num_clients, seed)
        self.base = base
        self.needs_labels = base.needs_labels

    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """The base rule's parts, see :meth:`Partitioner.partition`."""
        return self.base.partition(labels)

    def partition_test(
        self,
        test_labels: npt.NDArray[Any],
        train_labels_per_client: Sequence[npt.NDArray[Any]],
        samples_per_client: int | None = None,
    ) -> list[Ints]:
        """The base rule's test parts, see :meth:`Partitioner.partition_test`."""
        return self.base.partition_test(test_labels, train_labels_per_client, samples_per_client)

    def with_domains(self, domains: Ints, names: Sequence[str]) -> Self:
        """This rule, its base told of the domains."""
        return self._over(self.base.with_domains(domains, names))

    def with_sizes(self, sizes: list[int]) -> Self | None:
        """This rule, its base asked for other sizes; None if the base takes none."""
        base = self.base.with_sizes(sizes)
        return None if base is None else self._over(base)

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """The base rule's view."""
        return self.base.client_view(client, num_classes)

    @property
    def fixed_test(self) -> bool:
        """Whether the base rule names the test samples."""
        return self.base.fixed_test

    @property
    def fixed_train(self) -> bool:
        """Whether the base rule names training samples one by one."""
        return self.base.fixed_train

    def fixed_validation(self) -> list[Ints] | None:
        """The base rule's validation samples, None if it names none."""
        return self.base.fixed_validation()

    def fixed_unlabeled(self, num_samples: int) -> list[Ints] | None:
        """The base rule's samples without labels, None if it names none."""
        return self.base.fixed_unlabeled(num_samples)

    def _over(self, base: Partitioner) -> Self:
        other = copy.copy(self)
        other.base = base
        return other
