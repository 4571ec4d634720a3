"""What a command line asks of a study: the runs of the table, those that are run now, and the rows to search first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.changes import Change, in_words
from pfl_lightning.study.arguments import StudyArguments
from pfl_lightning.study.changed import changed_before_search, counted, left_over
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.plan import Cell, Run, plan_cells, plan_runs
from pfl_lightning.study.definition.study import Search, Study
from pfl_lightning.study.run_state import RunState, changed_options, changes_of, finished_folder, state_of
from pfl_lightning.study.searches import has_answer, search_of, searched_cells, with_some_values

__all__ = ["Agenda", "Part", "part_of"]


class Agenda:
    """The runs of a study, as a command line and the searches so far leave them.

    Args:
        study: The study.
        output: Its folder.
        arguments: What the command line says.

    Attributes:
        all_runs: All runs of the study, without those of rows that wait for a search.
        waiting: Runs of all rows that wait for a search.
        runs: Those of them that are run now.
        to_search: Rows whose options are searched now, before their runs are known.

    Raises:
        UsageError: The study has no such seed, method or setting, or an option of the command line is one of its grid.
    """

    def __init__(self, study: Study, output: Path, arguments: StudyArguments) -> None:
        self.study = study
        self.output = output
        self.run_options = arguments.run_options
        planned = plan_cells(study, self.run_options)
        self.part = part_of(study, planned, arguments.seeds, arguments.methods, arguments.settings)
        self._set_cells(*searched_cells(study, planned, output))

    def _set_cells(self, cells: Sequence[Cell], waiting: Sequence[Cell]) -> None:
        """Plan the runs of the table, and those of the part that is run now."""
        self.waiting = plan_runs(self.study, waiting, self.output)
        self.to_search = [cell for cell in waiting if self.part.has_cell(cell)]
        self.all_runs = plan_runs(self.study, cells, self.output)
        self.runs = [run for run in self.all_runs if self.part.has(run)]

    def search(self, search: Callable[[Search, Config, Path], Mapping[str, Any]]) -> None:
        """Search options of the rows that need it, and plan their runs.

        Args:
            search: Searches a row: what is searched, the row's config, and the folder of the search.
        """
        planned = plan_cells(self.study, self.run_options)
        self._set_cells(*searched_cells(self.study, planned, self.output, search, self.part.has_cell))

    @property
    def every_run(self) -> list[Run]:
        """All runs of the study, with those of rows that wait for a search."""
        return [*self.all_runs, *self.waiting]

    def table_runs(self) -> tuple[list[Run], list[Run], int]:
        """Runs of the rows that the table has, those of such rows that wait for a search, and how many rows it lacks.

        A row of the table is one that this command asks for, or that something was run of.
        """
        every = self.every_run
        rows = {run.cell.path for run in every if self.part.has_cell(run.cell) or state_of(run) is not RunState.NEW}
        runs, waiting = ([run for run in some if run.cell.path in rows] for some in (self.all_runs, self.waiting))
        return runs, waiting, len({run.cell.path for run in every} - rows)

    def open_runs(self) -> list[Run]:
        """Runs of now that are not done."""
        return [run for run in self.runs if state_of(run) is not RunState.DONE]

    def tried_runs(self) -> list[Run]:
        """Runs of the rows that are searched now, with a value of each option that is searched."""
        cells = [with_some_values(search_of(self.study, cell), cell) for cell in self.to_search]
        return [run for run in plan_runs(self.study, cells, self.output) if self.part.has(run)]

    def unchecked_runs(self) -> list[Run]:
        """Runs of cells that nothing has been run of, or that are run again; those that are tried."""
        return [run for run in self.runs if self._is_unchecked(run)] + self.tried_runs()

    def _is_unchecked(self, run: Run) -> bool:
        if state_of(run) is RunState.CHANGED:  # by an option that may be misspelled
            return True
        return state_of(run) is RunState.NEW and (not run.config_file.is_file() or bool(changed_options(run)))

    def changed_runs(self) -> list[tuple[Run, list[Change]]]:
        """Runs made with different options, and which; of rows that are searched again, too."""
        found = [(run, changes_of(run)) for run in self.runs]
        searched = [run for run in plan_runs(self.study, self.to_search, self.output) if self.part.has(run)]
        found += [(run, changed_before_search(run, search_of(self.study, run.cell))) for run in searched]
        return [(run, options) for run, options in found if options]

    def searched_before(self) -> list[Run]:
        """Finished runs of rows that are searched now, made with what an earlier search has found."""
        cells = [cell for cell in self.to_search if has_answer(self.output, cell)]
        runs = [run for run in plan_runs(self.study, cells, self.output) if self.part.has(run)]
        return [run for run in runs if finished_folder(run) is not None]

    def summary(self) -> str:
        """How many runs there are, in which states."""
        counts = Counter(state_of(run).value for run in self.runs)
        behind = sum(self.part.has(run) for run in self.waiting)
        parts = [f"{number} {state}" for state, number in counts.items()]
        parts += [f"{behind} behind a search of {counted(len(self.to_search), 'row')}"] if behind else []
        number = len(self.runs) + behind
        text = f"{self.study.title}: {counted(number, 'run')} in {self.output} ({', '.join(parts)})"
        left_out = len(self.every_run) - number
        return text + (f"; {left_out} more left out now" if left_out else "")

    def left_over(self) -> list[str]:
        """A line for each row that has runs in the folder and is not in the study."""
        return left_over(self.output, self.every_run)

    def lines(self) -> list[str]:
        """A line for each run with its state, and for each row to search."""
        found = []
        for run in self.runs:
            changed = in_words(changes_of(run))
            found.append(f"  {state_of(run).value:<10} {run.name}{f': {changed}' if changed else ''}")
        found += [f"  to search  {cell.name}" for cell in self.to_search]
        return found + [f"  done       {run.name}, after an earlier search" for run in self.searched_before()]


@dataclass(frozen=True)
class Part:
    """What a command runs of a study; of what is empty, all.

    Attributes:
        seeds: Seeds.
        rows: Names of methods, or labels of rows.
        settings: Names of settings.
    """

    seeds: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def has_cell(self, cell: Cell) -> bool:
        """Whether runs of a cell belong to it."""
        rows = not self.rows or cell.method in self.rows or cell.label in self.rows
        return rows and (not self.settings or cell.setting in self.settings)

    def has(self, run: Run) -> bool:
        """Whether a run belongs to it."""
        return self.has_cell(run.cell) and (not self.seeds or run.seed in self.seeds)


def part_of(study: Study, cells: Sequence[Cell], seeds: str, methods: str, settings: str) -> Part:
    """The part that a command line names, checked against the study.

    Args:
        study: The study.
        cells: All its cells.
        seeds: Seeds, as in "0,1"; empty for all.
        methods: Methods or rows, as in "FedAvg,FedPAC"; empty for all.
        settings: Settings; empty for all.

    Raises:
        UsageError: The study has no such seed, method or setting.
    """
    known = list(dict.fromkeys([*(cell.label for cell in cells), *study.methods]))
    blocks = [name for name in study.settings if name]
    return Part(
        tuple(int(name) for name in _names("--seeds", seeds, [str(seed) for seed in study.seeds], "seed")),
        _names("--methods", methods, known, "method or row"),
        _names("--settings", settings, blocks, "setting"),
    )


def _names(option: str, text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Names divided by commas; a name may have commas itself, so that the longest one that is known is taken."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text and not words:
        raise UsageError(f"{option} {text!r} names no {what}; leave it out for all")
    spelled = {_spelled(name): name for name in known}
    found: list[str] = []
    while words:
        lengths = range(len(words), 0, -1)
        length = next((length for length in lengths if _spelled(",".join(words[:length])) in spelled), 0)
        if not length:
            meant = did_you_mean(words[0], known)
            has = f"it has {'; '.join(known)}" if known else "it has none"
            raise UsageError(f"{option}: the study has no {what} {words[0]!r}{meant} ({has})")
        found.append(spelled[_spelled(",".join(words[:length]))])
        words = words[length:]
    return tuple(dict.fromkeys(found))


def _spelled(name: str) -> str:
    """A name without spaces at its commas."""
    return ",".join(word.strip() for word in name.split(","))
