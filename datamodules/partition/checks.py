"""What is checked of the parts that a rule gives: rules are also written by users."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError


def check_parts(rule: Partitioner, parts: Any, num_samples: int) -> list[Ints]:
    """Check what a rule's ``partition`` gave (rules are also written by users), and return it as int64 arrays.

    Args:
        rule: The rule, named in errors.
        parts: What it gave.
        num_samples: Number of samples that it was shown.

    Raises:
        PartitionError: If it is not one list of indices in range a client.
    """
    where, wanted = f"{type(rule).__name__}.partition", f"{rule.num_clients} index lists, one a client"
    if not hasattr(parts, "__len__"):
        raise PartitionError(f"{where} gave a {type(parts).__name__}, expected {wanted}")
    if len(parts) != rule.num_clients:
        short = f": client {len(parts)} is the first that has none" if len(parts) < rule.num_clients else ""
        raise PartitionError(f"{where} gave {len(parts)} index lists, expected {wanted}{short}")
    return [
        _check_part(f"{where}: client {client} got", part, f"whole numbers from 0 to {num_samples - 1}", num_samples)
        for client, part in enumerate(parts)
    ]


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
