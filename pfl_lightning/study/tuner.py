"""Search for options by validation accuracy, with optuna: which trials are run, when they end, and what they found."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl_lightning.jobs.processes import LocalStarter, last_lines
from pfl_lightning.jobs.supervision import Job, Jobs
from pfl_lightning.runs.config import is_below
from pfl_lightning.runs.lock import RunLock, wait_for_lock
from pfl_lightning.study.definition.options import Config, option_of, with_option, with_options
from pfl_lightning.study.definition.study import Dimension, Search
from pfl_lightning.study.display import duration
from pfl_lightning.study.run_state import flat_options
from pfl_lightning.study.runner import claim
from pfl_lightning.study.searches import NoTrialError, check_searched
from pfl_lightning.study.trials import (
    TriedOptions,
    accuracy_of,
    evaluated_round,
    option_text,
    trial_job,
    trial_run,
    write_json,
    write_table,
)

if TYPE_CHECKING:
    import optuna

    from pfl_lightning.study.definition.plan import Run

__all__ = ["digest", "search_options", "without_tests"]

STARTUP_TRIALS = 4
"""Trials that are never ended early: the median of fewer says little."""

LINE_EVERY = 60.0
"""Seconds between two lines about trials that run."""


def search_options(
    search: Search,
    config: Config,
    folder: Path,
    *,
    choice: str = "last",
    processes: int = 1,
    threads: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The options with the highest mean validation accuracy (``val_accuracy/mean``); test parts are never evaluated.

    Trials and their results are kept in ``folder/journal.log``, which several processes may share: a search that was
    interrupted goes on, with the trials that were being run, and one that is given more trials adds them. What was
    found is written to ``folder/search.json`` and ``folder/search.md``.

    Args:
        search: What is tried.
        config: The config that the options are laid over, with its seed.
        folder: Folder of the search.
        choice: ``"last"`` for the accuracy of the last evaluated round, otherwise the highest one of a round.
        processes: Trials at once.
        threads: Threads of each.
        say: Prints a line about each trial that ends, and about those that run.

    Returns:
        The best values by path of option.

    Raises:
        ConfigurationError: Optuna is missing, there are no validation parts, or no trial succeeded.
    """
    check_searched(config)
    searcher = _Searcher(search, config, folder, choice, processes, threads, say)
    searcher.run()
    return searcher.report()


def without_tests(config: Config) -> dict[str, Any]:
    """A config without what a search must not do: evaluate test parts, or personalize, which does so, too."""
    kept = {key: value for key, value in config.items() if key != "personalize"}
    callback = {"class_path": "pfl_lightning.study.callbacks.ValidationOnly"}
    return with_option(kept, "trainer.callbacks+", callback)


def digest(search: Search, config: Config, choice: str) -> str:
    """What tells searches apart that lie in one folder; more trials, data elsewhere or a personalization tell none."""
    space = {path: vars(one) for path, one in search.space.items()}
    options = {path: value for path, value in flat_options(config).items() if not is_below(path, "personalize")}
    asked = [space, search.seed, search.prune, options, choice == "last"]
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass
class _Trial:
    """A trial that is being run.

    Attributes:
        asked: The trial, as optuna knows it.
        run: Its run.
        lock: What keeps other searches from it.
        seen: The last round whose accuracy optuna knows; those that run again after a resume do not count.
        pruned: Whether it was ended early.
    """

    asked: optuna.trial.Trial
    run: Run
    lock: RunLock
    seen: int
    pruned: bool = False


