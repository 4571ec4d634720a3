"""Checks of the index lists that a partition rule returns, since rules are also written by users."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError

UNUSED = 0.01
"""Share of the items up to which those that rounding leaves unused are not worth a warning."""


def check_parts(rule: Partitioner, parts: Any, num_samples: int) -> list[Ints]:
    """Index lists of a rule's ``partition`` as int64 arrays, after a check.

    Warnings say how many indices are listed more than once, by one client or several, and how many in none, unless a
    size or a list of items has asked for it.

    Args:
        rule: The rule, named in errors.
        parts: Return value of the rule's ``partition``.
        num_samples: Number of samples that the rule was shown.

    Raises:
        PartitionError: If it is not one list of indices in range per client.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> [part.tolist() for part in check_parts(IID(num_clients=2), [[0, 1], [2]], num_samples=3)]
        [[0, 1], [2]]
        >>> check_parts(IID(num_clients=2), [[0, 1], [3]], num_samples=3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        pfl_lightning...PartitionError: IID.partition: client 1 got index 3, expected whole numbers from 0 to 2 ...
    """
    where, wanted = f"{type(rule).__name__}.partition", f"{rule.num_clients} index lists, one per client"
    if not hasattr(parts, "__len__"):
        raise PartitionError(f"{where} gave a {type(parts).__name__}, expected {wanted}")
    if len(parts) != rule.num_clients:
        short = f": client {len(parts)} is the first without a list" if len(parts) < rule.num_clients else ""
        raise PartitionError(f"{where} gave {len(parts)} index lists, expected {wanted}{short}")
    checked = [
        _check_part(f"{where}: client {client} got", part, f"whole numbers from 0 to {num_samples - 1}", num_samples)
        for client, part in enumerate(parts)
    ]
    if rule.fixed_train:  # a file's indices have their own warning
        return checked
    base = getattr(rule, "base", rule)
    if not getattr(base, "overlap", False):
        _warn_repeated(where, checked)
    if not rule.fixed_sizes:
        _warn_unused(base, [*checked, *(rule.fixed_validation() or ())], num_samples)
    return checked


def _warn_unused(rule: Partitioner, parts: Sequence[Any], num_samples: int) -> None:
    unused = num_samples - len(np.unique(np.concatenate(parts)))
    if unused <= UNUSED * num_samples:
        return
    remedy = ", or set samples_per_client to ask for these sizes" if hasattr(rule, "samples_per_client") else ""
    warnings.warn(
        f"{type(rule).__name__} leaves {unused} of {num_samples} training items to none of "
        f"{rule.num_clients} clients: choose another num_clients, or another rule, to use more of them{remedy}",
        stacklevel=3,
    )


def _warn_repeated(where: str, parts: list[Ints]) -> None:
    found = np.sort(np.concatenate(parts))
    again = found[1:][found[1:] == found[:-1]]
    if len(again):
        warnings.warn(
            f"{where} lists indices more than once, for one client or several: {len(again)} too many, first {again[0]}."
            " Samples may be trained on that others hold for validation. The lists of a rule should be disjoint",
            stacklevel=3,
        )


def _check_part(got: str, part: Any, expected: str, num_samples: int) -> Ints:
    try:
        array = np.asarray(part)
    except (ValueError, TypeError) as error:
        raise PartitionError(
            f"{got} a {type(part).__name__} that is no array, expected a list of {expected} ({error})"
        ) from error
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        raise PartitionError(f"{got} {array.dtype} of shape {array.shape}, expected a list of {expected}")
    outside = array[(array < 0) | (array >= num_samples)]
    if len(outside):
        raise PartitionError(
            f"{got} index {outside[0]}, expected {expected} ({len(outside)} of {len(array)} are outside)"
        )
    return array.astype(np.int64)
