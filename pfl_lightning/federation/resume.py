"""Where a fit goes on that follows another one: after an early end, or after an error in a round's validation."""

from __future__ import annotations

import logging
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.state.checkpoints.previous import PreviousCheckpoints

__all__ = ["check_planned", "count_round", "has_begun", "name_previous", "previous_checkpoints", "stay_ended"]

_log = logging.getLogger(__name__)


def check_planned(trainer: Any, rounds: int) -> None:
    """Refuse a checkpoint of more rounds than the run is to have.

    Args:
        trainer: The outer Trainer.
        rounds: Rounds that the checkpoint has.

    Raises:
        ConfigurationError: Names both.
    """
    planned = trainer.max_epochs  # -1 for no limit
    if trainer.ckpt_path and planned is not None and 0 <= planned < rounds:
        raise ConfigurationError(
            f"the checkpoint is of round {rounds}, and max_epochs, the number of rounds, is {planned}: set it "
            f"to more than {rounds} to go on, or take an earlier checkpoint"
        )


def stay_ended(trainer: Any, rounds: int, diverged: int) -> None:
    """End a fit before its first round, where its checkpoint is of the round after which a callback ended the run.

    Args:
        trainer: The outer Trainer, with its callbacks as they were.
        rounds: Rounds that the checkpoint has.
        diverged: Rounds after which ``stop_on_divergence`` ended the run; 0 where it did not.
    """
    stopped = [each for each in trainer.callbacks if "EarlyStopping" in lightning_kinds(each)]
    names = [type(each).__name__ for each in stopped if each.stopped_epoch == rounds - 1 and _has_stopped(each)]
    if diverged == rounds:
        names.append("FederatedLoop(stop_on_divergence=True)")
    if names:
        trainer.should_stop = True
        _log.warning(
            "the checkpoint's run was ended by %s after round %d, and stays as it is; to go on, leave that out",
            " and ".join(names),
            rounds,
        )


def count_round(trainer: Any, rounds: int) -> None:
    """Let a Trainer go on after a round that is over, and whose validation ended in an error: it would play it again.

    Args:
        trainer: The outer Trainer.
        rounds: Rounds that are over.
    """
    progress = trainer.fit_loop.epoch_progress
    if not trainer.ckpt_path and rounds == trainer.current_epoch + 1:
        for counts in (progress.current, progress.total):
            counts.completed += 1
            counts.processed = counts.started = counts.ready = counts.completed


def previous_checkpoints(trainer: Any) -> PreviousCheckpoints:
    """What keeps the checkpoint before the last one; nothing where a user's plugin writes them."""
    return getattr(trainer.strategy.checkpoint_io, "previous", None) or PreviousCheckpoints()


def name_previous(trainer: Any, error: BaseException) -> None:
    """Add to the error of a run whose last rounds came to nothing what to resume from."""
    for last, previous in previous_checkpoints(trainer).kept():
        error.add_note(
            f"no round could be trained from the server in {last}, so that a resume from it would end as this run did; "
            f"the checkpoint of the round before is kept: resume with --ckpt_path {previous}"
        )


def has_begun(trainer: Any) -> bool:
    """Whether an earlier fit of this Trainer has begun a round."""
    return bool(trainer.fit_loop.epoch_progress.current.started)


def _has_stopped(early_stopping: Any) -> bool:
    """Whether it has ended a run."""
    return bool(early_stopping.stopped_epoch > 0 or early_stopping.stopping_reason.name != "NOT_STOPPED")
