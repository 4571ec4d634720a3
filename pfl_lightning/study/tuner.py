"""Search for options by validation accuracy, with optuna: which trials are run, when they end, and what they found."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl_lightning.jobs.processes import last_lines
from pfl_lightning.jobs.supervision import Starter
from pfl_lightning.jobs.warm import local_starter
from pfl_lightning.runs.config import option_of
from pfl_lightning.state.files import replace_file
from pfl_lightning.study.options import Config, with_option, with_options
from pfl_lightning.study.plan import Cell, Run, in_folder
from pfl_lightning.study.reader import Dimension, Search
from pfl_lightning.study.runner import Runner, finished_folder, read_progress
from pfl_lightning.study.searches import NoTrialError, check_searched, digest

if TYPE_CHECKING:
    import optuna

STARTUP_TRIALS = 4
"""Trials that are never ended early: the median of fewer says little."""

NEAR = 0.05
"""How much of a range, on its scale, counts as its end."""


def search_options(
    search: Search,
    config: Config,
    folder: Path,
    *,
    starter: Starter | None = None,
    choice: str = "last",
    processes: int = 1,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The options with the highest mean validation accuracy (``val_accuracy/mean``); test parts are never evaluated.

    Trials and their results are kept in ``folder/journal.log``: a search that was interrupted goes on, with the trials
    that were being run, and one that is given more trials adds them. What was found is written to
    ``folder/search.json``.

    Args:
        search: What is tried.
        config: The config that the options are laid over, with its seed.
        folder: Folder of the search, which no other process searches in.
        starter: Starts the trials; by default on this machine.
        choice: ``"last"`` for the accuracy of the last evaluated round, otherwise the highest one of a round.
        processes: Trials at once.
        log: Prints a line about each trial that ends.

    Returns:
        The best values by path of option.

    Raises:
        ConfigurationError: Optuna is missing, there are no validation parts, or no trial succeeded.
    """
    check_searched(config)
    folder.mkdir(parents=True, exist_ok=True)
    trials = _Trials(search, config, folder, choice, log)
    trials.runner = Runner(starter or local_starter(1), trials, processes)
    trials.runner.run(trials.ask())
    return trials.report()


def without_tests(config: Config) -> dict[str, Any]:
    """A config without what a search must not do: evaluate test parts, or personalize, which does so, too."""
    kept = {key: value for key, value in config.items() if key != "personalize"}
    callback = {"class_path": "pfl_lightning.study.callbacks.ValidationOnly"}
    return with_option(kept, "trainer.callbacks+", callback)


