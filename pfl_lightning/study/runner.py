"""The runs of a study: how far each is, by what lies in its folder, and what runs them, several at once."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import ConfigurationError, RunLockedError
from pfl_lightning.jobs.processes import last_lines
from pfl_lightning.jobs.supervision import Job, Jobs, Starter, how_it_ended
from pfl_lightning.runs.changes import OF_RUNS, Change, diff, listed_some
from pfl_lightning.runs.config import SETTINGS, is_below, leaves, same_options
from pfl_lightning.runs.files import CONFIG, PERSONALIZED, RESULTS, read_config, resumed_configs
from pfl_lightning.runs.files import last_checkpoint as checkpoint_of
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.options import Config, as_read, short_path, write_yaml
from pfl_lightning.study.plan import Run

PROGRESS_FILE = "pfl_lightning.study.callbacks.ProgressFile"
"""The callback that a study gives its runs, by which they are known."""

MACHINE_OPTIONS = (
    *("run_dir", "data.init_args.root", "data.init_args.num_workers", "trainer.devices"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger"),
    *("trainer.default_root_dir", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Options that differ between machines and change no result."""

COMPARED = (*SETTINGS, "trainer.max_epochs", "seed_everything", "model")
"""Options that must be equal where a run was resumed."""

NOT_GIVEN = "not given"
"""Value of an option that a config does not have, which null need not be the same as."""


class RunState(Enum):
    """How far a run is."""

    DONE = "done"
    UNFINISHED = "unfinished"
    NEW = "new"
    CHANGED = "changed"
    WAITING = "to search"


def state_of(run: Run) -> RunState:
    """How far a run is: changed, if something of it is there that another config has left."""
    if difference(run):
        return RunState.CHANGED
    if run.cell.waits:
        return RunState.WAITING
    if finished_folder(run) is not None:
        return RunState.DONE
    return RunState.NEW if version_of(run) is None else RunState.UNFINISHED


def version_of(run: Run) -> Path | None:
    """The version that is the run: the first one that a study has begun. Others somebody has made by hand.

    Of one whose process was killed early there may be no config.
    """
    versions = RunFolder(run.folder).versions()
    configs = {version: version / CONFIG for version in versions}
    ours = (v for v, path in configs.items() if not path.is_file() or PROGRESS_FILE in path.read_text(errors="replace"))
    return next(ours, None)


def difference(run: Run) -> str:
    """In which options what is there of a run was made otherwise; empty where nothing is there."""
    version = version_of(run)
    if version is None:
        return ""
    found = [*changed_options(run), *_resumed_with(version)]
    if not run.cell.waits:
        return listed_some(found)
    searched = [short_path(path) for path in run.cell.search.space] if run.cell.search is not None else []
    others = [change for change in found if not is_below(short_path(change.option), *searched)]
    return listed_some(others) or "what another search has found"


def changed_options(run: Run) -> list[Change]:
    """Options whose values differ from those that the run's file of its config has.

    The value of an option that is in one of the configs alone is ``NOT_GIVEN`` in the other.
    """
    if not run.config_file.is_file():
        return []
    before, now = flat_options(read_yaml(run.config_file) or {}), flat_options(run.config)
    if not same_options(before, now):
        now = flat_options(as_read(run.config))  # as the file has it: a text such as 1e5 is a number there
    return diff(before, now, missing=NOT_GIVEN)


def _resumed_with(version: Path) -> list[Change]:
    """Options with which somebody went on with a run by hand, and which change its results."""
    resumed = resumed_configs(version)
    first = read_config(version / CONFIG) if resumed else {}
    found = [
        change
        for path in resumed
        for change in diff(first, read_config(path) or first, OF_RUNS)
        if not change.of_execution
        and is_below(change.option, *COMPARED)
        and not is_below(change.option, *MACHINE_OPTIONS)
    ]
    return [change for change in found if change.known or change.of_an_engine]


def flat_options(config: Config) -> dict[str, Any]:
    """The options of a config by path, without those that change no result."""
    return {path: value for path, value in leaves(config).items() if not is_below(path, *MACHINE_OPTIONS)}


def finished_folder(run: Run) -> Path | None:
    """The folder with the results of a finished run; ``None`` while there is none.

    Results that cannot be read, such as those of a damaged disk, are none: the run resumes after its last checkpoint,
    and writes them again.
    """
    version = version_of(run)
    if version is None:
        return None
    names = [RESULTS] + [PERSONALIZED] * (run.config.get("personalize") not in (None, False))
    try:
        results, *_ = [json.loads((version / name).read_bytes()) for name in names]
    except (FileNotFoundError, ValueError):  # no JSON, no text
        return None
    return version if isinstance(results, Mapping) and results.get("finished") is True else None


