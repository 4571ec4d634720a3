"""Which clients take part in a round, and which are evaluated."""

from __future__ import annotations

import math

import numpy as np

from pfl_lightning.errors import ConfigurationError

__all__ = ["check_places", "draw_clients", "number_of_clients"]


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


def check_places(places: list[int], num_clients: int, round: int) -> None:
    """Refuse a cohort of other clients than those that take part; ``sample_cohort`` may be a user's.

    Raises:
        ConfigurationError: A place is none of the participating clients'.
    """
    if places and not 0 <= min(places) <= max(places) < num_clients:
        raise ConfigurationError(
            f"round {round + 1}: sample_cohort returned {places}, expected places among the {num_clients} "
            "participating clients, from 0, which need not be their numbers where some clients are novel"
        )
