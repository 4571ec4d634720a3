"""What searches have found for the rows of a study: kept in its folder, and laid over the configs of the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import same_options
from pfl_lightning.runs.lock import wait_for_lock
from pfl_lightning.study.options import Config, as_read, option_of, with_options, write_yaml
from pfl_lightning.study.plan import Cell, seeded
from pfl_lightning.study.reader import Search, Study
from pfl_lightning.study.runner import flat_options

BEST = "best.yaml"
"""The options that the newest search of a cell has found, with what was searched."""


class NoTrialError(ConfigurationError):
    """A search of which no trial succeeded, so that its row stays without options."""


def search_folder(output: Path, cell: Cell) -> Path:
    """Folder of a cell's search."""
    return output / "search" / cell.path


def with_answers(study: Study, cells: Sequence[Cell], output: Path) -> list[Cell]:
    """Cells with the options that searches have found for them; those without an answer wait.

    Args:
        study: The study.
        cells: Its cells.
        output: Its folder.
    """
    found = [(cell, _answer(study, cell, search_folder(output, cell)) if cell.waits else None) for cell in cells]
    return [cell if options is None else _with(cell, options) for cell, options in found]


def search_row(
    study: Study, cell: Cell, output: Path, search: Callable[[Search, Config, Path], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Search options of a cell, unless another command has done so, and keep them.

    Args:
        study: The study.
        cell: A cell that waits.
        output: Folder of the study.
        search: From the search, the config of the cell and a folder to the best options, by path.
    """
    assert cell.search is not None
    folder = search_folder(output, cell)
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder):
        options = _answer(study, cell, folder)
        if options is None:
            options = dict(search(cell.search, _first(study, cell), folder))
            if (path := folder / BEST).is_file():  # of another search, which is found again where it is asked for
                path.rename(folder / f"best_{len(list(folder.glob('best_*.yaml'))) + 1}.yaml")
            write_yaml(path, {"options": options, **_asked(study, cell)})
    return options


def _with(cell: Cell, options: Mapping[str, Any]) -> Cell:
    return replace(cell, config=with_options(cell.config, options.items()), waits=False)


def _first(study: Study, cell: Cell) -> Config:
    """The config of a cell's search, which takes the first seed alone."""
    return seeded(cell.config, study.seeds[0], study.seed_options)


def _asked(study: Study, cell: Cell) -> dict[str, Any]:
    """What is searched, as it is read again: a number in quotes, say, is written without them."""
    assert cell.search is not None
    search = {key: value for key, value in asdict(cell.search).items() if key != "own"}
    asked: dict[str, Any] = as_read({"search": search, "choice": study.choice, "config": _first(study, cell)})
    return asked


def _answer(study: Study, cell: Cell, folder: Path) -> Mapping[str, Any] | None:
    """What a search for the same has found before, the newest one or an earlier one; ``None`` for none.

    It was of one of the study's seeds, and its data may lie elsewhere. Rows that are searched beside it make no
    difference, nor which choice other than the last round it was for.
    """
    for path in (folder / BEST, *sorted(folder.glob("best_*.yaml"))):
        known = read_yaml(path) if path.is_file() else None
        if not isinstance(known, Mapping) or not isinstance(known.get("search"), Mapping):
            continue  # of no search, or damaged
        asked = _asked(study, cell)
        same = {**known["search"], "methods": None} == {**asked["search"], "methods": None}
        if not same or (known.get("choice") == "last") != (asked["choice"] == "last"):
            continue
        before = flat_options(known.get("config") or {})
        configs = (flat_options(seeded(asked["config"], seed, study.seed_options)) for seed in study.seeds)
        if any(same_options(before, config) for config in configs):
            options: Mapping[str, Any] = known["options"]
            return options
    return None


def with_some_values(cell: Cell) -> Cell:
    """A cell with one of the values that its search tries for each option, so that the options can be checked."""
    space = cell.search.space if cell.search is not None and cell.waits else {}
    return _with(cell, {path: one.choices[-1] if one.choices else one.high for path, one in space.items()})


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
    if option_of(config, "data.validation_share", 0.1) == 0 or option_of(config, "trainer.max_epochs", 1) == 0:
        raise ConfigurationError(
            "a search compares validation accuracies of the training, and data.init_args.validation_share or "
            "trainer.max_epochs is 0: give the clients validation parts, such as 0.1, and rounds"
        )
