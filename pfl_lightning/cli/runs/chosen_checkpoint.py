"""The checkpoint that a command is given, and the run that it goes on with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfl_lightning.cli.runs.changes import check_seed, evaluated_otherwise, in_words, newest_config
from pfl_lightning.cli.runs.folders import RunFolder, of_a_run

__all__ = ["chosen_checkpoint"]


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
        ConfigurationError: The training is to go on with another seed.
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
            f"{checkpoint} is of {origin}, whose config has other options than this command, which count here: "
            f"{in_words(other)}. --config {newest_config(origin)} has the run's",
            stacklevel=2,
        )
    if known is None and not goes_on and not elsewhere:
        known = of_a_run(checkpoint)  # that was moved or copied, whose config has the folder where it was
    return str(checkpoint), known
