"""One call of ``pfl study``: plan, check, run, report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs.processes import LocalStarter, cores
from pfl_lightning.jobs.supervision import Starter, StoppedError, stopping_signals
from pfl_lightning.study.agenda import Agenda
from pfl_lightning.study.arguments import StudyArguments
from pfl_lightning.study.changed import counted, move_aside, refusal
from pfl_lightning.study.definition.options import Config, option_of
from pfl_lightning.study.definition.plan import Run, check_figures
from pfl_lightning.study.definition.study import Search, Study
from pfl_lightning.study.display import Display, Rate
from pfl_lightning.study.runner import Runner
from pfl_lightning.study.searches import NoTrialError, check_searched, search_folder
from pfl_lightning.study.shared_training import SharedTraining
from pfl_lightning.study.tables import print_tables
from pfl_lightning.study.trials import bound_notes

__all__ = ["Conductor"]

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
    """

    def __init__(
        self, study: Study, output: Path, arguments: StudyArguments, argv: Sequence[str], console: Console
    ) -> None:
        self.study = study
        self.output = output
        self.arguments = arguments
        self.argv = argv
        self.console = console
        self.agenda = Agenda(study, output, arguments)
        self._failed_searches: list[Path] = []  # their folders

    # ------------------------------------------------------------------ what can be asked for

    def report(self, failed: Mapping[str, str] | None = None) -> None:
        """Write the tables of what is done.

        Args:
            failed: Why runs have just failed, by name.
        """
        runs, waiting, left_out = self.agenda.table_runs()
        searched = {run.name: run for run in waiting if search_folder(self.output, run.cell) in self._failed_searches}
        reasons = {**dict.fromkeys(searched, "no trial of its search succeeded"), **(failed or {})}
        print_tables(self.study, runs, self.output, self.console, waiting, reasons)
        if left_out:
            self._print(f"{counted(left_out, 'row')} of the study left out, of which nothing was run")

    def report_only(self) -> None:
        """Write the tables, and name what is there of rows that the study does not have."""
        self.report()
        self._print_left_over()

    def check(self) -> None:
        """Check every config, and print the plan."""
        tried = self.agenda.tried_runs()
        self._check_configs([*self.agenda.runs, *tried])
        for run in tried:
            check_searched(run.cell.config)
        self._print_plan()
        for line in self.agenda.lines():
            self._print(line)

    def run(self) -> int:
        """Run what is not done, and write the tables; the exit code of the command."""
        try:
            with stopping_signals():
                return self._run()
        except StoppedError as stopped:
            self._print(f"pfl: stopped by {stopped.number.name}. Go on with:\npfl {shlex.join(self.argv)}")
            return 128 + stopped.number

    def _run(self) -> int:
        self._check_configs(self.agenda.unchecked_runs())  # before any of the runs is moved or searched
        self._handle_changed()
        self._search()
        self._print_plan()
        open_runs = self.agenda.open_runs()
        failed = self._play(open_runs) if open_runs else {}
        self.report(failed)
        return self._exit_code(failed)

    # ------------------------------------------------------------------ the steps of a run

    def _check_configs(self, runs: Sequence[Run]) -> None:
        if runs:
            check_figures(self.study, [run.cell for run in self.agenda.every_run])
            # The rest takes a process with all imports.
            self._print(f"checking the configs of {counted(len(runs), 'run')}")
            from pfl_lightning.study.check import check_configs

            check_configs(runs)

    def _search(self) -> None:
        """Search options of the cells that need it."""
        if not self.agenda.to_search:
            return
        if (before := self.agenda.searched_before()) and not self.arguments.restart:
            raise ConfigurationError(
                f"{self.output} has {counted(len(before), 'finished run')} of rows that would be searched again, "
                "since the search or the options have changed. Run them again with --restart, which keeps the old "
                "ones in another folder, or give another --output"
            )
        names = ", ".join(cell.name for cell in self.agenda.to_search)
        self._print(f"searching options of {names}: {self._trials()}")
        self.agenda.search(self._search_cell)
        self._handle_changed()

    def _trials(self) -> str:
        """How much a search is."""
        rounds = dict.fromkeys(str(option_of(cell.config, "trainer.max_epochs", "?")) for cell in self.agenda.to_search)
        number = len(self.agenda.to_search) * self.study.search.trials if self.study.search is not None else 0
        return f"{number} trials of {' or '.join(rounds)} rounds each come first"

    def _search_cell(self, search: Search, config: Config, folder: Path) -> Mapping[str, Any]:
        from pfl_lightning.study.tuner import search_options

        row = folder.relative_to(self.output / "search")
        try:
            found: Mapping[str, Any] = search_options(
                search,
                config,
                folder,
                choice=self.study.choice,
                processes=self._search_processes,
                threads=self.arguments.threads,
                say=lambda text: self._print(f"{datetime.now():%H:%M:%S} {row}: {text}"),
            )
        except NoTrialError as error:
            self._failed_searches.append(folder)
            self._print(f"pfl: {row}: {error}")
            raise
        said = ", ".join(f"{path.rpartition('.')[2]}={value}" for path, value in found.items())
        self._print(f"{row}: the search took {said}")
        for note in bound_notes(found, search.space):
            self._print(f"  {note}")
        return found

    @property
    def _search_processes(self) -> int:
        """Trials at once, which this machine runs."""
        here = max(cores() // self.arguments.threads, 1)
        return min(self.processes, here) if self.arguments.ray else self.processes

    def _handle_changed(self) -> None:
        """Move runs made with different options aside, or refuse to go on; before rows are searched again, too."""
        changed = self.agenda.changed_runs()
        if not changed:
            return
        if not self.arguments.restart:
            raise ConfigurationError(refusal(self.output, changed))
        aside = move_aside(self.output, [run for run, _ in changed])
        self._print(f"moved {counted(len(changed), 'run')} made with different options to {aside}")

    def _play(self, runs: Sequence[Run]) -> dict[str, str]:
        open_names = {run.name for run in runs}
        done = {run.name for run in self.agenda.runs if run.name not in open_names}
        shared = SharedTraining(self.agenda.all_runs)
        rate = Rate(self.agenda.runs, shared.repeated(runs))
        with Display(self.agenda.runs, done, rate, self.console) as display:
            runner = Runner(
                self.starter,
                display,
                processes=self.processes,
                threads=self.arguments.threads,
                retry=self.arguments.retry,
                shared=shared,
            )
            return runner.play(runs)

    def _exit_code(self, failed: Mapping[str, str]) -> int:
        if not failed:
            return 1 if self._failed_searches else 0
        names = "; ".join(failed)
        one = len(failed) == 1
        hint = ". Fewer --processes need less memory" * any("memory" in why for why in failed.values())
        hint += ". Exit code 2 means that a run refuses its options: correct these first" * any(
            why.endswith("exit code 2") for why in failed.values()
        )
        self._print(
            f"pfl: {counted(len(failed), 'run')} failed and {'is' if one else 'are'} missing in the table: "
            f"{names}. The same command tries {'it' if one else 'them'} again, after the last checkpoint{hint}"
        )
        return 1

    # ------------------------------------------------------------------ where runs take place

    @cached_property
    def starter(self) -> Starter:
        """Starts the runs."""
        if not self.arguments.ray:
            return LocalStarter()
        from pfl_lightning.jobs.processes import RayStarter

        return RayStarter(self.arguments.ray, self.arguments.threads, self.arguments.gpus)

    @cached_property
    def processes(self) -> int:
        """How many runs are under way at once."""
        if self.arguments.processes is not None:
            return self.arguments.processes
        found = max(getattr(self.starter, "cores", cores()) // self.arguments.threads, 1)
        if self.arguments.ray or all(option_of(run.config, "trainer.accelerator") == "cpu" for run in self.agenda.runs):
            return found
        return min(found, RUNS_OF_A_GPU) if found > RUNS_OF_A_GPU and _has_gpu() else found

    # ------------------------------------------------------------------ what is printed

    def _print_plan(self) -> None:
        """How many runs there are, and what is there of rows that the study does not have."""
        self._print(self.agenda.summary())
        self._print_left_over()

    def _print_left_over(self) -> None:
        for line in self.agenda.left_over():
            self._print(line)

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def _has_gpu() -> bool:
    """Whether this machine has an accelerator that runs would share."""
    import torch

    return torch.cuda.is_available()
