"""What searches have found for the rows of a study: kept in its folder, and laid over the configs of the cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import is_below, option_of
from pfl_lightning.runs.lock import wait_for_lock
from pfl_lightning.study.options import Config, with_options, write_yaml
from pfl_lightning.study.plan import Cell, seeded
from pfl_lightning.study.reader import Search, Study
from pfl_lightning.study.runner import flat_options


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
            first = seeded(cell.config, study.seeds[0], study.seed_options)
            options = dict(search(cell.search, first, folder))
            write_yaml(folder / _file_name(study, cell, study.seeds[0]), options)
    return options


def _with(cell: Cell, options: Mapping[str, Any]) -> Cell:
    return replace(cell, config=with_options(cell.config, options.items()), waits=False)


def digest(search: Search, config: Config, choice: str) -> str:
    """What tells searches apart that lie in one folder; more trials, data elsewhere or a personalization tell none."""
    space = {path: vars(one) for path, one in search.space.items()}
    options = {path: value for path, value in flat_options(config).items() if not is_below(path, "personalize")}
    asked = [space, search.seed, search.prune, options, choice == "last"]
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _file_name(study: Study, cell: Cell, seed: int) -> str:
    """The file of the options that a search of a cell by one of the study's seeds has found."""
    assert cell.search is not None
    asked = digest(cell.search, seeded(cell.config, seed, study.seed_options), study.choice)
    return f"best-{asked}-{cell.search.trials}.yaml"


def _answer(study: Study, cell: Cell, folder: Path) -> Mapping[str, Any] | None:
    """What a search for the same, by one of the study's seeds, has found before; ``None`` for none."""
    for path in (folder / _file_name(study, cell, seed) for seed in study.seeds):
        options = read_yaml(path) if path.is_file() else None
        if isinstance(options, Mapping):
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
