"""Seeds that depend on the client and the purpose of a draw, never on earlier draws.

Every generator is seeded by (seed, round, client, purpose), so that a client's fit is the same whichever clients ran
before it, in any order and on any worker, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch

__all__ = ["derive_seed", "global_seed", "seeded_generator", "torch_seed"]


def derive_seed(seed: int, purpose: str, *parts: int) -> int:
    """Seed of 63 bits for one purpose.

    Args:
        seed: Seed of the run.
        purpose: Purpose of the numbers, such as ``"batches"``.
        parts: Further non-negative integers, such as (round, client).

    Example:
        >>> from pfl_lightning.seeding import derive_seed
        >>> derive_seed(0, "batches", 2, 7) == derive_seed(0, "batches", 2, 7)
        True
        >>> others = [(1, "batches", 2, 7), (0, "dropout", 2, 7), (0, "batches", 7, 2), (0, "batches", 2)]
        >>> derive_seed(0, "batches", 2, 7) in [derive_seed(*other) for other in others]
        False
    """
    entropy = (seed, crc32(purpose.encode()), *parts)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seeded_generator(seed: int, purpose: str, *parts: int) -> torch.Generator:
    """CPU generator seeded by :func:`derive_seed`.

    Example:
        >>> import torch
        >>> from pfl_lightning.seeding import seeded_generator
        >>> first = torch.randperm(1000, generator=seeded_generator(0, "batches", 2, 7))
        >>> again = torch.randperm(1000, generator=seeded_generator(0, "batches", 2, 7))
        >>> other = torch.randperm(1000, generator=seeded_generator(0, "batches", 2, 8))
        >>> torch.equal(first, again), torch.equal(first, other)
        (True, False)
    """
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *parts))


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's default generators inside the block (weight initialization, dropout) and restore them after it.

    Example:
        >>> import torch
        >>> from pfl_lightning.seeding import torch_seed
        >>> def linear():
        ...     with torch_seed(3):
        ...         return torch.nn.Linear(4, 4)
        >>> torch.equal(linear().weight, linear().weight)
        True
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def global_seed() -> int:
    """Seed that ``lightning.seed_everything`` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
