"""Plays the runs of a study, several at once, and shares them with other studies of the same folder."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs.processes import last_lines
from pfl_lightning.jobs.supervision import Ended, Job, Jobs, Starter, how_it_ended
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.display import Display
from pfl_lightning.study.options import write_yaml
from pfl_lightning.study.plan import Run
from pfl_lightning.study.run_state import (
    PROGRESS_FILE,
    RunState,
    claim,
    difference,
    finished_folder,
    last_checkpoint,
    state_of,
)

__all__ = ["Runner", "run_job"]

REFUSED = 2
"""Exit code of a run that refuses its options."""


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
    """

    starter: Starter
    display: Display
    processes: int = 1
    threads: int = 1
    retry: int = 0
    _waiting: deque[Run] = field(default_factory=deque, init=False)
    _active: dict[Job, tuple[Run, RunLock]] = field(default_factory=dict, init=False)
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
            for job in [*self._active]:
                self._leave(job)
        return failed

    def _jobs(self) -> Iterator[Job | None]:
        """The job of each run that may be played; ``None`` while there is none."""
        while self._waiting or self._active:
            job = next((job for _ in range(len(self._waiting)) if (job := self._begin(self._waiting.popleft()))), None)
            if self._waiting and not self._active:
                self.display.elsewhere(self._waiting[0])
            yield job

    def _begin(self, run: Run) -> Job | None:
        """The job of a run, unless another command plays it, or has done so."""
        lock = claim(run)
        if lock is None:
            self._waiting.append(run)
            return None
        try:
            if changed := difference(run):  # another command may have made it since this one looked at it
                raise ConfigurationError(
                    f"{run.name} was made meanwhile by another command with other options ({changed}); give one of the "
                    "commands another --output"
                )
            job = None if state_of(run) is RunState.DONE else run_job(run, self.threads)
        except BaseException:
            lock.release()
            raise
        if job is None:
            lock.release()
            self.display.finished(run)
            return None
        self._active[job] = run, lock
        self.display.started(run, "--ckpt_path" in job.argv)
        return job

    def _note(self, ended: Ended, failed: dict[str, str]) -> None:
        """Take note of a run whose process has ended."""
        run = self._active[ended.job][0]
        if self._leave(ended.job):
            return
        failures = self._failures[run.name] = self._failures.get(run.name, 0) + 1
        again = failures <= self.retry and ended.code != REFUSED
        self.display.failed(run, ended.code, last_lines(run.log), again)
        if again:
            self._waiting.append(run)
        else:
            failed[run.name] = how_it_ended(ended.code)

    def _leave(self, job: Job) -> bool:
        """Let a run go whose process has ended; whether it is done."""
        run, lock = self._active.pop(job)
        done = finished_folder(run) is not None
        lock.release()
        if done:
            self.display.finished(run)
        return done


def run_job(run: Run, threads: int) -> Job:
    """The job that starts a run or goes on with it; its config is written.

    What is there of a run without a checkpoint is moved aside, with what somebody has made beside it by hand: the
    first version is the run.

    Args:
        run: The run.
        threads: Threads of its process.
    """
    checkpoint = last_checkpoint(run)
    for version in RunFolder(run.folder).versions() if checkpoint is None else ():
        places = (run.folder / f"set_aside_{number}" for number in itertools.count())
        version.rename(next(path for path in places if not path.exists()))
    write_yaml(run.config_file, dict(run.config))
    argv = ["fit", "--config", str(run.config_file)]
    # In one word, as JSON: the path alone would be read as YAML, in which it may be a mapping or a list.
    callback = {"class_path": PROGRESS_FILE, "init_args": {"path": str(run.progress_file)}}
    argv += [f"--trainer.callbacks+={json.dumps(callback)}"]
    argv += ["--ckpt_path", str(checkpoint)] if checkpoint is not None else []
    return Job(tuple(argv), run.log, threads)
