"""Classes of a data set's items, for partition rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pfl_lightning.data import LABEL_KEYS, checked_length
from pfl_lightning.datamodules.counting import Ints

STRAY = 20
"""How many times fewer items than the usual class the last class has where its label is taken for a mistake."""


def classes_of(dataset: Dataset[Any], labels: Callable[[Any], Any] | None = None, *, read: bool = True) -> Ints | None:
    """Class of every item.

    The first source that applies is used: the function ``labels``; the data set's ``targets`` (as its
    ``target_transform`` makes them, if it has one); the last tensor of a
    TensorDataset; the second entry of items (input, class), or an item's entry ``label``, ``labels``, ``target``,
    ``targets`` or ``y``. Parts and concatenations of such data sets are known, too.

    Args:
        dataset: A map-style data set.
        labels: Function from an item to its class.
        read: Whether items are read where the data set itself does not tell their classes.

    Returns:
        Shape (N,), int64; ``None`` if items have no class (a regression, a mask, boxes, a text, or no known entry), or
        it is not known without reading them.

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
        return _from_items(dataset, labels, said=True)
    known = _without_reading(dataset)
    return known if known is not None or not read or _says_classes(dataset) else _from_items(dataset, _of_item)


def names_of_classes(
    given: Sequence[str] | None, dataset: Dataset[Any], sets: Mapping[str, Ints], *, refuse: bool = False
) -> tuple[str, ...]:
    """Names of the classes: those that are given, else the data set's ``classes``, else numbers.

    Warns of labels that look like a mistake where nobody has named the classes: they begin at 1, or the last class has
    few items, all of them in one set. Names that are no numbers tell which classes there are.

    Args:
        given: A name for each class, if the user gives them.
        dataset: The training set.
        sets: Classes of the items of each set, by its name in messages.
        refuse: Whether labels from 1 are refused: the package's own heads get an output for each class.

    Raises:
        ValueError: If a label is beyond the data set's classes, or labels without names leave out most of their
            classes: one wrong label would make the model as wide as itself.

    Example:
        >>> names_of_classes(None, ["rain", "goal"], {"training set": np.array([0, 1, 1])})
        ('0', '1')
        >>> names_of_classes(None, ["rain"] * 3, {"training set": np.array([1, 2, 2])}, refuse=True)
        Traceback (most recent call last):
        ValueError: labels go from 1 to 2, so no item has class 0 of 3 classes: subtract 1 from the labels, or ...
    """
    if given is not None:
        return tuple(str(name) for name in given)
    present, names = np.unique(np.concatenate(list(sets.values()))), _own_names(dataset)
    highest = int(present[-1])
    if not names and 2 * len(present) < highest + 1:
        raise ValueError(
            f"labels go up to {highest}, and {highest + 1 - len(present)} of the {highest + 1} classes from 0 have "
            "no item: correct the labels, number the classes without gaps, or name them all (class_names)"
        )
    numbers = [str(number) for number in range(max(len(names), highest + 1))]
    if names and len(names) <= highest:
        raise ValueError(
            f"the data set names {len(names)} classes, but has an item of class {highest}: correct the labels, "
            "or name all classes (class_names)"
        )
    names = names or numbers
    if names == numbers and present[0] >= 0:
        _check_used_labels(len(names), sets, refuse)
    return tuple(names)


def _check_used_labels(number: int, sets: Mapping[str, Ints], refuse: bool) -> None:
    counts = {where: np.bincount(own, minlength=number) for where, own in sets.items()}
    items, last = np.sum([*counts.values()], axis=0), number - 1
    remedy = f"name all {number} classes (class_names, or `classes` of the data set)"
    if last > 0 and not items[0] and items[1:].all():
        found = f"labels go from 1 to {last}, so no item has class 0 of {number} classes: subtract 1 from the labels"
        if refuse:
            raise ValueError(f"{found}, or {remedy}")
        warnings.warn(f"{found}, or {remedy}", stacklevel=3)
    where = [name for name, own in counts.items() if own[last]]
    if last > 1 and len(where) == 1 and STRAY * items[last] < np.median(items[items > 0]):
        first = int(np.flatnonzero(sets[where[0]] == last)[0])
        warnings.warn(
            f"label {last} occurs in only {items[last]} of {items.sum()} items, in the {where[0]} (first: "
            f"item {first}), and makes {number} classes: correct it, or {remedy}",
            stacklevel=3,
        )


def check_numbered_alike(train: Any, test: Any) -> None:
    """Refuse a test set that numbers its classes otherwise than the training set, as a folder without one of them does.

    Raises:
        ValueError: Names the first class that differs.
    """
    if found := _differing(train, "the training set", test, "the test set"):
        raise ValueError(
            f"{found}: number the classes of both in the same way. For image folders, add an empty one for each class "
            "that the test set lacks, and pass allow_empty=True to torchvision's ImageFolder; ImageFolder of "
            "pfl_lightning.datamodules needs neither"
        )


