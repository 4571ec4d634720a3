"""Rules on top of another rule, which change how many samples clients hold, or how they see them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Self

import numpy as np

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints, Labels, apportion
from pfl_lightning.datamodules.draws import draw_of_classes
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_labels, check_parts
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
        self._stand_on(base)

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Training indices of the base rule, see :meth:`Partitioner.partition`."""
        return self.base.partition(labels)

    def partition_test(
        self, test_labels: Labels, train_labels_per_client: Sequence[Labels], samples_per_client: int | None = None
    ) -> Sequence[Ints]:
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

    def client_views(self, num_classes: int) -> tuple[ClientView, ...]:
        """Views of all clients under the base rule, where this one has none of its own."""
        if type(self).client_view is PartitionTransform.client_view:
            return self.base.client_views(num_classes)
        return super().client_views(num_classes)

    @property
    def fixed_sizes(self) -> bool:
        """True if the base rule was given the clients' sizes."""
        return self.base.fixed_sizes

    def fixed_validation(self) -> Sequence[Ints] | None:
        """Validation samples of the base rule; None if it lists none."""
        return self.base.fixed_validation()

    def fixed_unlabeled(self, num_samples: int) -> Sequence[Ints] | None:
        """Unlabeled samples of the base rule; None if it lists none."""
        return self.base.fixed_unlabeled(num_samples)

    def _over(self, base: Partitioner) -> Self:
        other = copy.copy(self)
        other._stand_on(base)
        return other

    def _stand_on(self, base: Partitioner) -> None:
        self.base, self.needs_labels = base, base.needs_labels
        self.fixed_test, self.fixed_train = base.fixed_test, base.fixed_train


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

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        sized = self._sized_base()
        if sized is not None:
            return sized.partition(labels)
        sizes, array = self.client_sizes(), check_labels(labels)
        parts = check_parts(self.base, self.base.partition(array), len(array))
        if len(short := np.flatnonzero(parts.sizes < sizes)):
            client, held = int(short[0]), int(parts.sizes[short[0]])
            raise PartitionError(
                f"client {client} has {held} samples, {sizes[client]} drawn for it ({sizes[client] - held} short): "
                "lower sizes, or give the base rule more samples per client"
            )

        def number(held: Ints, clients: slice) -> Ints:
            share = sizes[clients] / parts.sizes[clients]
            return apportion(held * share[:, None], sizes[clients], np.zeros_like(held), held)

        return parts.where(draw_of_classes(array, parts, number, [self.seed, DataStream.QUANTITY]))

    def partition_test(
        self, test_labels: Labels, train_labels_per_client: Sequence[Labels], samples_per_client: int | None = None
    ) -> Sequence[Ints]:
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


class FeatureShift(PartitionTransform):
    """Rotation of the images for each group of clients, on top of any rule (FedPAC, appendix C.10).

    The base rule assigns the samples. A client's training, validation and test images are all rotated by the angle of
    its group. Groups are contiguous blocks of clients, as for :class:`DominantClasses`: of m clients, client k belongs
    to group ``k * len(angles) // m``. The paper rotates every group "with a certain degree" and gives neither the
    angles nor the number of groups; quarter turns move pixels without interpolating. For the paper's five groups of
    dominant classes, give five angles.

    Channel statistics are measured on the stored images: quarter turns do not change them, and the black corners of
    other angles do not count. A rotation of the base (another FeatureShift, or a file with rotations) is replaced, not
    added to.

    Args:
        base: Rule that assigns the samples to clients.
        angles: Degrees of each group, counter-clockwise. Multiples of 90 are exact (90 and 270 need square images),
            others are interpolated, with black corners.
        groups: Group of each client, from 0, instead of blocks (round robin for four clients and two angles:
            0, 1, 0, 1).

    Raises:
        ValueError: If there is no angle, or the groups do not match the clients and angles.

    Example:
        >>> from pfl_lightning.datamodules import IID, FeatureShift
        >>> rule = FeatureShift(IID(num_clients=4), angles=[0, 180])
        >>> [rule.client_view(client, num_classes=10).rotation for client in range(4)]
        [0.0, 0.0, 180.0, 180.0]
    """

    def __init__(
        self, base: Partitioner, angles: Sequence[float] = (0, 90, 180, 270), groups: list[int] | None = None
    ) -> None:
        super().__init__(base)
        if len(angles) == 0:
            raise ValueError("angles must have at least one angle, got none")
        self.angles = [ClientView(rotation=angle).rotation for angle in angles]
        self.groups = groups
        self._group = group_of_clients(self.num_clients, len(self.angles), groups, "angles")

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of the base rule with the rotation of the client's group."""
        view = self.base.client_view(client, num_classes)
        return dataclasses.replace(view, rotation=self.angles[self._group[client]])


