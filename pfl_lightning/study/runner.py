"""Plays the runs of a study, several at once, and shares them with other studies of the same folder."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from pfl_lightning.errors import ConfigurationError, RunLockedError
from pfl_lightning.jobs.processes import last_lines
from pfl_lightning.jobs.supervision import Ended, Job, Jobs, Starter, how_it_ended
from pfl_lightning.runs.changes import in_words
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.definition.options import write_yaml
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.display import Display
from pfl_lightning.study.run_state import (
    RunState,
    changes_of,
    copy_progress,
    finished_folder,
    is_in_use,
    last_checkpoint,
    own_versions,
    state_of,
)
from pfl_lightning.study.shared_training import SharedTraining, Trained, settle

__all__ = ["Runner", "claim", "run_job", "start_over"]

PROGRESS_FILE = "pfl_lightning.study.callbacks.ProgressFile"

REFUSED = 2
"""Exit code of a run that refuses its options."""


@dataclass
class _Active:
    """A run under way.

    Attributes:
        run: The run.
        lock: What keeps other studies from the run.
        trained: The training of another run that it goes on after, if any.
    """

    run: Run
    lock: RunLock
    trained: Trained | None = None


@dataclass
class Runner:
    """Plays runs until all are done, have failed or are stopped.

    A run belongs to the study that holds the lock of its folder, so that two commands on the same study share the runs.

    Attributes:
        starter: Starts their processes.
        display: Is told what happens.
        processes: How many run at once.
        threads: Threads of each.
        retry: How often a run that failed is tried again; one whose options were refused would fail again.
        shared: Which runs train alike: one of them trains, the others wait and go on after its last checkpoint. By
            default every run trains.
    """

    starter: Starter
    display: Display
    processes: int = 1
    threads: int = 1
    retry: int = 0
    shared: SharedTraining = field(default_factory=SharedTraining)
    _waiting: deque[Run] = field(default_factory=deque, init=False)
    _active: dict[Job, _Active] = field(default_factory=dict, init=False)
    _failures: dict[str, int] = field(default_factory=dict, init=False)

    def play(self, runs: Iterable[Run]) -> dict[str, str]:
        """Play runs.

        Args:
            runs: The runs, in the order in which they are started.

        Returns:
            How runs failed, by their names.

        Raises:
            ConfigurationError: Another command has made one of them meanwhile, with other options.
            StoppedError: A signal has come, and the runs have saved themselves.
        """
        self._waiting, failed = deque(runs), dict[str, str]()
        try:
            with closing(Jobs(self.starter, self.processes).run(self._jobs())) as events:
                for ended in events:
                    if ended is None:
                        self.display.tick()
                    else:
                        self._note(ended, failed)
        finally:
            for active in self._active.values():
                self._leave(active)
            self._active = {}
        return failed

    def _jobs(self) -> Iterator[Job | None]:
        while self._waiting or self._active:
            yield self._next_job()

    def _next_job(self) -> Job | None:
        """The job of the next run that may be played; ``None`` while there is none."""
        for _ in range(len(self._waiting)):
            run = self._waiting.popleft()
            waits = self.shared.must_wait(run, [active.run for active in self._active.values()])
            lock = None if waits else claim(run)
            if lock is None:
                self._waiting.append(run)
            elif state_of(run) is RunState.DONE:  # by another study
                lock.release()
                self.display.finished(run)
            else:
                return self._begin(run, lock)
        if self._waiting and not self._active:
            self.display.elsewhere(self._waiting[0])
        return None

    def _begin(self, run: Run, lock: RunLock) -> Job:
        try:
            # Another study may have made the run since this one looked at it.
            if changed := changes_of(run):
                raise ConfigurationError(
                    f"{run.name} was made meanwhile by another command with other options ({in_words(changed)}); give "
                    "one of the commands another --output"
                )
            trained = self.shared.done_by(run)
            job = run_job(run, self.threads, trained)
        except BaseException:
            lock.release()
            raise
        self._active[job] = _Active(run, lock, trained)
        resumed = "--ckpt_path" in job.argv
        if not resumed:
            self.shared.begin(run)
        self.display.started(run, resumed, None if trained is None else trained.run)
        return job

    def _note(self, ended: Ended, failed: dict[str, str]) -> None:
        """Take note of a run whose process has ended."""
        active = self._active.pop(ended.job)
        run = active.run
        if self._leave(active):
            return
        if active.trained is not None:
            self.shared.give_up(run)
        failures = self._failures[run.name] = self._failures.get(run.name, 0) + 1
        again = failures <= self.retry and ended.code != REFUSED
        self.display.failed(run, ended.code, last_lines(run.log), again)
        if again:
            self._waiting.append(run)
        else:
            failed[run.name] = how_it_ended(ended.code)

    def _leave(self, active: _Active) -> bool:
        """Let a run go whose process has ended; whether it is done."""
        done = finished_folder(active.run) is not None
        if done and active.trained is not None:
            settle(active.trained, active.run)
        active.lock.release()
        if done:
            self.display.finished(active.run)
        return done


def claim(run: Run) -> RunLock | None:
    """The lock of a run; ``None`` while another process has it, such as one that a killed study has left."""
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = RunLock(run.folder)
    except RunLockedError:
        return None
    if is_in_use(run):
        lock.release()
        return None
    return lock


def run_job(run: Run, threads: int, trained: Trained | None = None) -> Job:
    """The job that starts a run or goes on with it; its config is written.

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
    argv = ["fit", "--config", str(run.config_file)]
    # In one word, as JSON: the path alone would be read as YAML, in which it may be a mapping or a list.
    callback = {"class_path": PROGRESS_FILE, "init_args": {"path": str(run.progress_file)}}
    argv += [f"--trainer.callbacks+={json.dumps(callback)}"]
    argv += ["--ckpt_path", str(checkpoint)] if checkpoint is not None else []
    return Job(tuple(argv), run.log, threads)


def start_over(run: Run) -> None:
    """Move aside what is there of a run; not what somebody has made in its folder with other options."""
    for version in own_versions(run):
        number = 0
        while (aside := version.with_name(f"set_aside_{number}")).exists():
            number += 1
        version.rename(aside)
