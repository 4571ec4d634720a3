"""Checkpoints of a federation: checked before loading, written atomically; the one before the last."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State
from pfl_lightning.state.checkpoints.file import read_checkpoint
from pfl_lightning.state.files import replace_file

__all__ = ["AtomicCheckpointIO", "PreviousCheckpoints", "check_fits", "previous_of", "use_atomic_files"]

LAST = re.compile(r"last(-v\d+)?\.ckpt")
PREVIOUS = "-previous.ckpt"


def previous_of(path: Path) -> Path:
    """Path at which the checkpoint before a ``last.ckpt`` is kept.

    Example:
        >>> from pathlib import Path
        >>> from pfl_lightning.state.checkpoints.writing import previous_of
        >>> previous_of(Path("last.ckpt")).name
        'last-previous.ckpt'
    """
    return path.with_name(f"{path.stem}{PREVIOUS}")


class PreviousCheckpoints:
    """Keeps a ``last.ckpt`` that is overwritten as ``last-previous.ckpt`` beside it.

    A server may be finite and no client can train from it, so that a resume would end at once as the run did. Until a
    round from it was aggregated, there is another checkpoint to resume from. It takes the place of the old file on the
    disk (a hard link, where the file system has them) until then.
    """

    def __init__(self) -> None:
        self._untried: set[Path] = set()  # written or loaded, and no round has trained from it
        self._passed_over: set[Path] = set()  # the one before it was loaded

    def keep(self, path: Path) -> None:
        """Called before a checkpoint is written: keep the one in its place if it is good, and there is no other."""
        path = path.absolute()
        if not LAST.fullmatch(path.name):
            return
        if path.is_file() and path not in self._untried | self._passed_over:
            with replace_file(previous_of(path)) as temporary:
                temporary.unlink(missing_ok=True)
                try:
                    os.link(path, temporary)
                except OSError:
                    shutil.copyfile(path, temporary)
        self._passed_over.discard(path)
        self._untried.add(path)

    def loaded(self, path: Path) -> None:
        """Called when a checkpoint is loaded: a fit that resumes from it tries its server."""
        path = path.absolute()
        if path.name.endswith(PREVIOUS):
            self._passed_over.add(path.with_name(f"{path.name.removesuffix(PREVIOUS)}.ckpt"))
        elif LAST.fullmatch(path.name):
            self._untried.add(path)

    def tried(self) -> None:
        """Called when a round was aggregated: remove what was kept in case that there would be none."""
        for path in self._untried:
            previous_of(path).unlink(missing_ok=True)
        self._untried.clear()

    def kept(self) -> Iterator[tuple[Path, Path]]:
        """Checkpoints whose server no round has trained from, each with the one before it."""
        return ((path, previous_of(path)) for path in sorted(self._untried) if previous_of(path).is_file())


def check_fits(
    state_dict: Mapping[str, Any],
    method: str,
    num_clients: int,
    fingerprint: str,
    encoders: Sequence[str],
    module_state: State,
) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        state_dict: The checkpoint's ``state_dict``.
        method: Name of this federation's method.
        num_clients: This federation's number of clients.
        fingerprint: Of this federation's partition.
        encoders: Names of this federation's encoders.
        module_state: State of this federation's client modules, with the names that it has in ``state_dict``.

    Raises:
        CheckpointError: The checkpoint is of another method, encoder, number of clients or partition.
    """
    extra = state_dict["_extra_state"]
    if extra["method"] != method:
        raise CheckpointError(
            f"the checkpoint is of the method {extra['method']}, this run is of {method}: give the config of the "
            f"checkpoint's run (its config.yaml), or leave out ckpt_path to begin {method} from round 1"
        )
    if extra["personal"]["num_clients"] != num_clients:
        raise CheckpointError(
            f"the checkpoint is of {extra['personal']['num_clients']} clients, this run has {num_clients}; "
            "use the partition that the checkpoint was made with"
        )
    if extra["partition"] != fingerprint:
        raise CheckpointError(
            "the checkpoint was made with another partition: a client's test samples may be among those it was trained "
            "on. Use the same data and partition arguments, or FromFile with the partition.npz of its run"
        )
    there = {name: tuple(tensor.shape) for name, tensor in state_dict.items() if name.startswith("models.")}
    here = {name: tuple(tensor.shape) for name, tensor in module_state.items()}
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            shapes = [f"has shape {own[name]}" if name in own else "is not" for own in (there, here)]
            raise CheckpointError(
                f"the checkpoint is of another {_whose(name)}: {name} {shapes[0]} there, and {shapes[1]} here"
            )
    if list(extra["encoders"]) != list(encoders):
        # One encoder may go by several names (registered, import path, class), so that this is no proof.
        warnings.warn(
            f"the checkpoint's encoders are called {list(extra['encoders'])}, this run's {list(encoders)}; "
            "their shapes agree, but see that they are the same",
            stacklevel=2,
        )


def _whose(name: str) -> str:
    """Owner of a tensor of a client's module: ``models.0.objective.projector.weight`` belongs to its objective."""
    part = name.split(".")[2]
    others = {"objective": "objective", "encoder": "encoder", "head": "encoder"}
    return others.get(part, "encoder, or of other options of the method")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer and reader that leave no half-written file behind and take no damaged one.

    A federation gives it to its Trainer, unless that has a plugin of its own. The files are those of ``torch.save``.
    They are written next to the target and then renamed, so that a kill leaves the old or the new file.

    Lightning's own writer uses the folder for temporary files and moves from there, which is a copy where that folder
    is on another file system. It also holds the whole checkpoint in memory. Here tensors are written from where they
    are, and read when they are needed: the stored states of thousands of clients need not fit into memory.

    Paths that are not local, such as ``s3://...``, are written and read as Lightning does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.previous = PreviousCheckpoints()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save to a path.

        Args:
            checkpoint: Content of the checkpoint.
            path: Path of the file.
            storage_options: Not used.

        Raises:
            DiskFullError: Names the space that is needed and the space that is free; the old file is still there.
        """
        if not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        self.previous.keep(target)
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)
        try:
            with replace_file(target) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
        finally:
            torch.serialization.set_crc32_options(checksums)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load from a path.

        Args:
            path: Path of the checkpoint.
            map_location: See ``torch.load``; ``None`` is the CPU.
            weights_only: See ``torch.load``.

        Raises:
            CheckpointError: The file is damaged, or no checkpoint of Lightning.
        """
        where: Any = map_location or "cpu"
        if not _is_local(path) or not Path(path).exists():
            return super().load_checkpoint(path, where, weights_only)
        found = read_checkpoint(path, where, weights_only)
        self.previous.loaded(Path(path))
        return found


def use_atomic_files(trainer: L.Trainer) -> None:
    """Replace Lightning's own writer of checkpoints by :class:`AtomicCheckpointIO`; a user's plugin stays."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def _is_local(path: str | Path) -> bool:
    return isinstance(path, Path) or "://" not in str(path)