class ConceptShift(PartitionTransform):
    """Permutation of the labels for each group of clients, on top of any rule (FedPAC, section 6.2 and Table 3).

    The base rule assigns the samples by their original labels, test samples included. In all of a client's splits, a
    sample of class c then counts as class ``permutation[c]``. Groups are contiguous blocks of clients: client k of m
    belongs to group ``k * groups // m``, so that five groups are those of FedPAC's dominant classes. Permutations are
    drawn by the seed, all different. The first group keeps its labels: renaming the classes for all clients turns any
    other choice into this one.

    A permutation of the base (another ConceptShift, or a file with label maps) is replaced, not composed.

    Args:
        base: Rule that assigns the samples to clients.
        groups: Number of groups, or the group of each client, from 0. None for one group per given permutation, else 5.
        permutations: Permutation of each group, each a list of all classes; None to draw them.
        seed: Seed of the permutations.

    Raises:
        ValueError: If groups and permutations do not match, or a list is no permutation.

    Example:
        >>> from pfl_lightning.datamodules import IID, ConceptShift
        >>> rule = ConceptShift(IID(num_clients=2), permutations=[[0, 1, 2], [2, 0, 1]])
        >>> rule.client_view(1, num_classes=3).label_map
        (2, 0, 1)
    """

    def __init__(
        self,
        base: Partitioner,
        groups: int | list[int] | None = None,
        permutations: list[list[int]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(base, seed)
        listed = None if groups is None or isinstance(groups, int) else list(groups)
        asked = groups if isinstance(groups, int) else 5 if listed is None else max(listed, default=-1) + 1
        number = asked if permutations is None else len(permutations)
        if number < 1 or (isinstance(groups, int) and groups != number):
            raise ValueError(
                f"expected at least one group, and a permutation for each, got groups={groups} and "
                f"permutations={permutations}"
            )
        self.groups, self.permutations, self._number = groups, permutations, number
        for own in permutations or ():
            ClientView(label_map=tuple(own))  # checks the permutation
        self._given = None if permutations is None else [tuple(map(int, own)) for own in permutations]
        self._group = group_of_clients(self.num_clients, number, listed, "permutations")

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of the base rule with the permutation of the client's group.

        Raises:
            PartitionError: If a permutation has another number of classes than the data, or the classes have too few
                different permutations.
        """
        group = self._group[client]
        if self._given is None:
            own = draw_permutations(self.seed, self._number, num_classes)[group]
        else:
            own = self._given[group]
            if len(own) != num_classes:
                raise PartitionError(
                    f"ConceptShift: the permutation of client {client} (group {group}) has {len(own)} classes, the "
                    f"data have {num_classes}: list every class from 0 to {num_classes - 1} once"
                )
        return dataclasses.replace(self.base.client_view(client, num_classes), label_map=own)


def group_of_clients(num_clients: int, num_groups: int, groups: Sequence[int] | None, what: str) -> list[int]:
    """Group of each client: as listed, or contiguous blocks of equal size.

    Args:
        num_clients: Number of clients m.
        num_groups: Number of groups.
        groups: Group of each client; None for blocks.
        what: Name of the setting with one entry per group, for errors.

    Raises:
        ValueError: If the list does not have one group per client, or has an unknown group.

    Example:
        >>> group_of_clients(5, 2, None, "angles")
        [0, 0, 0, 1, 1]
    """
    if groups is None:
        return [client * num_groups // num_clients for client in range(num_clients)]
    if len(groups) != num_clients or not set(groups) <= set(range(num_groups)):
        raise ValueError(
            f"groups must have a number from 0 to {num_groups - 1}, as there are {num_groups} {what}, for each of "
            f"{num_clients} clients, got {groups}"
        )
    return [int(group) for group in groups]


@functools.lru_cache(maxsize=16)
def draw_permutations(seed: int, number: int, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Different random permutations of the classes; the first is the identity.

    Args:
        seed: Seed of the draw.
        number: Number of permutations.
        num_classes: Number of classes C.

    Raises:
        PartitionError: If C! is less than the number.

    Example:
        >>> draw_permutations(seed=0, number=3, num_classes=4)
        ((0, 1, 2, 3), (3, 0, 1, 2), (1, 2, 0, 3))
    """
    if num_classes < 20 and math.factorial(num_classes) < number:
        raise PartitionError(
            f"ConceptShift: {number} groups need as many permutations, {num_classes} classes have "
            f"{math.factorial(num_classes)}: lower groups, or list permutations, which may repeat"
        )
    rng = np.random.default_rng([seed, DataStream.SHIFT])
    drawn = {tuple(range(num_classes)): None}  # a dictionary keeps the order of the draws
    while len(drawn) < number:
        drawn[tuple(rng.permutation(num_classes).tolist())] = None
    return tuple(drawn)
