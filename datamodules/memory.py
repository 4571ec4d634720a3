"""Check that data fit into memory, before they are read."""

from __future__ import annotations

import os
from collections.abc import Sized

PER_ITEM = 500
"""Bytes that an item of a data set takes in addition to its values, as a tensor of its own."""


def check_memory(what: str, num_bytes: int, advice: str) -> None:
    """Refuse data that are larger than the machine's memory.

    Args:
        what: The data, as the beginning of a sentence.
        num_bytes: Their size.
        advice: What to do.

    Raises:
        ValueError: If they are larger.
    """
    memory = _memory()
    if memory is not None and num_bytes > memory:
        raise ValueError(
            f"{what} would need {_gigabytes(num_bytes)}, this machine has {_gigabytes(memory)} of memory: {advice}"
        )


def checked_length(dataset: Sized, what: str, item_bytes: int = 0) -> int:
    """Number of items of a data set, after a check that it is one of a data set with an end.

    Args:
        dataset: A map-style data set.
        what: Its name in errors.
        item_bytes: Size of an item's values.

    Raises:
        ValueError: If it is empty, no number, or more than the machine's memory has room for.
    """
    try:
        length = len(dataset)
    except (OverflowError, ValueError, TypeError) as error:
        raise ValueError(
            f"the {what} ({type(dataset).__name__}) has a length that is no number of items ({error}): give a "
            "map-style Dataset whose __len__ is its number of items"
        ) from error
    if length == 0:
        raise ValueError(f"the {what} is empty")
    check_memory(
        f"the {what} with a length of {length} items",
        length * (item_bytes + PER_ITEM),
        "use fewer or smaller items; if the data set is endless, give it a __len__ that is its number of items",
    )
    return length


def _memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
