"""Classes of the items of a project's loaders, as far as they are needed and known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_lightning.datamodules.adapters.item_source import ItemSource
from pfl_lightning.datamodules.adapters.labels import classes_of, known_names
from pfl_lightning.datamodules.adapters.sources import one_class
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError

Sources = Mapping[str, Sequence[ItemSource]]
"""The data sets of each stage."""


@dataclass(frozen=True)
class LoaderClasses:
    """Classes of the items of all loaders.

    Attributes:
        are_known: Whether items have classes.
        names: Their names; one where there are none.
        by_stage: The class of every item of each data set of a stage; 0 where there are none.
    """

    are_known: bool
    names: tuple[str, ...]
    by_stage: dict[str, list[Ints]]


def find_classes(
    sources: Sources,
    partition: Partitioner,
    labels: Callable[[Any], Any] | None,
    class_names: Sequence[str] | None,
) -> LoaderClasses:
    """The classes of all items; no item is read for them unless the rule needs them.

    Args:
        sources: The data sets of each stage.
        partition: The rule.
        labels: See :class:`~pfl_lightning.datamodules.FromLoaders`.
        class_names: See :class:`~pfl_lightning.datamodules.FromLoaders`.

    Raises:
        PartitionError: The rule needs classes, and items have none.
        ValueError: Whole numbers that were said to be classes cannot be.
    """
    # A file's rule goes on with the class proportions of the rule that it was written by.
    read = partition.needs_labels or partition.fixed_train
    found = {name: [classes_of(each.dataset, labels, read=read) for each in own] for name, own in sources.items()}
    sets = {f"{name} set" + (f" {n}" if n else ""): one for name, own in found.items() for n, one in enumerate(own)}
    known = {name: classes for name, classes in sets.items() if classes is not None}
    names: tuple[str, ...] | None = None
    if len(known) == len(sets):
        said = partition.needs_labels or labels is not None or class_names is not None
        # Numbers of persons, files or prices, most of them there once: a client's have no item in a test set.
        number, items = len(np.unique(known["train set"])), len(known["train set"])
        alone = list(sources) == ["train"] and number == items
        if said or read or not (alone or (items >= 100 and 2 * number > items)):
            names = known_names(class_names, sources["train"][0].dataset, known, said)
    elif partition.needs_labels:
        without = next(name for name in sets if name not in known)
        raise PartitionError(
            f"{type(partition).__name__} needs classes, and the items of the {without} have none that is a "
            "whole number: pairs (input, class), a data set with targets, or labels=function of an item, such as "
            "the first of several labels. For a regression use IID, or Quantity on top of it"
        )
    return LoaderClasses(names is not None, names or ("0",), filled(sources, found, names is not None))


def filled(sources: Sources, found: Mapping[str, Sequence[Ints | None]], are_known: bool) -> dict[str, list[Ints]]:
    """The class of every item of each data set of a stage; 0 where it has none, or none are known."""
    return {
        name: [
            classes if are_known and classes is not None else one_class(source)
            for source, classes in zip(own, found[name], strict=True)
        ]
        for name, own in sources.items()
    }
