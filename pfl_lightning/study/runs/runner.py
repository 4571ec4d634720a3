"""Plays the runs of a study, several at once, and shares them with other studies of the same folder."""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pfl_lightning.cli.runs.folders import RunFolder
from pfl_lightning.errors import ConfigurationError, RunLockedError
from pfl_lightning.state.run_lock import RunLock
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.definition.yaml_file import write_yaml
from pfl_lightning.study.runs.processes import Command, Process, Starter, end_all, last_lines
from pfl_lightning.study.runs.progress import copy_progress
from pfl_lightning.study.runs.shared_training import SharedTraining, Trained, settle
from pfl_lightning.study.runs.state import (
    RunState,
    changed_options,
    finished_folder,
    is_in_use,
    last_checkpoint,
    state_of,
)
from pfl_lightning.study.runs.versions import own_versions
from pfl_lightning.study.signals import noted_signals

__all__ = ["Outcome", "Runner", "Watcher", "how_it_ended", "run_command", "start_over"]

PROGRESS_FILE = "pfl_lightning.study.runs.progress_file.ProgressFile"

POLL = 0.2
"""Seconds between looks at the processes."""

LOCKED = 2.0
"""Seconds between looks at a run that another process has."""


class Watcher(Protocol):
    """Is told what happens."""

    def started(self, run: Run, resumed: bool, trained: Run | None = None) -> None:
        """A run was started, or goes on after its last checkpoint, or after that of a run that trains alike."""

    def finished(self, run: Run) -> None:
        """A run is done."""

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """A run's process failed: its last lines, and whether it is tried again."""

    def elsewhere(self, run: Run) -> None:
        """All runs that are left are in use by other processes: one of them."""

    def tick(self) -> None:
        """Some time has passed."""


@dataclass
class Outcome:
    """What became of the runs.

    Attributes:
        failed: Runs whose processes failed.
        reasons: How these ended, by name of the run.
        stopped: The signal that stopped the study, if any.
    """

    failed: list[Run] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    stopped: signal.Signals | None = None


@dataclass
class _Active:
    """A run that is being played.

    Attributes:
        run: The run.
        process: Its process.
        lock: What keeps other studies from the run.
        trained: The training of another run that it goes on after, if any.
    """

    run: Run
    process: Process
    lock: RunLock
    trained: Trained | None = None


REFUSED = 2
"""Exit code of a run that refuses its options."""


