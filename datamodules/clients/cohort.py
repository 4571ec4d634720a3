"""Order in which the Trainer receives the clients of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from lightning.pytorch import Trainer
from torch.utils.data import Sampler

from pfl_lightning.seeding import DataStream


class CohortSampler(Sampler[int]):
    """Sampler of the ids of a round's clients.

    The ids are asked for at the start of every epoch, so that one loader serves all rounds.

    Args:
        cohort: Function that returns the ids of the current round.
    """

    def __init__(self, cohort: Callable[[], list[int]]) -> None:
        self._cohort = cohort

    def __iter__(self) -> Iterator[int]:
        return iter(self._cohort())

    def __len__(self) -> int:
        return len(self._cohort())


def current_round(trainer: Trainer | None) -> int:
    """Current round of the Trainer, from 0; 0 without a Trainer.

    Args:
        trainer: The Trainer of the federation.
    """
    if trainer is None:
        return 0
    # After its last epoch Lightning asks once more for the loader's length, with a round that never comes.
    rounds = trainer.max_epochs or -1
    return min(trainer.current_epoch, rounds - 1) if rounds > 0 else trainer.current_epoch


def draw_novel_clients(novel: int | float, num_clients: int, seed: int) -> list[int]:
    """Ids of the novel clients, which never train.

    Args:
        novel: A share of all clients in [0, 1), rounded up, or a number of clients.
        num_clients: Number of clients m.
        seed: Seed of the draw.

    Returns:
        Ascending ids.

    Raises:
        ValueError: If ``novel`` is neither, or no client would be left to train.

    Example:
        >>> draw_novel_clients(0.25, num_clients=10, seed=0)  # 2.5 clients, rounded up
        [3, 5, 8]
        >>> draw_novel_clients(0, num_clients=10, seed=0)
        []
    """
    share = isinstance(novel, float)
    if isinstance(novel, bool) or not isinstance(novel, int | float) or novel < 0 or (share and not novel < 1):
        raise ValueError(f"novel_clients must be a share in [0, 1) or a number of clients, got {novel!r}")
    number = math.ceil(novel * num_clients - 1e-9) if share else int(novel)
    if number >= num_clients > 0:
        raise ValueError(
            f"novel_clients is {novel!r}: all of the {num_clients} clients would be novel and none would be left to "
            f"train; give at most {num_clients - 1}"
        )
    rng = np.random.default_rng([seed, DataStream.NOVEL])
    return sorted(rng.choice(num_clients, number, replace=False).tolist())
