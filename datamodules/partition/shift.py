"""Clients that see the same kind of samples differently: rotated images, permuted labels, on top of any rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.datamodules.partition.transform import PartitionTransform
from pfl_lightning.seeding import DataStream


class FeatureShift(PartitionTransform):
    """A rotation of the images for each group of clients, on top of any rule (FedPAC C.10).

    Who holds which samples stays as the base rule says; a client's training, validation and test images are all turned
    by its group's angle. Clients are dealt to groups evenly and in contiguous blocks, as for
    :class:`DominantClasses`: of m clients, client k belongs to group ``k * len(angles) // m``. The paper says that
    every group is rotated "with a certain degree" and names neither angles nor the number of groups; quarter turns move
    pixels without interpolating. To turn the paper's five groups of dominant classes, give five angles.

    Channel statistics are measured on the stored images: quarter turns do not change them, and the black corners of
    other angles do not count. A rotation that the base sets (another FeatureShift, or a file that recorded one) is
    replaced, not added to.

    Args:
        base: The rule that says which client holds which samples.
        angles: Degrees of each group, counter-clockwise. Multiples of 90 are exact (90 and 270 need square images),
            others are interpolated, with black corners.
        groups: The group of each client, from 0, in place of blocks (round robin for four clients and two angles:
            0, 1, 0, 1).
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
        """The base rule's view with the group's rotation."""
        view = self.base.client_view(client, num_classes)
        return dataclasses.replace(view, rotation=self.angles[self._group[client]])


class ConceptShift(PartitionTransform):
    """A permutation of the labels for each group of clients, on top of any rule (FedPAC, section 6.2 and Table 3).

    Who holds which samples stays as the base rule says, by the original labels, test parts included; in all of a
    client's parts a sample of class c then counts as class ``permutation[c]``. Clients are dealt to groups evenly and
    in contiguous blocks: client k of m belongs to group ``k * groups // m``, so that five groups are those of
    FedPAC's dominant classes. Permutations are drawn by the seed, all different, and the first group keeps its
    labels: renaming the classes for everybody turns any other choice into such a one.

    A permutation that the base sets (another ConceptShift, or a file that recorded one) is replaced, not followed.

    Args:
        base: The rule that says which client holds which samples.
        groups: Number of groups, or the group of each client, from 0; None for one a given permutation, else 5.
        permutations: The permutation of each group, each a list of all classes; None to draw them.
        seed: Seed of the permutations.
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
        asked = groups if isinstance(groups, int) else None if listed is None else max(listed, default=-1) + 1
        number = len(permutations) if permutations is not None else 5 if asked is None else asked
        if number < 1:
            raise ValueError(f"expected at least one group, got groups={groups} and permutations={permutations}")
        if permutations is not None and isinstance(groups, int) and groups != number:
            raise ValueError(f"groups is {groups}, permutations lists {number}: give one permutation a group")
        self.groups = groups
        self.permutations = permutations
        self._number = number
        self._given = None if permutations is None else [_as_permutation(own) for own in permutations]
        self._group = group_of_clients(self.num_clients, number, listed, "permutations")

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """The base rule's view with the group's permutation.

        Raises:
            PartitionError: If the permutations are not of the data's classes, or there are too few different ones.
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
    """The group of each client: as listed, or contiguous blocks of equal size.

    Args:
        num_clients: Number of clients m.
        num_groups: Number of groups.
        groups: The group of each client, None for blocks.
        what: What there is one of for each group, for errors.

    Raises:
        ValueError: If the list has not one group a client, or a group that there is not.
    """
    if groups is None:
        return [client * num_groups // num_clients for client in range(num_clients)]
    if len(groups) != num_clients:
        raise ValueError(f"groups lists {len(groups)} clients, the rule has {num_clients}: give one group a client")
    for client, group in enumerate(groups):
        if int(group) != group or not 0 <= group < num_groups:
            raise ValueError(
                f"groups puts client {client} into group {group}, expected 0 to {num_groups - 1}: there are "
                f"{num_groups} {what}"
            )
    return [int(group) for group in groups]


@functools.lru_cache(maxsize=16)
def draw_permutations(seed: int, number: int, num_classes: int) -> tuple[tuple[int, ...], ...]:
    """Different permutations of the classes, the first of which moves nothing.

    Args:
        seed: Seed of the draw.
        number: How many.
        num_classes: Number of classes C.

    Raises:
        PartitionError: If there are not as many.
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


def _as_permutation(given: list[int]) -> tuple[int, ...]:
    ClientView(label_map=tuple(given))  # checks it
    return tuple(int(label) for label in given)