class Runner:
    """Plays runs until all are done, have failed or are stopped.

    A run belongs to the study that holds the lock of its folder, so that two commands on the same study share the runs.

    Args:
        starter: Starts their processes.
        watcher: Is told what happens.
        processes: How many are played at once.
        threads: Threads of each.
        retry: How often a run that failed is tried again; one whose options were refused would fail again.
        shared: Which runs train alike: one of them trains, the others wait and go on after its last checkpoint. By
            default every run trains.
    """

    def __init__(
        self,
        starter: Starter,
        watcher: Watcher,
        *,
        processes: int = 1,
        threads: int = 1,
        retry: int = 0,
        shared: SharedTraining | None = None,
    ) -> None:
        self.starter = starter
        self.watcher = watcher
        self.processes = processes
        self.threads = threads
        self.retry = retry
        self.shared = shared or SharedTraining()
        self._active: list[_Active] = []
        self._tries: dict[str, int] = {}
        self._looked: dict[str, float] = {}  # when a run was found in use

    def play(self, runs: Iterable[Run]) -> Outcome:
        """Play runs.

        Args:
            runs: The runs, in the order in which they are started.

        Raises:
            ConfigurationError: Another command has made one of them meanwhile, with other options.
        """
        waiting, outcome = deque(runs), Outcome()
        with noted_signals(outcome):
            try:
                while (waiting or self._active) and outcome.stopped is None:
                    self._start_next(waiting)
                    self._look(waiting, outcome)
                    self.watcher.tick()
                    time.sleep(POLL)
            finally:
                end_all([active.process for active in self._active])
                self._look(waiting, outcome, ending=True)
                for active in self._active:
                    active.lock.release()
                self._active = []
        return outcome

    def _start_next(self, waiting: deque[Run]) -> None:
        """Start as many of the waiting runs as there is room for."""
        for _ in range(len(waiting)):
            if len(self._active) >= self.processes:
                return
            run = waiting.popleft()
            waits = self.shared.must_wait(run, [active.run for active in self._active])
            lock = None if waits else self._claim(run)
            if lock is None:
                waiting.append(run)
            elif state_of(run) is RunState.DONE:  # by another study
                lock.release()
                self.watcher.finished(run)
            else:
                self._refuse_changed(run, lock)
                self._start(run, lock)
        if waiting and not self._active:
            self.watcher.elsewhere(waiting[0])

    @staticmethod
    def _refuse_changed(run: Run, lock: RunLock) -> None:
        """Another study may have made the run since this one looked at it."""
        changed = changed_options(run) if RunFolder(run.folder).versions() else {}
        if changed:
            lock.release()
            raise ConfigurationError(
                f"{run.name} was made meanwhile by another command with other options ({', '.join(changed)}); give one "
                "of the commands another --output"
            )

    def _claim(self, run: Run) -> RunLock | None:
        """The lock of a run; ``None`` while another process has it."""
        if time.monotonic() - self._looked.get(str(run.folder), -LOCKED) < LOCKED:
            return None
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = RunLock(run.folder)
        except RunLockedError:
            self._looked[str(run.folder)] = time.monotonic()
            return None
        if is_in_use(run):
            self._looked[str(run.folder)] = time.monotonic()
            lock.release()
            return None
        return lock

    def _start(self, run: Run, lock: RunLock) -> None:
        try:
            trained = self.shared.done_by(run)
            command = run_command(run, self.threads, trained)
            self._active.append(_Active(run, self.starter.start(command), lock, trained))
        except BaseException:
            lock.release()
            raise
        resumed = "--ckpt_path" in command.words
        if not resumed:
            self.shared.begin(run)
        self.watcher.started(run, resumed, None if trained is None else trained.run)

    def _look(self, waiting: deque[Run], outcome: Outcome, ending: bool = False) -> None:
        """Take note of the processes that have ended; of those that were told to, only if they are done."""
        for active in list(self._active):
            code = active.process.poll()
            if code is None:
                continue
            self._active.remove(active)
            run = active.run
            done = finished_folder(run) is not None
            if done and active.trained is not None:
                settle(active.trained, run)
            active.lock.release()
            if done:
                self.watcher.finished(run)
            elif not ending:
                if active.trained is not None:
                    self.shared.give_up(run)
                self._note_failure(run, code, waiting, outcome)

    def _note_failure(self, run: Run, code: int, waiting: deque[Run], outcome: Outcome) -> None:
        tries = self._tries[str(run.folder)] = self._tries.get(str(run.folder), 0) + 1
        again = tries <= self.retry and code != REFUSED
        self.watcher.failed(run, code, last_lines(run.log), again)
        if again:
            waiting.append(run)
        else:
            outcome.failed.append(run)
            outcome.reasons[run.name] = how_it_ended(code)


def how_it_ended(code: int) -> str:
    """What an exit code means.

    Args:
        code: Exit code of a process; below 0 for the signal that ended it.

    Example:
        >>> how_it_ended(1), how_it_ended(-11)
        ('failed with exit code 1', 'ended by SIGSEGV')
    """
    if code >= 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def run_command(run: Run, threads: int, trained: Trained | None = None) -> Command:
    """The command that starts a run or goes on with it; its config is written.

    What a process has left that was killed before its first checkpoint is moved aside.

    Args:
        run: The run.
        threads: Threads of its process.
        trained: The training of another run that it goes on after, unless it has a checkpoint of its own.
    """
    checkpoint = last_checkpoint(run)
    if checkpoint is None:
        start_over(run)
        if trained is not None:
            checkpoint = trained.checkpoint
            copy_progress(trained.run, run)
    write_yaml(run.config_file, dict(run.config))
    words = ["fit", "--config", str(run.config_file)]
    # In one word, as JSON: the path alone would be read as YAML, in which it may be a mapping or a list.
    callback = {"class_path": PROGRESS_FILE, "init_args": {"path": str(run.progress_file)}}
    words += [f"--trainer.callbacks+={json.dumps(callback)}"]
    words += ["--ckpt_path", str(checkpoint)] if checkpoint is not None else []
    return Command(tuple(words), run.log, threads)


def start_over(run: Run) -> None:
    """Move aside what is there of a run; not what somebody has made in its folder with other options."""
    for version in own_versions(run):
        number = 0
        while (aside := version.with_name(f"set_aside_{number}")).exists():
            number += 1
        version.rename(aside)
