"""Searches of a study: their results are kept in its folder and laid over the configs of the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import same_options
from pfl_lightning.study.definition.options import (
    Config,
    as_read,
    option_of,
    read_yaml,
    with_options,
    write_yaml,
)
from pfl_lightning.study.definition.plan import Cell, seeded
from pfl_lightning.study.definition.study import Search, Study
from pfl_lightning.study.run_state import flat_options

__all__ = [
    "NoTrialError",
    "check_searched",
    "has_answer",
    "search_folder",
    "search_of",
    "searched_cells",
    "with_some_values",
]

BEST = "best.yaml"
"""The options that the newest search of a cell has found, with what was searched."""


class NoTrialError(ConfigurationError):
    """A search of which no trial succeeded, so that its row stays without options."""


SearchCell = Callable[[Search, Config, Path], Mapping[str, Any]]
"""From a search, the config of a cell and a folder to the best options, by path."""


def search_of(study: Study, cell: Cell) -> Search | None:
    """What is searched of a cell, with the options that its method alone has; ``None`` for a cell without a search."""
    search = study.search
    if search is None or (search.methods and cell.method not in search.methods):
        return None
    if not search.own:
        return search
    return replace(search, space={**search.space, **search.own[cell.method]}, methods=(), own={})


def search_folder(output: Path, cell: Cell) -> Path:
    """Folder of a cell's search."""
    return output / "search" / cell.path


def searched_cells(
    study: Study,
    cells: Sequence[Cell],
    output: Path,
    search: SearchCell | None = None,
    now: Callable[[Cell], bool] = lambda cell: True,
) -> tuple[list[Cell], list[Cell]]:
    """Cells with the options that a search has found for them.

    Args:
        study: The study.
        cells: Its cells.
        output: Its folder.
        search: Searches a cell that was not searched yet; ``None`` leaves it. A search without a trial that succeeded
            leaves its own cell alone.
        now: Whether a cell is to be searched now.

    Returns:
        All cells that may be run, and those that must be searched first.
    """
    found: list[Cell] = []
    waiting: list[Cell] = []
    for cell in cells:
        asked_for = search_of(study, cell)
        if asked_for is None:
            found.append(cell)
            continue
        folder = search_folder(output, cell)
        config = seeded(cell.config, study.seeds[0], study.seed_options)
        searched = {key: value for key, value in asdict(asked_for).items() if key != "own"}
        # As it is read again: a number in quotes, say, is written without them.
        asked = as_read({"search": searched, "choice": study.choice, "config": config})
        known = _answer(folder, asked, study)
        if known is None:
            if search is None or not now(cell):
                waiting.append(cell)
                continue
            try:
                known = {"options": dict(search(asked_for, config, folder)), **asked}
            except NoTrialError:
                waiting.append(cell)
                continue
            if _answer(folder, asked, study) is None:  # not if another command searched beside this one
                _keep(folder, known)
        found.append(replace(cell, config=with_options(cell.config, known["options"].items())))
    return found, waiting


def has_answer(output: Path, cell: Cell) -> bool:
    """Whether a cell was searched before, for the same values or others."""
    return (search_folder(output, cell) / BEST).is_file()


def _answer(folder: Path, asked: Mapping[str, Any], study: Study) -> Mapping[str, Any] | None:
    """What a search for the same has found before, the newest one or an earlier one; ``None`` for none."""
    kept = (read_yaml(path) for path in (folder / BEST, *sorted(folder.glob("best_*.yaml"))) if path.is_file())
    return next((known for known in kept if _is_answer(known, asked, study)), None)


def _keep(folder: Path, known: Mapping[str, Any]) -> None:
    """Write what a search has found; what an earlier one for other values has found stays beside it."""
    path = folder / BEST
    if path.is_file():
        path.rename(folder / f"best_{len(list(folder.glob('best_*.yaml'))) + 1}.yaml")
    write_yaml(path, known)


def _is_answer(known: Any, asked: Mapping[str, Any], study: Study) -> bool:
    """Whether a search was of the same, with one of the study's seeds; its data may lie elsewhere.

    Rows that are searched beside it make no difference, nor which choice other than the last round it was for.
    """
    if not isinstance(known, Mapping) or not isinstance(known.get("search"), Mapping):
        return False  # a damaged file
    if {**known["search"], "methods": None} != {**asked["search"], "methods": None}:
        return False
    if (known.get("choice") == "last") != (asked["choice"] == "last"):
        return False
    options = study.seed_options
    return any(
        same_options(flat_options(known.get("config") or {}), flat_options(seeded(asked["config"], seed, options)))
        for seed in study.seeds
    )


def with_some_values(search: Search | None, cell: Cell) -> Cell:
    """A cell with one of the values that its search tries for each option, so that the options can be checked.

    Args:
        search: What is searched of the cell.
        cell: The cell.
    """
    space = search.space if search is not None else {}
    values = {path: tried.choices[-1] if tried.choices else tried.high for path, tried in space.items()}
    return replace(cell, config=with_options(cell.config, values.items()))


def check_searched(config: Config) -> None:
    """Refuse a search that has nothing to choose by.

    Args:
        config: Of the row.

    Raises:
        ConfigurationError: There are no validation parts, no rounds, or no optuna.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "a search needs optuna: pip install 'pfl-lightning[search]', or leave search out of the study"
        ) from None
    if option_of(config, "data.validation_share", 0.1) == 0:
        raise ConfigurationError(
            "a search chooses by validation accuracy, and data.init_args.validation_share is 0: give the clients "
            "validation parts, such as 0.1"
        )
    if option_of(config, "trainer.max_epochs", 1) == 0:
        raise ConfigurationError("a search compares accuracies of the training, and trainer.max_epochs is 0")
