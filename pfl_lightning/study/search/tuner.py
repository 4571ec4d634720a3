"""Search for options by validation accuracy, with optuna: trials in processes of their own, and what they found."""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl_lightning.errors import ConfigurationError, RunLockedError
from pfl_lightning.state.run_lock import RunLock, wait_for_lock
from pfl_lightning.study.definition.options import Config, option_of, with_options
from pfl_lightning.study.definition.study import Search
from pfl_lightning.study.runs.processes import last_lines
from pfl_lightning.study.search.narrator import Narrator, Say
from pfl_lightning.study.search.processes import TrialStarter, without_tests
from pfl_lightning.study.search.report import TriedOptions, write_json, write_table
from pfl_lightning.study.search.searches import NoTrialError
from pfl_lightning.study.search.space import digest, distribution, drawn_options
from pfl_lightning.study.search.trials import run_trial

if TYPE_CHECKING:
    import optuna

__all__ = ["check_searched", "search_options"]

STARTUP_TRIALS = 4
"""Trials that are never ended early: the median of fewer says little."""

WAIT = 1.0
"""Seconds between looks for a trial while others run the last ones."""


def search_options(
    search: Search,
    config: Config,
    folder: Path,
    *,
    choice: str = "last",
    processes: int = 1,
    threads: int = 1,
    say: Say | None = None,
) -> dict[str, Any]:
    """The options with the highest mean validation accuracy (``accuracy/mean``); test parts are never evaluated.

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
    searcher = _Searcher(search, config, folder, choice, threads, processes, say or (lambda text: None))
    searcher.run()
    return searcher.report()


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


class _Searcher:
    """A search of one cell."""

    def __init__(
        self, search: Search, config: Config, folder: Path, choice: str, threads: int, processes: int, say: Say
    ) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.search, self.choice, self.threads, self.processes = search, choice, threads, processes
        self.config = without_tests(config)
        self.folder = folder
        self.name = digest(search, self.config, choice)
        self.starter = TrialStarter()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # of drawing a trial
        self._own: set[int] = set()  # trials that this process runs
        rounds = int(option_of(config, "trainer.max_epochs", 1000) or 1000)
        self.narrator = Narrator(search.trials, rounds, processes, say)
        self.study: optuna.Study = optuna.create_study(
            study_name=self.name,
            storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, n_warmup_steps=max(rounds // 4, 1))
            if search.prune
            else optuna.pruners.NopPruner(),
        )
        failed = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.FAIL,))
        self._failed_before = len(failed)  # earlier calls' failures are made up for

    def run(self) -> None:
        """Run all trials that are left."""
        with ThreadPoolExecutor(self.processes) as pool:
            workers = [pool.submit(self._work) for _ in range(self.processes)]
            try:
                done, _ = wait(workers, return_when=FIRST_EXCEPTION)
            finally:  # of an interrupt or an error, too: trials save themselves, and go on next time
                self.starter.stop()
        for worker in done:
            worker.result()

    def _work(self) -> None:
        from optuna.trial import TrialState

        while not self.starter.stopped:
            with self._claimed() as trial:
                if trial is not None:
                    self._run(trial)
                    continue
            if not self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                return
            time.sleep(WAIT)  # others run the last ones, and may be killed

    # ------------------------------------------------------------------ which trial

    @contextmanager
    def _claimed(self) -> Iterator[optuna.trial.Trial | None]:
        """A trial that nobody else runs: one that was interrupted, or a new one; ``None`` if there is none."""
        with self._lock, wait_for_lock(self.folder):  # two processes must not take the same trial, or one too many
            found = self._interrupted() or self._new()
            if found is not None:
                self._own.add(found[0].number)
        if found is None:
            yield None
            return
        trial, lock = found
        try:
            with lock:
                yield trial
        finally:
            self._own.discard(trial.number)

    def _interrupted(self) -> tuple[optuna.trial.Trial, RunLock] | None:
        from optuna.trial import Trial, TrialState

        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if frozen.number in self._own:
                continue
            try:
                lock = RunLock(self._folder_of(frozen.number))
            except RunLockedError:  # somebody runs it
                continue
            if not self._trial(frozen.number).state.is_finished():
                return Trial(self.study, frozen._trial_id), lock
            lock.release()
        return None

    def _new(self) -> tuple[optuna.trial.Trial, RunLock] | None:
        import optuna

        number = len(self.study.get_trials(deepcopy=False))
        if number - self._failed_before >= self.search.trials:
            return None
        # A sampler for each trial: one that went on from its seed would draw the first trials again after a resume.
        seed = int(hashlib.sha256(f"{self.search.seed} {number}".encode()).hexdigest()[:8], 16)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, self.search.trials // 2))
        trial = self.study.ask({path: distribution(one) for path, one in self.search.space.items()})
        return trial, RunLock(self._folder_of(trial.number))

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _folder_of(self, number: int) -> Path:
        folder = self.folder / f"trials_{self.name}" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------------ a trial

    def _run(self, trial: optuna.trial.Trial) -> None:
        from optuna.trial import TrialState

        options = drawn_options(trial.params, self.search.space)
        config = with_options(self.config, options.items())
        folder, pruned = self._folder_of(trial.number), False
        seen, began = set(self._trial(trial.number).intermediate_values), time.monotonic()

        def on_round(number: int, accuracy: float) -> bool:
            nonlocal pruned
            if number not in seen:  # rounds that were played again after a resume
                trial.report(accuracy, number)
            self.narrator.round(trial.number, number, accuracy)
            pruned = trial.should_prune()
            return pruned

        accuracy = run_trial(
            config, folder, choice=self.choice, on_round=on_round, threads=self.threads, starter=self.starter
        )
        if accuracy is None and self.starter.stopped:
            return  # it stays as it is, to be gone on with
        if pruned:
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        elif accuracy is None or not math.isfinite(accuracy):
            self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        else:
            self.study.tell(trial, accuracy, skip_if_finished=True)
        rows = self._rows()
        self.narrator.ended(rows[trial.number], rows, time.monotonic() - began)
        for checkpoints in folder.glob("version_*/checkpoints"):  # of many trials they would fill the disk
            shutil.rmtree(checkpoints, ignore_errors=True)

    # ------------------------------------------------------------------ what was found

    def _rows(self) -> list[TriedOptions]:
        """All trials so far."""
        space = self.search.space
        return [
            TriedOptions(one.number, one.state.name.lower(), one.value, drawn_options(one.params, space), _rounds(one))
            for one in self.study.get_trials(deepcopy=False)
        ]

    def report(self) -> dict[str, Any]:
        """Write what was found; the best options."""
        rows = self._rows()
        # As many as are asked for, where more were tried before.
        counted = [row for row in rows if row.state in ("complete", "pruned")][: self.search.trials]
        complete = [row for row in counted if row.accuracy is not None and row.state == "complete"]
        if not complete:
            newest = max((row.number for row in rows if row.state == "fail"), default=0)
            log = self._folder_of(newest) / "log.txt"
            raise NoTrialError(
                f"no trial of the search succeeded: {last_lines(log)}\n(log: {log})\nMend the cause and give the same "
                "command again"
            )
        best = max(complete, key=lambda row: (row.accuracy or 0.0, -row.number))
        write_json(self.folder / "search.json", best, rows)
        write_table(self.folder / "search.md", best, rows, self.search.space)
        return dict(best.options)


def _rounds(trial: optuna.trial.FrozenTrial) -> int:
    return max(trial.intermediate_values, default=0)
