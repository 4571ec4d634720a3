"""A study: methods, settings and seeds whose runs make one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pfl_lightning.study.options import Config

__all__ = ["CHOICES", "FIGURES", "Dimension", "Published", "Search", "Study"]

CHOICES = ("last", "validation_selected", "best_test")
"""Which round's accuracies the table shows."""

FIGURES = ("test", "personalized", "personalized_novel")
"""Which accuracies the table shows."""


@dataclass(frozen=True)
class Dimension:
    """Values that a search tries for an option: choices, or a range.

    Attributes:
        choices: The values; empty for a range.
        low: Lowest value of a range.
        high: Highest value of a range.
        log: Whether the range is searched on a logarithmic scale.
        integer: Whether its values are whole numbers.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False


@dataclass(frozen=True)
class Search:
    """A search for options by validation accuracy.

    Attributes:
        trials: Trials of each method in each setting.
        space: What is tried, by path of option.
        methods: The methods that are searched; empty for all.
        seed: Seed of the sampler.
        prune: Whether trials that fall behind are ended early.
        own: What is tried of a method beside that, by name of the method and path of option; of all of them or none.
    """

    trials: int
    space: Mapping[str, Dimension]
    methods: tuple[str, ...] = ()
    seed: int = 0
    prune: bool = True
    own: Mapping[str, Mapping[str, Dimension]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every option that is searched of any method."""
        return tuple(dict.fromkeys([*self.space, *(path for space in self.own.values() for path in space)]))


@dataclass(frozen=True)
class Published:
    """Figures of a paper, in %.

    Attributes:
        source: Paper and table.
        figures: By setting ("" without settings) and label of the row.
    """

    source: str = ""
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """What a study file says, with one of its scales applied.

    Attributes:
        name: Name of the file without its ending.
        title: Title of the table.
        base: Configs that each run starts from; later ones win.
        settings: Configs of the blocks of the table, by name; one setting "" where the study has none.
        methods: Configs of the methods, by name; later ones win.
        grid: Values by path of option; each combination makes a row.
        search: The search for options, if any.
        seeds: One run of each row for each.
        seed_options: Paths of the options that take the seed; empty for those that a config has.
        skip_training: Methods that are only personalized.
        choice: Which round's accuracies the table shows.
        figure: Which accuracies the table shows.
        target_accuracy: For rounds and bytes to a target, in [0, 1].
        published: The paper's figures.
        scale: Name of the scale, "" for none.
        scales: Names of all scales.
    """

    name: str
    title: str
    base: tuple[Config, ...]
    settings: Mapping[str, tuple[Config, ...]]
    methods: Mapping[str, tuple[Config, ...]]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    search: Search | None = None
    seeds: tuple[int, ...] = (0,)
    seed_options: tuple[str, ...] = ()
    skip_training: tuple[str, ...] = ()
    choice: str = "last"
    figure: str = "test"
    target_accuracy: float | None = None
    published: Published = Published()
    scale: str = ""
    scales: tuple[str, ...] = ()
