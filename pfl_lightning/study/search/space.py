"""What a search tries, as optuna knows it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.study import Dimension, Search
from pfl_lightning.study.runs.state import flat_options

__all__ = ["digest", "distribution", "drawn_options"]


def drawn_options(params: Mapping[str, Any], space: Mapping[str, Dimension]) -> dict[str, Any]:
    """The options that optuna has drawn; it knows choices by their numbers."""
    return {path: space[path].choices[value] if space[path].choices else value for path, value in params.items()}


def digest(search: Search, config: Config, choice: str) -> str:
    """What tells searches apart that lie in one folder; more trials, or data elsewhere, are the same search."""
    space = {path: vars(one) for path, one in search.space.items()}
    asked = [space, search.seed, search.prune, flat_options(config), choice == "last"]
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def distribution(dimension: Dimension) -> Any:
    """Optuna's distribution of an option."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:  # by number: a choice may be a list or a class with its arguments
        return CategoricalDistribution(range(len(dimension.choices)))
    if dimension.integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
