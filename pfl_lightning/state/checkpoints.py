"""Checkpoints of a federation: checked before loading, and written atomically."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from pfl_lightning.errors import CheckpointError
from pfl_lightning.messages import State

__all__ = ["AtomicCheckpointIO", "check_fits"]


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
        CheckpointError: The checkpoint is of another method, encoder, number of clients or partition, or of no
            federation.
    """
    extra = state_dict.get("_extra_state")
    if extra is None:
        raise CheckpointError("the checkpoint is not of a Federation: it has no clients' states")
    if extra["method"] != method:
        raise CheckpointError(f"the checkpoint is of the method {extra['method']}, this run is of {method}")
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
    found = {n: t for n, t in state_dict.items() if n.startswith("models.")}
    surplus = sorted(found.keys() - module_state.keys())
    if surplus:
        what = _whose(surplus[0])
        raise CheckpointError(f"the checkpoint is of another {what}: it has {surplus}, which this one has not")
    for name, tensor in module_state.items():
        shape = tuple(found[name].shape) if name in found else None
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"the checkpoint is of another {_whose(name)}: {name} has shape {shape} there and "
                f"{tuple(tensor.shape)} here"
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
    return "objective" if name.split(".")[2:3] == ["objective"] else "encoder"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that writes next to the target and then renames, so that a kill leaves the old or the new file.

    Lightning's own writer uses the folder for temporary files and moves from there, which is a copy where that folder
    is on another file system. It also holds the whole checkpoint in memory. Here tensors are written from where they
    are, and read when they are needed: the stored states of thousands of clients need not fit into memory.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save to a local path.

        Args:
            checkpoint: Content of the checkpoint.
            path: Path of the file.
            storage_options: Not used.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load from a local path; other paths are loaded as Lightning does.

        Args:
            path: Path of the checkpoint.
            map_location: See ``torch.load``; ``None`` is the CPU.
            weights_only: See ``torch.load``.
        """
        where: Any = map_location or "cpu"
        if not Path(path).is_file():
            return super().load_checkpoint(path, where, weights_only)
        found: dict[str, Any] = torch.load(path, map_location=where, mmap=True, weights_only=weights_only)
        return found
