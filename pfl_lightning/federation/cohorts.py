"""How many clients a share or a number means, and which they are."""

from __future__ import annotations

import math

import numpy as np

from pfl_lightning.errors import ConfigurationError

__all__ = ["draw_clients", "number_of_clients"]


def number_of_clients(name: str, value: int | float, num_clients: int) -> int:
    """The number of clients that a share, rounded up, or a number means.

    Raises:
        ConfigurationError: More clients than there are.
    """
    if isinstance(value, float):
        return max(1, math.ceil(value * num_clients - 1e-9))
    if value > num_clients:
        raise ConfigurationError(f"{name} is {value} clients, there are {num_clients}")
    return value


def draw_clients(size: int, num_clients: int, seed: int) -> list[int]:
    """Distinct clients, ascending; a pure function of its arguments."""
    if size == num_clients:
        return list(range(num_clients))
    return sorted(np.random.default_rng(seed).choice(num_clients, size, replace=False).tolist())
