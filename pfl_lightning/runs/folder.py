"""The folder of a run: names of its files, where it lies, and who holds it."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import CheckpointError, UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.changes import OF_RUNS, check_seed, diff, distance, evaluated_otherwise, listed_some
from pfl_lightning.runs.files import CONFIG, last_checkpoint, newest_config, read_config
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.state.files import explain_full_disk, explain_output

LOGS = ("events.out.tfevents.", "hparams.yaml")
"""What a logger has made for a run that was refused, and that goes with its folder."""


@dataclass(frozen=True)
class RunFolder:
    """A folder of runs.

    Attributes:
        base: The folder that holds ``version_0``, ``version_1``, ...
    """

    base: Path

    def versions(self) -> list[Path]:
        """Folders of the runs, oldest first."""
        found = [path for path in self.base.glob("version_*") if path.name.removeprefix("version_").isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))

    def new(self) -> Path:
        """The folder of a new run, made now: of several processes that ask at once, each gets its own."""
        versions = self.versions()
        number = int(versions[-1].name.removeprefix("version_")) + 1 if versions else 0
        while True:
            path = self.base / f"version_{number}"
            with suppress(FileExistsError, FileNotFoundError):  # a run that was refused may just remove the parent
                path.mkdir(parents=True)
                return path
            number += 1

    def run_of(self, checkpoint: Path) -> Path | None:
        """Folder of the run that a checkpoint is from; ``None`` for a checkpoint elsewhere."""
        run = checkpoint.resolve().parent.parent
        return next((version for version in self.versions() if version.resolve() == run), None)

    def find_checkpoint(self, wanted: str, config: Mapping[str, Any] | None = None) -> Path:
        """The file of a checkpoint.

        Args:
            wanted: A path, ``"last"`` (a run's last round) or ``"best"`` (its best validated round). The run is the one
                whose config is nearest to ``config``; of several the newest.
            config: The command's config; ``None`` takes the newest run.

        Raises:
            CheckpointError: There is none; it says where it looked.
        """
        if wanted not in ("last", "best"):
            if not Path(wanted).is_file():
                meant = did_you_mean(wanted, ("last", "best")) or "; give a path, 'last' or 'best'"
                raise UsageError(f"--ckpt_path: there is no file {wanted}{meant}")
            return Path(wanted)
        versions = self.versions()[::-1]
        apart = {version: (0, 0, False) if config is None else distance(version, config) for version in versions}
        versions.sort(key=lambda version: apart[version])  # the newest first of those that are as near
        found = {version: path for version in versions if (path := _checkpoint(version, wanted)) is not None}
        if not found:
            raise CheckpointError(
                f"--ckpt_path {wanted}: there is none in {self.base}/version_*/checkpoints. `pfl fit` with the same "
                "--run_dir writes the last one, and a best one where clients have validation parts "
                "(data.init_args.validation_share); or give the path of a checkpoint"
            )
        version = next(iter(found))
        if version != versions[0]:
            warnings.warn(
                f"--ckpt_path {wanted}: {versions[0]} has no such checkpoint; using {found[version]}", stacklevel=2
            )
        core, trainer, _ = apart[version]
        others = [other for other in versions if other != version and (core or apart[other][0] == core)]
        if config is not None and (core or trainer) and others:
            different = listed_some(diff(read_config(newest_config(version)), config, OF_RUNS))
            warnings.warn(
                f"--ckpt_path {wanted}: no run in {self.base} has the config of this command; using the "
                f"nearest, {version}, which differs ({different}). Give the path of a checkpoint to use another",
                stacklevel=2,
            )
        return found[version]


def _checkpoint(run: Path, wanted: str) -> Path | None:
    """The file of a run's last round, or of its best one by what the callbacks knew then, if there is one."""
    last = last_checkpoint(run)
    if wanted == "last" or not last.is_file():
        return last if last.is_file() else None
    from pfl_lightning.state.checkpoints import read_checkpoint  # torch, which `pfl compare` needs for nothing

    callbacks = read_checkpoint(last, weights_only=True).get("callbacks", {})
    watching = {key: state for key, state in callbacks.items() if state.get("monitor")}
    # A ModelCheckpoint of the user's may watch something else: the worst round, or the training loss.
    own = [state for key, state in watching.items() if key.startswith("BestRound")] or list(watching.values())
    best = last.parent / Path(own[0]["best_model_path"] if own else "").name
    return best if best.is_file() else None


def of_a_run(checkpoint: Path) -> Path | None:
    """The folder of the run in which a checkpoint lies, wherever that is; ``None`` if it lies in none."""
    run = checkpoint.parent.parent
    return run if run.name.startswith("version_") and (run / CONFIG).is_file() else None


def runs_below(run_dir: str, root: str | None) -> Path:
    """The folder of runs: below the Trainer's ``default_root_dir``, where that is given and a local folder.

    Args:
        run_dir: The option ``--run_dir``; an absolute path stays as it is.
        root: The option ``--trainer.default_root_dir``.

    Example:
        >>> runs_below("runs/digits", "/data").as_posix(), runs_below("runs", None).as_posix()
        ('/data/runs/digits', 'runs')
    """
    below = Path() if root is None or "://" in str(root) else Path(root).expanduser()
    return below / run_dir


@contextmanager
def run_folder(runs: RunFolder, known: Path | None, *, lock: bool) -> Iterator[Path]:
    """Hold the folder of a run as long as the command lasts; a new one that is still empty then is removed.

    Args:
        runs: Where a new folder is made.
        known: The folder of the run that goes on; ``None`` makes a new one.
        lock: Whether other processes are kept from training the same run.

    Yields:
        The folder.

    Raises:
        RunLockedError: Another process trains this run.
        DiskFullError: The disk became full, and no file of the run was named.
    """
    folder, first = known, not runs.base.exists()
    try:
        with explain_full_disk(folder or runs.base):
            folder = folder or runs.new()
            held = RunLock(folder) if lock else None
        with held or nullcontext(), explain_full_disk(folder), explain_output():
            if held is not None and held.is_held:  # nobody else writes there, and a killed process finishes nothing
                for path in (*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")):
                    path.unlink(missing_ok=True)
            yield folder
    finally:
        if known is None and folder is not None and all(path.name.startswith(LOGS) for path in folder.glob("*")):
            shutil.rmtree(folder, ignore_errors=True)
            if first:
                with suppress(OSError):  # not empty
                    runs.base.rmdir()


def chosen_checkpoint(
    runs: RunFolder, wanted: str, options: Mapping[str, Any], *, goes_on: bool, elsewhere: bool
) -> tuple[str, Path | None]:
    """Find the checkpoint, say which it is, and compare its run's options with the command's.

    Args:
        runs: The command's folder of runs.
        wanted: What ``--ckpt_path`` says: ``"last"``, ``"best"`` or a path.
        options: The command's config.
        goes_on: Whether the command trains.
        elsewhere: Whether the command names a folder of runs of its own.

    Returns:
        The path, and the folder of the run that it is from: one of ``runs`` or, for an evaluation that names no folder,
        the one in which the checkpoint lies; else ``None``.

    Raises:
        CheckpointError: There is no such checkpoint.
        ConfigurationError: The training is to resume with another seed.
    """
    checkpoint = runs.find_checkpoint(wanted, options)
    if wanted in ("last", "best"):
        print(f"--ckpt_path {wanted}: {checkpoint}")
    known = runs.run_of(checkpoint)
    origin = known or of_a_run(checkpoint)  # a run of its own goes on from another one's checkpoint
    if origin is not None and goes_on:
        check_seed(origin, options)
    elif origin is not None and (other := evaluated_otherwise(origin, options)):
        warnings.warn(
            f"{checkpoint} is from {origin}, whose config differs from this command's options, which are used here: "
            f"{listed_some(other)}. Pass --config {newest_config(origin)} for the run's",
            stacklevel=2,
        )
    if known is None and not goes_on and not elsewhere:
        known = of_a_run(checkpoint)  # that was moved or copied, whose config has the folder where it was
    return str(checkpoint), known


NO_SETTING = "all"
"""The folder of the runs of a study without settings."""


def folder_name(label: str) -> str:
    """The folder of a setting or a row of a study.

    Example:
        >>> folder_name("HypCluster, 3")
        'HypCluster-3'
    """
    return re.sub(r"[^\w.=+-]+", "-", label).strip("-.")


@dataclass(frozen=True)
class StudyPlace:
    """What a study calls a run.

    Attributes:
        study: Folder of the study.
        setting: The setting, as its folder is called; empty for a study without settings.
        row: The row, as its folder is called.
    """

    study: Path
    setting: str
    row: str


def study_place(folder: Path) -> StudyPlace | None:
    """The place of a run's folder, ``STUDY/runs/SETTING/ROW/seed_S/version_N``; ``None`` if it is none of a study.

    Args:
        folder: The run's folder.
    """
    seed = folder.resolve().parent
    if not (re.fullmatch(r"seed_\d+", seed.name) and (seed / "run.yaml").is_file() and len(seed.parents) > 3):
        return None
    row, setting, runs, study = seed.parents[:4]
    if runs.name != "runs":
        return None
    return StudyPlace(study, "" if setting.name == NO_SETTING else setting.name, row.name)