class _Trials:
    """The trials of a cell's search, which are runs like those of a study; the runner tells it what becomes of them.

    Arguments are those of :func:`search_options`.
    """

    runner: Runner

    def __init__(self, search: Search, config: Config, folder: Path, choice: str, log: Callable[[str], None]) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.search, self.folder, self.choice, self.log = search, folder, choice, log
        rounds = int(option_of(config, "trainer.max_epochs", 1000) or 1000)
        self.name = digest(search, config, choice)
        self.config = without_tests(config)
        self._asked: dict[int, optuna.trial.Trial] = {}
        self._active: dict[int, Run] = {}
        self._reported: dict[int, int] = {}  # the last round of each active trial that optuna knows
        self._pruned: set[int] = set()
        median = optuna.pruners.MedianPruner(STARTUP_TRIALS, max(rounds // 4, 1))
        self.study = optuna.create_study(
            study_name=self.name,
            storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
            direction="maximize",
            load_if_exists=True,
            pruner=median if search.prune else optuna.pruners.NopPruner(),
        )

    def ask(self) -> Iterator[Run]:
        """The runs of trials: those of a search that was interrupted, then new ones."""
        import optuna

        trials = self.study.trials
        for trial in trials:
            if not trial.state.is_finished():
                yield self._run(optuna.trial.Trial(self.study, trial._trial_id))
        failed = sum(trial.state.name == "FAIL" for trial in trials)  # earlier failures are made up for
        space = {path: _distribution(one) for path, one in self.search.space.items()}
        for number in range(len(trials), self.search.trials + failed):
            # A sampler for each trial: one that went on from its seed would draw the first ones again after a resume.
            seed = int(hashlib.sha256(f"{self.search.seed} {number}".encode()).hexdigest()[:8], 16)
            startup = min(10, self.search.trials // 2)
            self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
            yield self._run(self.study.ask(space))

    def _run(self, trial: optuna.trial.Trial) -> Run:
        self._asked[trial.number] = trial
        folder = self.folder / f"trials_{self.name}" / str(trial.number)
        config = with_options(self.config, self._drawn(trial.params).items())
        return Run(Cell("", folder.name, folder.name, config), 0, in_folder(config, folder), folder)

    # ------------------------------------------------------------------ what the runner tells

    def started(self, run: Run, resumed: bool) -> None:
        """Look after a trial from now on."""
        number = int(run.folder.name)
        self._active[number], self._reported[number] = run, _rounds(self.study.trials[number])

    def elsewhere(self, run: Run) -> None:
        """Say nothing of what a killed search has left, which saves itself and ends."""

    def tick(self) -> None:
        """Report the rounds that trials have evaluated, and end those that fall behind."""
        for number, run in self._active.items():
            progress = None if number in self._pruned else read_progress(run.progress_file)
            if progress is None or progress.validation is None:
                continue
            if progress.round <= self._reported[number]:  # again after a resume
                continue
            self._reported[number] = progress.round
            self._asked[number].report(progress.validation, progress.round)
            if self._asked[number].should_prune():
                self._pruned.add(number)
                self.runner.end(run)

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Take note of a trial that was ended early, or has failed."""
        self.finished(run)

    def finished(self, run: Run) -> None:
        """Take note of a trial whose process has ended."""
        from optuna.trial import TrialState

        number = int(run.folder.name)
        self._active.pop(number, None)
        progress = read_progress(run.progress_file) if finished_folder(run) is not None else None
        accuracy: float | None = None
        state = TrialState.PRUNED if number in self._pruned else TrialState.FAIL
        if progress is not None and number not in self._pruned:
            accuracy = progress.validation if self.choice == "last" else progress.best_validation
        if accuracy is not None and math.isfinite(accuracy):
            state = TrialState.COMPLETE
        value = accuracy if state is TrialState.COMPLETE else None
        self.study.tell(self._asked[number], value, state=state, skip_if_finished=True)
        rows = self._rows()
        row, done = rows[number], [one for one in rows if one["state"] in ("complete", "pruned")]
        how = f"{'ended early' if row['state'] == 'pruned' else row['state']} after round {row['rounds']}"
        score = "" if row["accuracy"] is None else f", validation {100 * row['accuracy']:.2f} %,"
        options = ", ".join(f"{path.rpartition('.')[2]}={_text(value)}" for path, value in row["options"].items())
        best = _best(done)
        so_far = f", best {100 * best['accuracy']:.2f} % by trial {best['number']}" if best is not None else ""
        self.log(f"trial {number} {how}{score} with {options} ({len(done)} of {self.search.trials} done{so_far})")
        for checkpoints in run.folder.glob("version_*/checkpoints"):  # of many trials they would fill the disk
            shutil.rmtree(checkpoints, ignore_errors=True)

    def _drawn(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The options that optuna has drawn; it knows choices by their numbers."""
        space = self.search.space
        return {path: space[path].choices[value] if space[path].choices else value for path, value in params.items()}

    # ------------------------------------------------------------------ what was found

    def _rows(self) -> list[dict[str, Any]]:
        """All trials so far, as they are written down; the accuracy is that of a complete one."""
        return [
            {
                "number": one.number,
                "state": one.state.name.lower(),
                "accuracy": one.value if one.state.name == "COMPLETE" else None,
                "options": self._drawn(one.params),
                "rounds": _rounds(one),
            }
            for one in self.study.trials
        ]

    def report(self) -> dict[str, Any]:
        """Write what was found; the best options."""
        rows = self._rows()
        # As many as are asked for, where more were tried before.
        best = _best([row for row in rows if row["state"] in ("complete", "pruned")][: self.search.trials])
        if best is None:
            newest = max((row["number"] for row in rows if row["state"] == "fail"), default=0)
            log = self.folder / f"trials_{self.name}" / str(newest) / "log.txt"
            raise NoTrialError(
                f"no trial of the search succeeded: {last_lines(log)}\n(log: {log})\nFix the cause and run the same "
                "command again"
            )
        notes = bound_notes(best["options"], self.search.space)
        content = {"objective": "mean validation accuracy", "best": best, "notes": notes, "trials": rows}
        with replace_file(self.folder / "search.json", shared=True) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
        return dict(best["options"])


def _rounds(trial: optuna.trial.FrozenTrial) -> int:
    return max(trial.intermediate_values, default=0)


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The complete trial of the highest accuracy, the first of several."""
    return max((row for row in rows if row["accuracy"] is not None), key=lambda row: row["accuracy"], default=None)


def _distribution(dimension: Dimension) -> Any:
    """Optuna's distribution of an option."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:  # by number: a choice may be a list or a class with its arguments
        return CategoricalDistribution(range(len(dimension.choices)))
    if dimension.integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def bound_notes(options: Mapping[str, Any], space: Mapping[str, Dimension]) -> list[str]:
    """Sentences on chosen values that lie at an end of what was tried, beyond which better ones may lie.

    Args:
        options: The chosen values, by path of option.
        space: What was tried, by path of option.
    """
    notes = []
    for path, tried in space.items():
        value: Any = options.get(path)
        numbers = tried.choices or (tried.low, tried.high)
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in (value, *numbers)):
            continue  # of no order
        low, at, high = ((math.log if tried.log else float)(one) for one in (min(numbers), value, max(numbers)))
        margin = 0.0 if tried.choices else NEAR * (high - low)
        for end, side, is_near in (("lower", "below", at <= low + margin), ("upper", "above", at >= high - margin)):
            if is_near and low < high:
                where = f"{_text(value)} is at the {end} end of what was tried"
                notes.append(f"{path}: {where}; values {side} it may be better: extend its search space.")
    return notes


def _text(value: Any) -> str:
    """A value as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
