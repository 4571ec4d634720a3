"""One call of ``pfl study``: plan, check, search, run, report."""

from __future__ import annotations

import argparse
import shlex
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pfl_lightning.errors import ConfigurationError, UsageError
from pfl_lightning.jobs.processes import cores
from pfl_lightning.jobs.supervision import Starter, StoppedError, handled_signals
from pfl_lightning.jobs.warm import local_starter
from pfl_lightning.names import did_you_mean
from pfl_lightning.notices import counted
from pfl_lightning.runs.config import option_of
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.study.display import Display, by_options, print_tables
from pfl_lightning.study.options import Config
from pfl_lightning.study.plan import Cell, Run, plan_cells, plan_runs
from pfl_lightning.study.reader import Search, Study
from pfl_lightning.study.runner import Runner, RunState, claim, difference, state_of, version_of
from pfl_lightning.study.searches import NoTrialError, check_searched, search_row, with_answers, with_some_values

RUNS_OF_A_GPU = 4
"""Runs that share a GPU unless another number is asked for."""


class Conductor:
    """Does what a command line says with a study.

    Args:
        study: The study.
        output: Its folder.
        arguments: What the command line says.
        argv: The command, to say how to go on.
        console: Where it speaks.

    Raises:
        UsageError: The study has no such seed, method or setting, or an option of the command line is one of its grid.
    """

    def __init__(
        self, study: Study, output: Path, arguments: argparse.Namespace, argv: Sequence[str], console: Console
    ) -> None:
        self.study = study
        self.output = output
        self.arguments = arguments
        self.argv = argv
        self.console = console
        self.cells = with_answers(study, plan_cells(study, arguments.run_options), output)
        self._failed_searches: set[str] = set()  # names of their cells
        rows = list(dict.fromkeys([*(cell.label for cell in self.cells), *study.methods]))
        self._seeds = _names("--seeds", arguments.seeds, [str(seed) for seed in study.seeds])
        self._rows = _names("--methods", arguments.methods, rows)
        self._settings = _names("--settings", arguments.settings, [name for name in study.settings if name])

    # ------------------------------------------------------------------ what there is, and what is asked for

    def _all_runs(self) -> list[Run]:
        return plan_runs(self.study, self.cells, self.output)

    def _asked_runs(self) -> list[Run]:
        """The runs that this command is about."""
        return [run for run in self._all_runs() if self._is_asked(run.cell) and str(run.seed) in self._seeds]

    def _is_asked(self, cell: Cell) -> bool:
        rows = cell.method in self._rows or cell.label in self._rows
        return rows and (not cell.setting or cell.setting in self._settings)

    def _waiting(self) -> list[Cell]:
        """Rows that are searched now."""
        return [cell for cell in self.cells if cell.waits and self._is_asked(cell)]

    # ------------------------------------------------------------------ what can be asked for

    def report(self, failed: Mapping[str, str] | None = None) -> None:
        """Write the tables of what is done: of rows that are asked for, and those of which something was run.

        Args:
            failed: Why runs have just failed, by name.
        """
        every, asked = self._all_runs(), {cell.path for cell in self.cells if self._is_asked(cell)}
        rows = asked | {run.cell.path for run in every if version_of(run) is not None}
        runs, searched = [run for run in every if run.cell.path in rows], self._failed_searches
        reasons = {run.name: "no trial of its search succeeded" for run in runs if run.cell.name in searched}
        print_tables(self.study, runs, self.output, self.console, {**(failed or {}), **reasons})
        if left_out := len({run.cell.path for run in every} - rows):
            self._print(f"{counted(left_out, 'row')} of the study left out, none of which was run")

    def check(self) -> None:
        """Check every config, and print the plan."""
        self._check_configs(self._asked_runs())
        for cell in self._waiting():
            check_searched(with_some_values(cell).config)
        self._print_plan()
        for run in self._asked_runs():
            why = difference(run)
            self._print(f"  {state_of(run).value:<10} {run.name}{f': {why}' if why else ''}")

    def run(self) -> int:
        """Run what is not done, and write the tables; the exit code of the command."""

        def stop(number: int, frame: FrameType | None) -> None:  # apart from where the jobs note it
            raise StoppedError(signal.Signals(number))

        try:
            with handled_signals(stop):
                return self._run()
        except StoppedError as stopped:
            self._print(f"pfl: stopped by {stopped.number.name}. Resume with:\npfl {shlex.join(self.argv)}")
            return 128 + stopped.number

    def _run(self) -> int:
        begun = (RunState.DONE, RunState.UNFINISHED)
        # Before any of the runs is moved or searched.
        self._check_configs([run for run in self._asked_runs() if state_of(run) not in begun])
        self._handle_changed()
        if self._waiting():
            self._search(self._waiting())
            self._handle_changed()
        self._print_plan()
        runs = [run for run in self._asked_runs() if state_of(run) in (RunState.NEW, RunState.UNFINISHED)]
        failed = dict[str, str]()
        if runs:
            asked = self._asked_runs()
            done = {run.name for run in asked if state_of(run) is RunState.DONE}
            display = Display(asked, done, self.console)
            failed = Runner(self.starter, display, self.processes, self.arguments.retry).run(runs)
        self.report(failed)
        if failed:
            hint = ". Fewer --processes need less memory" * any("memory" in why for why in failed.values())
            hint += ". Exit code 2: a run rejects its options" * any(why.endswith("code 2") for why in failed.values())
            self._print(
                f"pfl: {counted(len(failed), 'run')} failed, not in the table: {'; '.join(failed)}. The "
                f"same command tries them again, after the last checkpoint{hint}"
            )
        return int(bool(failed or self._failed_searches))

    # ------------------------------------------------------------------ the steps of a run

    def _check_configs(self, runs: Sequence[Run]) -> None:
        if runs:
            # It takes a process with all imports, from which the runs are started, too.
            self._print(f"checking the configs of {counted(len(runs), 'run')}")
            from pfl_lightning.study.check import check_configs

            tried = {id(run.cell): with_some_values(run.cell) for run in runs}
            check_configs(plan_runs(self.study, list(tried.values()), self.output), self.starter)

    def _handle_changed(self) -> None:
        """Move runs made with different options aside, or refuse to go on; before rows are searched again, too."""
        changed = [run for run in self._asked_runs() if difference(run)]
        if not changed:
            return
        if not self.arguments.restart:
            raise ConfigurationError(
                f"{self.output} has {counted(len(changed), 'run')} made with different options:\n"
                f"{by_options(changed)}\nRun them again with --restart, which keeps the old ones in another folder, or "
                "give another --output"
            )
        for run in changed:
            lock = claim(run)
            if lock is None:
                raise ConfigurationError(f"{run.name} is being run by another command: stop it first")
            lock.release()
        aside = self.output / "replaced" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        for run in changed:
            new = aside / run.folder.relative_to(self.output)
            new.parent.mkdir(parents=True, exist_ok=True)
            run.folder.rename(new)
        self._print(f"moved {counted(len(changed), 'run')} made with different options to {aside}")

    def _search(self, cells: Sequence[Cell]) -> None:
        """Search options of rows."""
        rounds = dict.fromkeys(str(option_of(cell.config, "trainer.max_epochs", "?")) for cell in cells)
        number = sum(cell.search.trials for cell in cells if cell.search is not None)
        much = f"{number} trials of {' or '.join(rounds)} rounds each come first"
        self._print(f"searching options of {', '.join(cell.name for cell in cells)}: {much}")
        for cell in cells:
            try:
                search_row(self.study, cell, self.output, self._search_one)
            except NoTrialError as error:
                self._failed_searches.add(cell.name)
                self._print(f"pfl: {cell.path}: {error}")
        self.cells = with_answers(self.study, self.cells, self.output)

    def _search_one(self, search: Search, config: Config, folder: Path) -> Mapping[str, Any]:
        from pfl_lightning.study.tuner import bound_notes, search_options

        row = folder.relative_to(self.output / "search")
        found: Mapping[str, Any] = search_options(
            search,
            config,
            folder,
            starter=self.starter,
            choice=self.study.choice,
            processes=self.processes,
            log=lambda text: self._print(f"{datetime.now():%H:%M:%S} {row}: {text}"),
        )
        options = ", ".join(f"{path.rpartition('.')[2]}={value}" for path, value in found.items())
        for line in (f"{row}: the search took {options}", *(f"  {note}" for note in bound_notes(found, search.space))):
            self._print(line)
        return found

    # ------------------------------------------------------------------ where runs take place

    @cached_property
    def starter(self) -> Starter:
        """Starts processes."""
        return local_starter(self.arguments.threads)

    @cached_property
    def processes(self) -> int:
        """How many runs are under way at once."""
        if self.arguments.processes is not None:
            return int(self.arguments.processes)
        found = max(cores() // int(self.arguments.threads), 1)
        on_cpus = all(option_of(run.config, "trainer.accelerator") == "cpu" for run in self._asked_runs())
        if found <= RUNS_OF_A_GPU or on_cpus:
            return found
        import torch  # a command that needs no GPU starts without it

        return RUNS_OF_A_GPU if torch.cuda.is_available() else found

    # ------------------------------------------------------------------ what is printed

    def _print_plan(self) -> None:
        """How many runs there are, in which states, and what is there of rows that the study does not have."""
        runs = self._asked_runs()
        counts = Counter(state_of(run).value for run in runs)
        states = ", ".join(f"{number} {state}" for state, number in counts.items())
        left_out = len(self._all_runs()) - len(runs)
        more = f"; {left_out} more left out now" if left_out else ""
        self._print(f"{self.study.title}: {counted(len(runs), 'run')} in {self.output} ({states}){more}")
        self.print_left_over()

    def print_left_over(self) -> None:
        """Name what is there of rows that the study does not have."""
        top = self.output / "runs"
        known = {str(cell.path).casefold() for cell in self.cells}
        for row in sorted(top.glob("*/*")):
            number = sum(bool(RunFolder(seed).versions()) for seed in row.glob("seed_*"))
            if number and str(row.relative_to(top)).casefold() not in known:
                self._print(f"{row}: {counted(number, 'run')} of a row that the study does not have")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Names divided by commas, of which a name may have some itself; all where none is given."""
    found, rest = list[str](), _spelled(text)
    while rest:
        begun = [name for name in known if f"{rest},".startswith(f"{_spelled(name)},")]
        if not begun:
            first, has = rest.partition(",")[0], "; ".join(known) or "none"
            raise UsageError(f"{option}: the study has no {first!r}{did_you_mean(first, known)} (it has {has})")
        found.append(max(begun, key=len))
        rest = rest[len(_spelled(found[-1])) + 1 :]
    return found or list(known)


def _spelled(name: str) -> str:
    """A name without spaces at its commas."""
    return ",".join(word.strip() for word in name.split(","))
