"""The runs that a study consists of, each with its config and its folder."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.changes import listed_some
from pfl_lightning.runs.config import metrics_of, option_of, short_names
from pfl_lightning.runs.folder import NO_SETTING, folder_name
from pfl_lightning.study.options import Config, has_value, merge, short_path, value_of, with_option, with_options
from pfl_lightning.study.reader import Search, Study

SEED_OPTIONS = ("seed_everything", "data.init_args.seed", "data.init_args.partition.init_args.seed")
"""Options that take the seed; those of the data where a config has them."""


@dataclass(frozen=True)
class Cell:
    """A cell of the table: a row under a setting, of one run for each seed.

    Attributes:
        setting: Name of the setting, "" without settings.
        method: Name of the method in the study file.
        label: Label of the row: the method, and the values of the grid.
        config: The config of its runs, apart from the seeds.
        search: What is searched of it, with the options that its method alone has; ``None`` without a search.
        waits: Whether these options are still to be searched.
    """

    setting: str
    method: str
    label: str
    config: Config
    search: Search | None = None
    waits: bool = False

    @property
    def name(self) -> str:
        """Label and setting, as people read them."""
        return f"{self.label} ({self.setting})" if self.setting else self.label

    @property
    def path(self) -> Path:
        """Setting and row as folders."""
        return Path(folder_name(self.setting) or NO_SETTING) / folder_name(self.label)


@dataclass(frozen=True)
class Run:
    """A run of a study.

    Attributes:
        cell: The cell whose mean it enters.
        seed: Its seed.
        config: Its config.
        folder: Its folder, with the file of its config, its log and ``version_0``.
    """

    cell: Cell
    seed: int
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """Row, setting and seed, as people read them."""
        return f"{self.cell.name}, seed {self.seed}"

    @property
    def config_file(self) -> Path:
        """File of its config."""
        return self.folder / "run.yaml"

    @property
    def log(self) -> Path:
        """File with the output of its process."""
        return self.folder / "log.txt"

    @property
    def progress_file(self) -> Path:
        """File with its progress."""
        return self.folder / "progress.json"

    @property
    def rounds(self) -> int:
        """Number of its rounds; 0 where that is unknown."""
        rounds = option_of(self.config, "trainer.max_epochs", 0)
        return rounds if isinstance(rounds, int) and rounds > 0 else 0


def plan_cells(study: Study, run_options: Sequence[tuple[str, str]] = ()) -> list[Cell]:
    """The cells of a study's table, by setting, then method, then values of the grid.

    Args:
        study: The study.
        run_options: Further options of every run, as pairs of path and text.

    Raises:
        UsageError: Two cells would share a folder, a published figure has no row, the table would be empty, the command
            line has an option of the grid or of the search, or something replaces an option of the grid.
    """
    _check_run_options(study, run_options)
    cells: list[Cell] = []
    dropped: dict[str, list[str]] = {}  # rows that name a class alone, which has none of the base's arguments
    for setting, of_setting in study.settings.items():
        for method, of_method in study.methods.items():
            below: Config = reduce(merge, (*study.base, *of_setting), {})
            config: Config = reduce(merge, of_method, below)
            search = study.search
            if search is not None and search.methods and method not in search.methods:
                search = None
            if search is not None and search.methods:
                search = replace(search, space={**search.space, **search.methods[method]}, methods={})
            for label, point in _grid_points(study.grid):
                varied = with_options(config, point)
                for path, text in run_options:
                    varied = with_option(varied, path, value_of(text))
                _check_values(f"{method}{label}", varied, point)
                if search is None and (lost := _arguments(below)) and not _arguments(varied):
                    dropped.setdefault(", ".join(sorted(lost)), []).append(method)
                if method in study.skip_training:
                    varied = with_option(varied, "trainer.max_epochs", 0)
                cells.append(Cell(setting, method, f"{method}{label}", varied, search, search is not None))
    _check_folders(cells)
    _check_figures(study, cells)
    for names, methods in dropped.items():
        warnings.warn(
            f"rows with their methods' defaults, not the base's {names}: {listed_some([*dict.fromkeys(methods)])}. "
            f"They name a class of their own. Repeat {names} in these rows, or set {names} in the base without a class",
            stacklevel=2,
        )
    return cells


def _arguments(config: Config) -> Mapping[str, Any]:
    """What a config gives its method, of whichever class."""
    given = option_of(config, "model.method")
    return given.get("init_args") or {} if isinstance(given, Mapping) else {}


def plan_runs(study: Study, cells: Sequence[Cell], output: Path) -> list[Run]:
    """The runs of cells: all first seeds come first, so that an early table has every row.

    Args:
        study: The study.
        cells: Its cells.
        output: Its folder.
    """
    runs = []
    for seed in study.seeds:
        for cell in cells:
            folder = output / "runs" / cell.path / f"seed_{seed}"
            config = seeded(cell.config, seed, study.seed_options)
            runs.append(Run(cell, seed, in_folder(config, folder), folder))
    return runs


def in_folder(config: Config, folder: Path) -> Config:
    """A config whose run is in a folder, also where the Trainer has a folder that relative paths lie below."""
    rooted = option_of(config, "trainer.default_root_dir") is not None
    return with_option(config, "run_dir", str(folder.absolute() if rooted else folder))


def seeded(config: Config, seed: int, options: Sequence[str] = ()) -> Config:
    """A config with a seed.

    Args:
        config: The config.
        seed: The seed.
        options: Paths of the options that take it; by default those of ``SEED_OPTIONS``.
    """
    for path in options or SEED_OPTIONS:
        if options or path == "seed_everything" or option_of(config, path) is not None:
            config = with_option(config, path, seed)
    return config


def _grid_points(grid: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Label and options of each combination of values; one without options where there is no grid."""
    names = short_names([short_path(path) for path in grid])
    texts = {path: _texts(values) for path, values in grid.items()}
    for indices in itertools.product(*(range(len(values)) for values in grid.values())):
        chosen = list(zip(grid, indices, strict=True))
        label = "".join(f", {names[short_path(path)]}={texts[path][index]}" for path, index in chosen)
        yield label, [(path, grid[path][index]) for path, index in chosen]


