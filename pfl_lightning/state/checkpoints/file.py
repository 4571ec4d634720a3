"""Checkpoint files, those of a project included, read with their checksums verified."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfl_lightning.errors import CheckpointError

__all__ = [
    "FEDERATION",
    "as_federation_wrote",
    "as_module_would_write",
    "content_fault",
    "damaged",
    "goes_on",
    "newest_good",
    "plain",
    "python_numbers",
    "read_checkpoint",
]

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
        CheckpointError: The file is damaged, or no checkpoint of Lightning; names the newest good one beside it.
    """
    found = _read(Path(path), map_location, weights_only)
    if isinstance(found, str):
        raise damaged(path, found, weights_only)
    return found


def damaged(path: str | Path, fault: str, weights_only: bool | None = None) -> CheckpointError:
    """The error about a checkpoint that cannot be used, which names the newest good one beside it.

    Args:
        path: Path of the checkpoint.
        fault: What is wrong with it, such as ``"is empty"``.
        weights_only: How the others are read.
    """
    good = newest_good(Path(path), weights_only)
    folder = Path(path).parent
    if good is None:
        return CheckpointError(f"the checkpoint {path} {fault}; there is no good one in {folder}")
    instead = f"the newest good one is {good}"
    if not goes_on(_read(good, "cpu", weights_only)):
        instead = (
            f"there is none in {folder} that a fit can go on from, and the newest that can be evaluated is {good}: "
            "leave save_weights_only out of the ModelCheckpoint of runs that are to be resumed"
        )
    return CheckpointError(f"the checkpoint {path} {fault}; {instead}")


def goes_on(checkpoint: Any) -> bool:
    """Whether a fit can go on from a checkpoint: it does not hold the models alone (``save_weights_only``)."""
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


def newest_good(beside: Path, weights_only: bool | None = None) -> Path | None:
    """The newest checkpoint in the folder of another one that is whole; ``None`` without any.

    One that holds the models alone is named only where there is no other.

    Args:
        beside: The other one, which does not count.
        weights_only: See ``torch.load``.
    """
    if not beside.parent.is_dir():
        return None
    others = [path for path in beside.parent.glob("*.ckpt") if path.name != beside.name and path.is_file()]
    of_models = None
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        found = _read(path, "cpu", weights_only)
        if not isinstance(found, str) and content_fault(as_federation_wrote(found)) is None:
            if goes_on(found):
                return path
            of_models = of_models or path
    return of_models


def _read(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any] | str:
    """The content of a checkpoint, or what is wrong with the file."""
    fault = _archive_fault(path)
    if fault is not None:
        return fault
    try:
        found = torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)
    except MemoryError:
        raise
    except Exception as error:  # the reader and the unpickler raise whatever a foreign file leads them to
        return _load_fault(error)
    if not isinstance(found, Mapping) or not {"state_dict", "pytorch-lightning_version"} <= found.keys():
        return "is no checkpoint of Lightning: it holds no state_dict, or no version of Lightning"
    return dict(found)


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
            return f"is truncated or damaged, or no checkpoint ({error})"
        except Exception as error:  # zipfile raises whatever a damaged directory of the archive leads it to
            return f"is damaged ({type(error).__name__}: {error})"
    return None if wrong is None else f"is damaged: the checksum of its part {wrong} is wrong"


def _load_fault(error: Exception) -> str:
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    if foreign:
        return (
            f"holds an object of {foreign[1]}, which is not loaded with weights_only=True; load it with "
            "weights_only=False if you trust where it is from"
        )
    lines = str(error).strip().splitlines()
    return f"cannot be read ({type(error).__name__}: {lines[0] if lines else 'no reason given'})"
