"""What Lightning's progress bar says of a federation."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

__all__ = ["name_round"]


def name_round(trainer: L.Trainer) -> None:
    """Have the Trainer's progress bar say ``Round 1/3`` in place of ``Epoch 0``.

    Bars other than Lightning's two stay as they are.

    Args:
        trainer: Trainer of the federation, in a round.
    """
    bar, most = trainer.progress_bar_callback, trainer.max_epochs or -1
    text = f"Round {trainer.current_epoch + 1}{f'/{most}' if most > 0 else ''}"
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(text)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        # As wide as the bar of the evaluation, as Lightning has it: bars of two widths would flicker.
        bar.progress.update(bar.train_progress_bar_id, description=text.ljust(len(bar.validation_description)))
