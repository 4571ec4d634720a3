"""Classes of a data set's items, for partition rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from pfl_lightning.data import LABEL_KEYS
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.memory import checked_length

__all__ = ["classes_of", "names_of_classes"]


def classes_of(dataset: Dataset[Any], labels: Callable[[Any], Any] | None = None) -> Ints | None:
    """Class of every item.

    The first source that applies is used: the function ``labels``; the data set's ``targets``; the last tensor of a
    TensorDataset; the second entry of items (input, class), or an item's entry ``label``, ``labels``, ``target``,
    ``targets`` or ``y``.

    Args:
        dataset: A map-style data set.
        labels: Function from an item to its class.

    Returns:
        Shape (N,), int64; ``None`` if items have no class (a regression, or no known entry).

    Raises:
        ValueError: If ``labels`` returns something other than whole numbers from 0.

    Example:
        >>> classes_of([{"text": "rain", "label": 0}, {"text": "goal", "label": 1}]).tolist()
        [0, 1]
        >>> classes_of([("rain", 0.25), ("goal", 0.5)]) is None  # a regression
        True
        >>> classes_of(["a1", "b0"], labels=lambda item: int(item[-1])).tolist()
        [1, 0]
    """
    if labels is not None:
        given = _whole_numbers([labels(item) for item in _items(dataset)])
        if given is None:
            raise ValueError("labels must give a whole number from 0 for every item of the data set: correct labels")
        return given
    if isinstance(dataset, Subset):
        whole = classes_of(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if hasattr(dataset, "targets"):
        return _whole_numbers(dataset.targets)
    if isinstance(dataset, TensorDataset):
        return _whole_numbers(dataset.tensors[-1]) if len(dataset.tensors) > 1 else None
    return _from_items(dataset)


def names_of_classes(given: Sequence[str] | None, dataset: Dataset[Any], sets: Iterable[Ints]) -> tuple[str, ...]:
    """Names of the classes: those that are given, else the data set's ``classes``, else numbers.

    Args:
        given: A name for each class, if the user gives them.
        dataset: The training set.
        sets: Classes of the items of each set.

    Raises:
        ValueError: If a label is beyond the data set's classes, or labels without names leave out most of their
            classes: one wrong label would make the model as wide as itself.

    Example:
        >>> names_of_classes(None, ["rain", "goal"], [np.array([0, 1, 1])])
        ('0', '1')
    """
    present = np.unique(np.concatenate(list(sets)))
    highest = int(present[-1])
    names: Any = getattr(dataset, "classes", None) if given is None else given
    if not hasattr(names, "__len__"):
        if 2 * len(present) < highest + 1:
            raise ValueError(
                f"labels go up to {highest}, and {highest + 1 - len(present)} of the {highest + 1} classes from 0 have "
                "no item: correct the labels, number the classes without gaps, or name them all (class_names)"
            )
        names = range(highest + 1)
    elif given is None and len(names) <= highest:
        raise ValueError(
            f"the data set names {len(names)} classes, and has an item of class {highest}: correct the labels, "
            "or name all classes (class_names)"
        )
    return tuple(str(name) for name in names)


def _items(dataset: Any) -> Iterator[Any]:
    return (dataset[place] for place in range(checked_length(dataset, "data set")))


def _from_items(dataset: Dataset[Any]) -> Ints | None:
    found = []
    for item in _items(dataset):
        label = _of_item(item)
        if label is None:
            return None
        found.append(label)
    return _whole_numbers(found)


def _of_item(item: Any) -> Any:
    if isinstance(item, Mapping):
        known = [item[key] for key in LABEL_KEYS if key in item]
        return known[0] if len(known) == 1 else None
    return item[1] if isinstance(item, tuple | list) and len(item) == 2 else None


def _whole_numbers(values: Any) -> Ints | None:
    """Values as an array of classes if they are integers from 0, one per item; else None."""
    try:
        array = np.asarray(values.cpu() if isinstance(values, Tensor) else [_number(value) for value in values])
    except (TypeError, ValueError):
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not len(array) or not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
        return None
    return array.astype(np.int64) if int(array.min()) >= 0 else None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