def last_checkpoint(run: Run) -> Path | None:
    """The checkpoint that a run goes on from."""
    version = version_of(run)
    return checkpoint_of(version) if version is not None and checkpoint_of(version).is_file() else None


def claim(run: Run) -> RunLock | None:
    """The lock of a run; ``None`` while another process has it, such as one that a killed study has left."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held, suppress(RunLockedError):
        lock = held.enter_context(RunLock(run.folder))
        for version in RunFolder(run.folder).versions():
            RunLock(version).release()
        held.pop_all()
        return lock
    return None


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        round: Rounds that are done, those before a resume included.
        rounds: Rounds in all.
        test: Mean test accuracy of the last evaluated round, in [0, 1].
        validation: Mean validation accuracy of the last evaluated round.
        best_validation: The highest mean validation accuracy of a round, those before a resume included.
        score: What was evaluated: ``"classifier"``, ``"nearest_neighbor"`` or ``"metric"``.
    """

    round: int
    rounds: int
    test: float | None = None
    validation: float | None = None
    best_validation: float | None = None
    score: str = "classifier"


def read_progress(path: Path) -> Progress | None:
    """What a run wrote last; ``None`` before its first round."""
    try:
        found = json.loads(path.read_text())
        return Progress(**{field.name: found[field.name] for field in fields(Progress) if field.name in found})
    except (OSError, ValueError, TypeError):
        return None


REFUSED = 2
"""Exit code of a run that refuses its options."""


@dataclass
class Runner:
    """Plays runs until all are done, have failed or are stopped.

    A run belongs to the study that holds the lock of its folder, so that two commands on the same study share the runs.

    Attributes:
        starter: Starts their processes.
        display: Is told what happens, by the methods of a :class:`~pfl_lightning.study.display.Display`.
        processes: How many run at once.
        retry: How often a run that failed is tried again; one whose options were refused would fail again.
    """

    starter: Starter
    display: Any
    processes: int = 1
    retry: int = 0
    _waiting: deque[Run] = field(default_factory=deque, init=False)  # for another command, or to be tried again
    _active: dict[Job, tuple[Run, RunLock]] = field(default_factory=dict, init=False)
    _failures: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._supervised = Jobs(self.starter, self.processes)

    def run(self, runs: Iterable[Run]) -> dict[str, str]:
        """Run them.

        Args:
            runs: The runs, in the order in which they are started; the next one is asked for when there is room for it.

        Returns:
            How runs failed, by their names.

        Raises:
            ConfigurationError: Another command has made one of them meanwhile, with other options.
            StoppedError: A signal has come, and the runs have saved themselves.
        """
        failed = dict[str, str]()
        try:
            with closing(self._supervised.run(self._jobs(iter(runs)))) as events:
                for ended in events:
                    if ended is None:
                        self.display.tick()
                    else:
                        self._note(*ended, failed)
        finally:
            for job in [*self._active]:
                self._leave(job)
        return failed

    def end(self, run: Run) -> None:
        """Ask a run under way to save itself and end; it counts as one that has failed."""
        self._supervised.end(next(job for job, (active, _) in self._active.items() if active is run))

    def _jobs(self, runs: Iterator[Run]) -> Iterator[Job | None]:
        """The job of each run that may be run; ``None`` while there is none."""
        while (job := self._next_job(runs)) or self._waiting or self._active:
            if self._waiting and not self._active:
                self.display.elsewhere(self._waiting[0])
            yield job

    def _next_job(self, runs: Iterator[Run]) -> Job | None:
        waiting = (self._waiting.popleft() for _ in range(len(self._waiting)))
        return next((job for run in itertools.chain(runs, waiting) if (job := self._begin(run))), None)

    def _begin(self, run: Run) -> Job | None:
        """The job of a run, unless another command runs it, or has done so."""
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
            job = None if state_of(run) is RunState.DONE else run_job(run)
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

    def _note(self, job: Job, code: int, failed: dict[str, str]) -> None:
        """Take note of a run whose process has ended."""
        run = self._active[job][0]
        if self._leave(job):
            return
        failures = self._failures[run.name] = self._failures.get(run.name, 0) + 1
        again = failures <= self.retry and code != REFUSED
        self.display.failed(run, code, last_lines(run.log), again)
        if again:
            self._waiting.append(run)
        else:
            failed[run.name] = how_it_ended(code)

    def _leave(self, job: Job) -> bool:
        """Let a run go whose process has ended; whether it is done."""
        run, lock = self._active.pop(job)
        done = finished_folder(run) is not None
        lock.release()
        if done:
            self.display.finished(run)
        return done


def run_job(run: Run) -> Job:
    """The job that starts or resumes a run; its config is written.

    What is there of a run without a checkpoint is moved aside, with what somebody has made beside it by hand: the
    first version is the run.

    Args:
        run: The run.
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
    return Job(tuple(argv), run.log)
