"""Epsilon of Gaussian mechanisms on Poisson samples, by the accountants of opacus."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pfl_lightning.errors import ConfigurationError

Spent = tuple[float, float, int]
"""Noise multiplier, sampling rate, and number of rounds with them."""

ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64), 80, 96, 128, 192, 256, 384, 512)
"""Orders of Renyi divergences: those of opacus, and larger ones for much noise."""


def accountants() -> Any:
    """The package of opacus.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from opacus import accountants
    except ImportError as error:
        raise ConfigurationError(
            "privacy needs the accountants of opacus: pip install 'pfl-lightning[privacy]'"
        ) from error
    return accountants


@lru_cache
def epsilon(spent: tuple[Spent, ...], delta: float, accountant: str = "rdp") -> float:
    """Epsilon after rounds, for clients that are added or taken away.

    Args:
        spent: The rounds.
        delta: Probability beyond epsilon.
        accountant: ``"rdp"`` or ``"prv"``.
    """
    if not spent:
        return 0.0
    if accountant != "rdp":
        made = accountants().create_accountant(accountant)
        made.history = [*spent]
        return float(made.get_epsilon(delta))
    divergences = [0.0] * len(ORDERS)
    for noise, rate, rounds in spent:
        divergences = [known + rounds * own for known, own in zip(divergences, _divergences(noise, rate), strict=True)]
    return float(_analysis().get_privacy_spent(orders=ORDERS, rdp=divergences, delta=delta)[0])


def rounds_within(spent: Sequence[Spent], noise: float, rate: float, delta: float, most: float, kind: str) -> int:
    """How many rounds more keep epsilon at ``most`` or below."""

    def after(rounds: int) -> float:
        return epsilon((*spent, (noise, rate, rounds)), delta, kind)

    upper = 1
    while upper < 2**24 and after(upper) <= most:
        upper *= 2
    return bisect_right(range(1, upper), most, key=after)


@lru_cache
def _divergences(noise: float, rate: float) -> tuple[float, ...]:
    """Those of one round, by order: a tenth of a second, once."""
    return tuple(_analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS).tolist())


def _analysis() -> Any:
    accountants()
    from opacus.accountants.analysis import rdp

    return rdp