def dataset_of_all_classes(datasets: Sequence[Any]) -> Any:
    """The data set that names most classes; where others name theirs otherwise, a warning says so.

    Args:
        datasets: One a client.
    """
    counts = [len(_own_names(own)) for own in datasets]
    most = counts.index(max(counts))
    pairs = ((own, f"the data set of client {client}") for client, own in enumerate(datasets))
    found = [_differing(*own, datasets[most], f"that of client {most}") for own in pairs]
    if any(found):
        warnings.warn(
            f"{next(filter(None, found))}, and counts as one class: number the classes of all clients in the same way, "
            "and list all their names in `classes`",
            stacklevel=2,
        )
    return datasets[most]


def _differing(one: Any, where: str, other: Any, elsewhere: str) -> str | None:
    """The first class that two data sets name otherwise, in words; ``None`` if there is none."""
    pairs = enumerate(zip(_own_names(one), _own_names(other), strict=False))
    found = (f"class {n} is {own!r} in {where} and {name!r} in {elsewhere}" for n, (own, name) in pairs if own != name)
    return next(found, None)


def _own_names(dataset: Any) -> list[str]:
    """Names that a data set, or the one of which it is a part, has for the classes of its items; empty for none."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "classes"):
        dataset = dataset.dataset
    if callable(getattr(dataset, "target_transform", None)) and _says_classes(dataset):
        made, own = _without_reading(dataset), _whole_numbers(dataset.targets)
        if made is not None and (own is None or (made != own).any()):
            return []  # classes that are made of others have other names
    found = getattr(dataset, "classes", None)
    return [str(name) for name in found] if isinstance(found, Sized) and isinstance(found, Iterable) else []


def _from_items(dataset: Any, label_of: Callable[[Any], Any], said: bool = False) -> Ints | None:
    """Classes of the items by a function; ``None`` where one has none, unless they were said to have."""
    found = []
    for place in range(checked_length(dataset, "data set")):
        item = dataset[place]
        try:
            value = label_of(item)
        except Exception as error:  # of the user's own function, which may not say which item it was given
            error.add_note(f"while labels was called with item {place} of the data set")
            raise
        known = _whole_numbers([value])
        if known is None and said:
            raise ValueError(
                f"labels must give a whole number from 0 for every item of the data set, got {str(value)[:80]} for "
                f"item {place}: correct labels"
            )
        if known is None:
            return None  # the others need not be read
        found.append(int(known[0]))
    return np.array(found, dtype=np.int64)


def _says_classes(dataset: Any) -> bool:
    """Whether a data set has a place of its own for classes, so that its items need not be read."""
    if isinstance(dataset, Subset):
        return _says_classes(dataset.dataset)
    return isinstance(dataset, TensorDataset) or (
        isinstance(getattr(dataset, "targets", None), Sized) and len(dataset.targets) == len(dataset)
    )


def _without_reading(dataset: Any) -> Ints | None:
    if isinstance(dataset, Subset):
        whole = _without_reading(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        pieces = [_without_reading(piece) for piece in dataset.datasets]
        found = [piece for piece in pieces if piece is not None]
        return np.concatenate(found) if len(found) == len(pieces) else None
    if isinstance(dataset, TensorDataset):
        return _whole_numbers(dataset.tensors[-1]) if len(dataset.tensors) > 1 else None
    if not _says_classes(dataset):
        return None
    known, transform = _whole_numbers(dataset.targets), getattr(dataset, "target_transform", None)
    if not callable(transform):
        return known
    # torchvision's data sets make the class of an item from the number; classes stay where it makes vectors of them.
    values = dataset.targets.tolist() if isinstance(dataset.targets, Tensor | np.ndarray) else dataset.targets
    made = _whole_numbers([transform(value) for value in values])
    return known if made is None else made


def _of_item(item: Any) -> Any:
    if isinstance(item, Mapping):
        known = [item[key] for key in LABEL_KEYS if key in item]
        return known[0] if len(known) == 1 else None
    if hasattr(item, "num_nodes"):  # a graph of torch_geometric
        return getattr(item, "y", None)
    return item[1] if isinstance(item, tuple | list) and len(item) == 2 else None


def _whole_numbers(values: Any) -> Ints | None:
    """Values as an array of classes if they are integers from 0, one per item; else None."""
    if isinstance(values, Mapping | str):
        return None
    try:
        plain = isinstance(values, np.ndarray) and values.dtype != object
        array = np.asarray(
            values.cpu() if isinstance(values, Tensor) else values if plain else [_number(value) for value in values]
        )
    except (TypeError, ValueError):
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not len(array) or not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
        return None
    return array.astype(np.int64) if int(array.min()) >= 0 else None


def _number(value: Any) -> Any:
    if not isinstance(value, Tensor | np.ndarray | np.generic):
        return value
    if np.prod(value.shape) != 1:
        raise ValueError("more than one number: a mask, several labels, a text")
    return value.item()
