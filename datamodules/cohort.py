"""The order in which the outer Trainer sees the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning.pytorch import Trainer
from torch.utils.data import Sampler


class CohortSampler(Sampler[int]):
    """The ids of a round's clients, asked for at the start of every epoch: a loader need not be made anew each round.

    Args:
        cohort: Gives the ids of the current round.
    """

    def __init__(self, cohort: Callable[[], list[int]]) -> None:
        self._cohort = cohort

    def __iter__(self) -> Iterator[int]:
        return iter(self._cohort())

    def __len__(self) -> int:
        return len(self._cohort())


def current_round(trainer: Trainer | None) -> int:
    """The round that the outer Trainer is in, 0 without one.

    Args:
        trainer: The outer Trainer.
    """
    if trainer is None:
        return 0
    # After its last epoch Lightning asks once more for the loader's length, with a round that never comes.
    rounds = trainer.max_epochs or -1
    return min(trainer.current_epoch, rounds - 1) if rounds > 0 else trainer.current_epoch
