"""Folders of runs: ``<run_dir>/version_N`` with config, results, partition, events and checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from pfl_lightning.errors import CheckpointError

__all__ = ["RunFolder"]


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

    def next(self) -> Path:
        """The folder of a new run."""
        versions = self.versions()
        number = int(versions[-1].name.removeprefix("version_")) + 1 if versions else 0
        return self.base / f"version_{number}"

    def run_of(self, checkpoint: Path) -> Path | None:
        """Folder of the run that a checkpoint is from; ``None`` for a checkpoint elsewhere."""
        run = checkpoint.resolve().parent.parent
        return next((version for version in self.versions() if version.resolve() == run), None)

    def find_checkpoint(self, wanted: str) -> Path:
        """The file of a checkpoint.

        Args:
            wanted: A path, ``"last"`` (the newest run's last round) or ``"best"`` (its best validated round).

        Raises:
            CheckpointError: There is none; it says where it looked.
        """
        if wanted not in ("last", "best"):
            if not Path(wanted).is_file():
                raise CheckpointError(f"--ckpt_path: there is no file {wanted}; give a path, 'last' or 'best'")
            return Path(wanted)
        versions = self.versions()
        for version in reversed(versions):
            last = version / "checkpoints" / "last.ckpt"
            found = last if wanted == "last" else _best_next_to(last)
            if found is not None and found.is_file():
                if version != versions[-1]:
                    warnings.warn(
                        f"--ckpt_path {wanted}: {versions[-1]} has no such checkpoint; taking {found}", stacklevel=2
                    )
                return found
        raise CheckpointError(
            f"--ckpt_path {wanted}: no checkpoint in {self.base}/version_*/checkpoints; "
            "run `pfl fit` with the same --run_dir first, or give the path of a checkpoint"
        )


def _best_next_to(last: Path) -> Path | None:
    """The best checkpoint by what the callbacks knew at the last round."""
    if not last.is_file():
        return None
    callbacks = torch.load(last, weights_only=True, map_location="cpu")["callbacks"]
    best = [state["best_model_path"] for state in callbacks.values() if state.get("monitor")]
    return last.parent / Path(best[0]).name if best and best[0] else None