@dataclass
class _Searcher:
    """A search of one cell, with the arguments of :func:`search_options`."""

    search: Search
    config: Config
    folder: Path
    choice: str
    processes: int
    threads: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.rounds = int(option_of(self.config, "trainer.max_epochs", 1000) or 1000)
        self.name = digest(self.search, self.config, self.choice)
        self.config = without_tests(self.config)
        self.jobs = Jobs(LocalStarter(), self.processes)
        self._active: dict[Job, _Trial] = {}
        self._began = self._said = time.monotonic()
        self._ended = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        warm = max(self.rounds // 4, 1)
        self.study: optuna.Study = optuna.create_study(
            study_name=self.name,
            storage=JournalStorage(JournalFileBackend(str(self.folder / "journal.log"))),
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, warm)
            if self.search.prune
            else optuna.pruners.NopPruner(),
        )
        self._failed_before = len(self._trials("FAIL"))  # earlier calls' failures are made up for

    def run(self) -> None:
        """Run all trials that are left.

        Raises:
            StoppedError: A signal has come; trials have saved themselves, and go on next time.
        """
        try:
            with closing(self.jobs.run(self._jobs())) as events:
                for ended in events:
                    if ended is None:
                        self._look()
                    else:
                        self._end(self._active.pop(ended.job))
        finally:
            for trial in self._active.values():
                trial.lock.release()

    # ------------------------------------------------------------------ which trial

    def _jobs(self) -> Iterator[Job | None]:
        """The jobs of trials that nobody else runs; ``None`` while others run the last ones, and may be killed."""
        while True:
            with wait_for_lock(self.folder):  # two processes must not take the same trial, or one too many
                trial = self._interrupted() or self._new()
            if trial is None:
                if not self._trials("RUNNING"):
                    return
                yield None
            elif (job := trial_job(trial.run, self.threads)) is None:
                self._end(trial)
            else:
                self._active[job] = trial
                yield job

    def _interrupted(self) -> _Trial | None:
        from optuna.trial import Trial

        own = {trial.asked.number for trial in self._active.values()}
        for frozen in self._trials("RUNNING"):
            found = None if frozen.number in own else self._claimed(Trial(self.study, frozen._trial_id))
            if found is not None and not self._trials()[frozen.number].state.is_finished():
                return found
            if found is not None:
                found.lock.release()
        return None

    def _new(self) -> _Trial | None:
        import optuna

        number = len(self._trials())
        if number - self._failed_before >= self.search.trials:
            return None
        # A sampler for each trial: one that went on from its seed would draw the first trials again after a resume.
        seed = int(hashlib.sha256(f"{self.search.seed} {number}".encode()).hexdigest()[:8], 16)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, self.search.trials // 2))
        return self._claimed(self.study.ask({path: _distribution(one) for path, one in self.search.space.items()}))

    def _claimed(self, asked: optuna.trial.Trial) -> _Trial | None:
        """A trial, if nobody else runs it."""
        config = with_options(self.config, _drawn(asked.params, self.search.space).items())
        run = trial_run(config, self._folder_of(asked.number))
        lock = claim(run)
        return None if lock is None else _Trial(asked, run, lock, _rounds(self._trials()[asked.number]))

    def _trials(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        """Trials so far, or those of some states."""
        from optuna.trial import TrialState

        return self.study.get_trials(deepcopy=False, states=[TrialState[state] for state in states] or None)

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"trials_{self.name}" / str(number)

    # ------------------------------------------------------------------ trials that run

    def _look(self) -> None:
        """Report the rounds that trials have evaluated, and end those that fall behind."""
        for job, trial in self._active.items():
            progress = None if trial.pruned else evaluated_round(trial.run, trial.seen)
            if progress is None or progress.validation is None:
                continue
            trial.seen = progress.round
            trial.asked.report(progress.validation, trial.seen)
            if time.monotonic() - self._said >= LINE_EVERY:
                far = f"round {trial.seen}/{self.rounds}, validation {100 * progress.validation:.2f} %"
                self._tell(f"trial {trial.asked.number}: {far}")
            if trial.asked.should_prune():
                trial.pruned = True
                self.jobs.end(job)

    def _end(self, trial: _Trial) -> None:
        """Take note of a trial whose process has ended."""
        from optuna.trial import TrialState

        with trial.lock:
            accuracy = accuracy_of(trial.run, self.choice)
            if trial.pruned:
                self.study.tell(trial.asked, state=TrialState.PRUNED, skip_if_finished=True)
            elif accuracy is None or not math.isfinite(accuracy):
                self.study.tell(trial.asked, state=TrialState.FAIL, skip_if_finished=True)
            else:
                self.study.tell(trial.asked, accuracy, skip_if_finished=True)
        self._ended += 1
        self._tell(self._outcome(trial.asked.number))
        for checkpoints in trial.run.folder.glob("version_*/checkpoints"):  # of many trials they would fill the disk
            shutil.rmtree(checkpoints, ignore_errors=True)

    def _outcome(self, number: int) -> str:
        """How a trial has ended, how far the search is, the best trial, and how long the others will take."""
        rows = self._rows()
        row, done = rows[number], [one for one in rows if one.state in ("complete", "pruned")]
        outcome = "failed"
        if row.state == "pruned":
            outcome = f"ended early after round {row.rounds}"
        elif row.state == "complete":
            outcome = f"done, validation {100 * (row.accuracy or 0.0):.2f} %,"
        options = ", ".join(f"{path.rpartition('.')[2]}={option_text(value)}" for path, value in row.options.items())
        far = f"{len(done)} of {self.search.trials} done"
        with suppress(ValueError):  # none is complete
            best = _best(done)
            far += f", best {100 * (best.accuracy or 0.0):.2f} % by trial {best.number}"
        if (left := self.search.trials - len(done)) > 0:
            far += f", about {duration((time.monotonic() - self._began) / self._ended * left)} left"
        return f"trial {number} {outcome} with {options} ({far})"

    def _tell(self, text: str) -> None:
        self._said = time.monotonic()
        self.say(text)

    # ------------------------------------------------------------------ what was found

    def _rows(self) -> list[TriedOptions]:
        """All trials so far."""
        space = self.search.space
        return [
            TriedOptions(one.number, one.state.name.lower(), one.value, _drawn(one.params, space), _rounds(one))
            for one in self._trials()
        ]

    def report(self) -> dict[str, Any]:
        """Write what was found; the best options."""
        rows = self._rows()
        # As many as are asked for, where more were tried before.
        counted = [row for row in rows if row.state in ("complete", "pruned")][: self.search.trials]
        if not any(row.state == "complete" for row in counted):
            newest = max((row.number for row in rows if row.state == "fail"), default=0)
            log = self._folder_of(newest) / "log.txt"
            raise NoTrialError(
                f"no trial of the search succeeded: {last_lines(log)}\n(log: {log})\nMend the cause and give the same "
                "command again"
            )
        best = _best(counted)
        write_json(self.folder / "search.json", best, rows)
        write_table(self.folder / "search.md", best, rows, self.search.space)
        return dict(best.options)


def _rounds(trial: optuna.trial.FrozenTrial) -> int:
    return max(trial.intermediate_values, default=0)


def _best(rows: Sequence[TriedOptions]) -> TriedOptions:
    """The complete trial of the highest accuracy, the first of several.

    Raises:
        ValueError: None is complete.
    """
    complete = [row for row in rows if row.state == "complete" and row.accuracy is not None]
    return max(complete, key=lambda row: (row.accuracy or 0.0, -row.number))


def _drawn(params: Mapping[str, Any], space: Mapping[str, Dimension]) -> dict[str, Any]:
    """The options that optuna has drawn; it knows choices by their numbers."""
    return {path: space[path].choices[value] if space[path].choices else value for path, value in params.items()}


def _distribution(dimension: Dimension) -> Any:
    """Optuna's distribution of an option."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:  # by number: a choice may be a list or a class with its arguments
        return CategoricalDistribution(range(len(dimension.choices)))
    if dimension.integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
