"""What the outer Trainer is told of rounds: where a fit goes on, which loaders and curves it has, what its bar says."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.state.checkpoints import AtomicCheckpointIO

_log = logging.getLogger(__name__)


def go_on(trainer: Any, rounds: int, diverged: int) -> None:
    """Begin a fit after the rounds of its checkpoint, or of an earlier fit of the same Trainer.

    Args:
        trainer: The outer Trainer, with its callbacks as they were.
        rounds: Rounds that are over.
        diverged: Rounds after which ``stop_on_divergence`` ended the run; 0 where it did not.

    Raises:
        ConfigurationError: The checkpoint has more rounds than the run is to have.
    """
    planned, progress = trainer.max_epochs, trainer.fit_loop.epoch_progress  # -1 for no limit
    if trainer.ckpt_path and planned is not None and 0 <= planned < rounds:
        raise ConfigurationError(
            f"the checkpoint is of round {rounds}, and max_epochs, the number of rounds, is {planned}: set it "
            f"to more than {rounds} to continue, or use an earlier checkpoint"
        )
    for logger in trainer.loggers if rounds else ():
        if isinstance(logger, TensorBoardLogger):  # drops the curves of rounds that run again
            writer: Any = logger.experiment
            writer.purge_step = rounds  # not known yet when the logger was made
            writer.close()  # the next event opens a file that begins with the mark
    if trainer.ckpt_path:
        _stay_ended(trainer, rounds, diverged)
    elif rounds == trainer.current_epoch + 1:  # a validation ended in an error, not the round before it
        for counts in (progress.current, progress.total):
            counts.completed += 1
            counts.processed = counts.started = counts.ready = counts.completed


def _stay_ended(trainer: Any, rounds: int, diverged: int) -> None:
    """End a fit before its first round, where its checkpoint is of the round after which a callback ended the run."""
    names = [
        type(each).__name__
        for each in trainer.callbacks
        if "EarlyStopping" in lightning_kinds(each)
        and each.stopped_epoch == rounds - 1
        and (each.stopped_epoch > 0 or each.stopping_reason.name != "NOT_STOPPED")
    ]
    if rounds and diverged == rounds:
        names.append("FederatedLoop(stop_on_divergence=True)")
    if names:
        trainer.should_stop = True
        _log.warning(
            "%s ended the checkpoint's run after round %d, so no round follows; to train further, resume without %s",
            *(" and ".join(names), rounds, " and ".join(names)),
        )


def previous_checkpoints(trainer: Any) -> list[tuple[Path, Path]]:
    """Checkpoints of the run that were overwritten and are kept; none where a user's plugin writes them."""
    writer = trainer.strategy.checkpoint_io
    return writer.previous() if isinstance(writer, AtomicCheckpointIO) else []


def name_previous(trainer: Any, error: BaseException) -> None:
    """Add to the error of a run whose last rounds came to nothing what to resume from."""
    for last, previous in previous_checkpoints(trainer):
        error.add_note(
            f"no round could be trained from the server in {last}, so a resume from it would end as this run did; "
            f"the checkpoint of the round before is kept: resume with --ckpt_path {previous}"
        )


class RoundLoaders:
    """Lets a Trainer ask for the loader of each round's cohort during a fit, without remarks on its length."""

    def __init__(self) -> None:
        self._every: int | None = None  # the Trainer's own, during a fit
        self._ignored: Any = None  # the remark, as a filter of warnings

    def begin(self, trainer: Any) -> None:
        """A fit begins: a cohort may differ in size from the last, and Lightning asks for its length only on reload."""
        if self._every is None:
            self._every = trainer.reload_dataloaders_every_n_epochs
        trainer.reload_dataloaders_every_n_epochs = 1
        warnings.filterwarnings(
            "ignore",
            r"The number of training batches \(\d+\) is smaller than the logging interval",
            module=r"(lightning\.pytorch|pytorch_lightning)\.",
        )
        self._ignored = warnings.filters[0]

    def end(self, trainer: Any) -> None:
        """The fit is over; a plain one may come next."""
        if self._every is not None:
            trainer.reload_dataloaders_every_n_epochs, self._every = self._every, None
        if self._ignored in warnings.filters:
            warnings.filters.remove(self._ignored)  # type: ignore[attr-defined]


def release_data(trainer: Any) -> None:
    """End the processes that read a project's data."""
    with suppress(ReferenceError):  # the Trainer is gone, and its data have heard of its end
        release = getattr(getattr(trainer, "datamodule", None), "release", None)
        if release is not None:
            release()


def name_round(trainer: Any) -> None:
    """Have Lightning's progress bars say ``Round 1/3`` in place of ``Epoch 0``; others stay as they are."""
    bar, most = trainer.progress_bar_callback, trainer.max_epochs or -1
    text = f"Round {trainer.current_epoch + 1}{f'/{most}' if most > 0 else ''}"
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(text)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        # As wide as the bar of the evaluation, as Lightning has it: bars of two widths would flicker.
        bar.progress.update(bar.train_progress_bar_id, description=text.ljust(len(bar.validation_description)))
