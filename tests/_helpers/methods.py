"""Which methods the tests of every method run by default, and which with ``-m slow`` alone."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

from pfl_lightning import methods as m
from pfl_lightning.client import FederatedClient

__all__ = ["CORE", "EVERY_METHOD", "crossed", "often", "under"]

CORE: tuple[type[FederatedClient], ...] = (
    m.FedAvg,
    m.FedPer,
    m.Ditto,
    m.FedBABU,
    m.FedProto,
    m.FedClassAvg,
    m.FedPAC,
    m.DCPFL,
    m.DualFed,
    m.Calibre,
)
"""Methods that have between them what methods are made of: phases, second networks, statistics, trained servers, views.

What several tests say of each method is tried with these by default, and with every method by ``pytest -m slow``.
"""


def often(methods: Iterable[type[FederatedClient]] = m.METHODS) -> list[Any]:
    """Values of ``parametrize``: those beyond :data:`CORE` are marked slow."""
    return [one if one in CORE else pytest.param(one, marks=pytest.mark.slow) for one in methods]


EVERY_METHOD = pytest.mark.parametrize("method", often(), ids=lambda method: method.__name__)
"""Every method; those beyond :data:`CORE` are marked slow."""


def crossed(
    first: Mapping[str, tuple[Any, ...]], second: Mapping[str, tuple[Any, ...]], is_often: Callable[[str, str], bool]
) -> list[Any]:
    """Values of ``parametrize``: each case of the first with each of the second; slow unless ``is_often`` says so.

    All of one case follow each other, so that what they are compared with can be made once.
    """
    return [
        pytest.param(*(*one, *other), id=f"{b}-{a}", marks=() if is_often(a, b) else pytest.mark.slow)
        for a, one in first.items()
        for b, other in second.items()
    ]


def under(engines: Mapping[str, tuple[Any, ...]], always: Collection[str]) -> list[Any]:
    """Every method under every engine; beyond :data:`CORE`, engines that are not among ``always`` are marked slow."""
    core = {method.__name__ for method in CORE}
    every = {method.__name__: (method,) for method in m.METHODS}
    return crossed(every, engines, lambda method, engine: method in core or engine in always)