def _texts(values: Sequence[Any]) -> list[str]:
    """What the values of an option are called: classes without their packages, where that tells them apart."""
    found = [_short(value) for value in values]
    if len({*found}) < len(found):
        for number, value in enumerate(values):
            given = value.get("init_args") if isinstance(value, Mapping) else None
            if isinstance(given, Mapping):
                found[number] += f"({', '.join(f'{name}={one}' for name, one in given.items())})"
    return found if len({*found}) == len(found) else [str(value) for value in values]


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        value = str(value["class_path"])
    is_import_path = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
    return str(value).rpartition(".")[2] if is_import_path else str(value)


def _check_run_options(study: Study, run_options: Sequence[tuple[str, str]]) -> None:
    """Refuse options of the command line that the study varies, and values for those that take its seeds."""
    varied = {short_path(path): (path, "grid") for path in study.grid}
    varied |= {short_path(path): (path, "search") for path in (study.search.paths if study.search is not None else ())}
    for path, _ in run_options:
        if short_path(path) in varied:
            what = varied[short_path(path)][1]
            raise UsageError(f"--{path} is an option of the study's {what}: change the study file instead")
    given = [(f"--{path}", path) for path, _ in run_options]
    taking = {short_path(path) for path in study.seed_options or SEED_OPTIONS}
    for option, path in given + [(f"{path} of the study's {what}", path) for path, what in varied.values()]:
        if short_path(path) in taking:
            raise UsageError(
                f"{option} takes the seeds of the study, so this would change nothing: set seeds: [...] in the "
                "study file, or leave the option out of its seed_options"
            )


def _check_values(label: str, config: Config, point: Sequence[tuple[str, Any]]) -> None:
    """Refuse a row whose label would say a value that its runs do not have."""
    for path, value in point:
        if not has_value(config, path, value):
            raise UsageError(
                f"{label}: {path} of the grid would be {option_of(config, path)!r} in its runs, not {value!r}: "
                "another option of the grid or of the command line replaces its parent"
            )


def _check_folders(cells: Sequence[Cell]) -> None:
    """Refuse names that are no folders', and cells of one folder; settings are called "" where there are none."""
    names: dict[str, Cell] = {}
    for cell in cells:
        for what, name in (("setting", cell.setting), ("row", cell.label)):
            if not folder_name(name) and (name or what == "row"):
                raise UsageError(f"the {what} {name!r} cannot have a folder: expected a name with a letter or a digit")
        other = names.setdefault(str(cell.path).casefold(), cell)
        if other is not cell:
            raise UsageError(f"{other.name!r} and {cell.name!r} would share the folder {cell.path}: rename one of them")


def _is_never_evaluated(config: Mapping[str, Any]) -> bool:
    rounds, often = (option_of(config, f"trainer.{name}") for name in ("max_epochs", "check_val_every_n_epoch"))
    return isinstance(rounds, int) and isinstance(often, int) and 0 < rounds < often


def _check_figures(study: Study, cells: Sequence[Cell]) -> None:
    """Refuse a table that would be empty, which would show only after all runs, and figures that have no row."""
    if study.figure != "test" and all(cell.config.get("personalize") in (None, False) for cell in cells):
        raise UsageError(
            f"{study.name}: figure is {study.figure}, and no config has the section personalize: add one, such as "
            "{personalize: {train: head}} in base, or leave figure out"
        )
    lacking = [cell for cell in cells if study.metric not in metrics_of(cell.config)]
    if study.metric != "accuracy" and lacking:
        raise UsageError(
            f"{study.name}: metric is {study.metric}, which {lacking[0].label} does not measure: add "
            f"{{metrics: [{study.metric}]}} to base"
        )
    of_test = study.figure == "test" and study.choice == "validation_selected"
    if of_test and all(option_of(cell.config, "data.validation_share") == 0 for cell in cells):
        raise UsageError(
            f"{study.name}: choice is validation_selected, and data.init_args.validation_share is 0: give the "
            "clients validation parts, such as 0.1"
        )
    if study.figure == "test" and all(_is_never_evaluated(cell.config) for cell in cells):
        raise UsageError(
            f"{study.name}: check_val_every_n_epoch is more than the rounds, max_epochs, so that none is evaluated: "
            "add --trainer.check_val_every_n_epoch 1"
        )
    published = {} if study.scale else study.published.figures  # a scale may leave rows out
    for setting, figures in published.items():
        labels = sorted(cell.label for cell in cells if cell.setting == setting)
        for label in figures:
            if label not in labels:
                where = f"published.figures{f'.{setting}' if setting else ''}"
                near = did_you_mean(label, labels)
                has = "; ".join(labels)
                raise UsageError(f"{study.name}.yaml: {where}: the table has no row {label!r}{near} (it has {has})")
