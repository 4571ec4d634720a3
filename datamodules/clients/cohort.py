"""Which clients train: those that never do, and modules that are no federation of any."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from pfl_lightning.seeding import DataStream


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


def warn_unless_federated(module: Any) -> None:
    """Warn of a module that is given ids of clients and takes them for samples.

    Args:
        module: The module that is fitted or evaluated, if any.
    """
    if module is not None and not hasattr(module, "client_model"):
        name = type(module).__name__
        warnings.warn(
            f"the Trainer has a {name}, which is no federation, with the data of one, whose batches are ids of "
            f"clients: give it what federate gives back, such as module, data = federate({name}(...), ...) and "
            "trainer.fit(module, datamodule=data)",
            stacklevel=3,
        )
