"""Checkpoint files, those of a project included: written as a whole, and read with their checksums verified."""

from __future__ import annotations

import math
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.files import replace_file

__all__ = ["AtomicCheckpointIO", "use_atomic_files"]

LAST = re.compile(r"last(-v\d+)?\.ckpt")
PREVIOUS = "-previous.ckpt"

FEDERATION = "pfl_lightning_federation"
"""Key of the federation's ``state_dict`` in a file whose ``state_dict`` is the module's own."""


def as_module_would_write(checkpoint: dict[str, Any], state: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Give a checkpoint the ``state_dict`` that a plain run of the module would write, and keep the federation's apart.

    Args:
        checkpoint: A federation's checkpoint, which is changed.
        state: The global model under the module's own names, as its ``on_save_checkpoint`` has left it.
        content: What the module's ``on_save_checkpoint`` has put into it.
    """
    checkpoint[FEDERATION] = checkpoint["state_dict"]
    checkpoint["state_dict"] = state
    for key, value in content.items():
        checkpoint.setdefault(key, value)


def as_federation_wrote(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`as_module_would_write`, in place; other checkpoints stay as they are."""
    if FEDERATION in checkpoint:
        checkpoint["state_dict"] = checkpoint.pop(FEDERATION)
    return checkpoint


def plain(value: Any) -> bool:
    """Whether a hyper-parameter is made of numbers, words, lists and dictionaries, so that every reader takes it.

    Example:
        >>> [plain(value) for value in ((1, 28, 28), {"lr": 0.1}, print)]
        [True, True, False]
    """
    if isinstance(value, Mapping):
        return type(value) is dict and all(plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)


def python_numbers(value: Any) -> Any:
    """A hyper-parameter with Python's numbers in place of NumPy's, such as those of ``np.logspace``: it is plain then.

    Example:
        >>> python_numbers({"lr": np.float64(0.5), "sizes": (np.int64(3), 4)})
        {'lr': 0.5, 'sizes': (3, 4)}
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {python_numbers(name): python_numbers(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(python_numbers, value))
    return value


EXTRA = ("encoders", "fixed", "method", "partition", "personal", "round", "seed")
"""Entries that a federation saves beside tensors."""

AFTER_0_3_0 = ("has_trained", "rounds_trained", "schedule")
"""Entries that checkpoints of version 0.3.0 and earlier do not have."""


def read_checkpoint(path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
    """Read a local checkpoint once its checksums agree; tensors are read from the file when they are needed.

    The checksums are those of the archive that ``torch.save`` writes (CRC-32, of every tensor and of the rest), so that
    checkpoints of Lightning's own writer have them, too.

    Args:
        path: Path of the checkpoint.
        map_location: See ``torch.load``.
        weights_only: See ``torch.load``.

    Raises:
        CheckpointError: The file is damaged, or no checkpoint of Lightning; names the others beside it.
    """
    fault = _archive_fault(Path(path))
    if fault is not None:
        raise damaged(path, fault)
    try:
        found = torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)
    except MemoryError:
        raise
    except Exception as error:  # the reader and the unpickler raise whatever a foreign file leads them to
        raise damaged(path, _load_fault(error)) from error
    if not isinstance(found, Mapping) or not {"state_dict", "pytorch-lightning_version"} <= found.keys():
        raise damaged(path, "is not a checkpoint of Lightning: it holds no state_dict, or no version of Lightning")
    return dict(found)


def damaged(path: str | Path, fault: str) -> CheckpointError:
    """The error about a checkpoint that cannot be used, which names the others beside it.

    Args:
        path: Path of the checkpoint.
        fault: What is wrong with it, such as ``"is empty"``.
    """
    folder, name = Path(path).parent, Path(path).name
    others = [other for other in folder.glob("*.ckpt") if other.name != name and other.is_file()]
    others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    named = ", ".join(other.name for other in others)
    instead = f"the others in {folder}, the newest first, are {named}" if others else f"there is no other in {folder}"
    return CheckpointError(f"the checkpoint {path} {fault}; {instead}")


def goes_on(checkpoint: Any) -> bool:
    """Whether a fit can resume from a checkpoint: it does not hold the models alone (``save_weights_only``)."""
    return "optimizer_states" in checkpoint


def content_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """Fault of a checkpoint that loading would notice late or never; ``None`` for none."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping) or not isinstance(state.get("_extra_state"), Mapping):
        return "is not of a Federation: it has no clients' states"
    missing = [f"state_dict/_extra_state/{name}" for name in EXTRA if name not in state["_extra_state"]]
    if not missing and any(name not in state["_extra_state"] for name in AFTER_0_3_0):
        return "is of an earlier version of pfl_lightning: pfl-lightning==0.3.0 reads it"
    missing += [] if "loops" in checkpoint else ["loops"]  # without which Lightning would begin at round 1
    return f"is incomplete: {missing[0]} is missing" if missing else None


def _archive_fault(path: Path) -> str | None:
    if not path.is_file():
        return "is not a regular file"
    if path.stat().st_size == 0:
        return "is empty"
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                wrong = archive.testzip()
        except zipfile.BadZipFile as error:
            return f"is truncated or damaged, or not a checkpoint ({error})"
        except Exception as error:  # zipfile raises whatever a damaged directory of the archive leads it to
            return f"is damaged ({type(error).__name__}: {error})"
    return None if wrong is None else f"is damaged: the checksum of its part {wrong} is wrong"


def _load_fault(error: Exception) -> str:
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    if foreign:
        return (
            f"holds an object of {foreign[1]}, which is not loaded with weights_only=True; load it with "
            "weights_only=False if you trust its source"
        )
    lines = str(error).strip().splitlines()
    return f"cannot be read ({type(error).__name__}: {lines[0] if lines else 'no reason given'})"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer and reader that leave no half-written file behind and take no damaged one.

    A federation gives it to its Trainer, unless that has a plugin of its own. The files are those of ``torch.save``.
    They are written next to the target and then renamed, so that a kill leaves the old or the new file.

    Lightning's own writer uses the folder for temporary files and moves from there, which is a copy where that folder
    is on another file system. It also holds the whole checkpoint in memory. Here tensors are written from where they
    are, and read when they are needed: the stored states of thousands of clients need not fit into memory.

    Paths that are not local, such as ``s3://...``, are written and read as Lightning does.

    A ``last.ckpt`` that is overwritten stays as ``last-previous.ckpt`` until the run has ended well: a server may be
    finite and no client can train from it, so that a resume would end at once, as the run did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rounds: dict[Path, float] = {}  # in each last.ckpt that was written or loaded

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
        self._keep_previous(Path(path).absolute(), checkpoint)
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)
        try:
            with replace_file(Path(path)) as temporary, temporary.open("wb") as file:
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
        found, path = read_checkpoint(path, where, weights_only), Path(path).absolute()
        if path.name.endswith(PREVIOUS):  # the one after it is spoiled
            self._rounds[path.with_name(f"{path.name.removesuffix(PREVIOUS)}.ckpt")] = math.inf
        elif LAST.fullmatch(path.name):
            self._rounds[path] = _loop_of(found).get("rounds", 0)
        return found

    def _keep_previous(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        """Keep the checkpoint that is overwritten if a round was aggregated that trained from its server."""
        loop = _loop_of(checkpoint)
        if not loop or not LAST.fullmatch(path.name):
            return
        if path.is_file() and not loop["undone"] and loop["rounds"] > self._rounds.get(path, -1):
            with replace_file(previous_of(path)) as temporary:
                temporary.unlink(missing_ok=True)
                try:
                    os.link(path, temporary)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, temporary)
        self._rounds[path] = loop["rounds"]

    def previous(self) -> list[tuple[Path, Path]]:
        """Each ``last.ckpt`` of this run that has one before it, and that one."""
        return [(path, previous_of(path)) for path in sorted(self._rounds) if previous_of(path).is_file()]


def previous_of(path: Path) -> Path:
    """Path at which the checkpoint before a ``last.ckpt`` is kept.

    Example:
        >>> from pathlib import Path
        >>> from pfl_lightning.state.checkpoints import previous_of
        >>> previous_of(Path("last.ckpt")).name
        'last-previous.ckpt'
    """
    return path.with_name(f"{path.stem}{PREVIOUS}")


def _loop_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The counters of the loop of rounds."""
    states = checkpoint.get("callbacks", {}).values()
    return next((state for state in states if isinstance(state, Mapping) and "undone" in state), {})


def use_atomic_files(trainer: L.Trainer) -> None:
    """Replace Lightning's own writer of checkpoints by :class:`AtomicCheckpointIO`; a user's plugin stays."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def _is_local(path: str | Path) -> bool:
    return isinstance(path, Path) or "://" not in str(path)
