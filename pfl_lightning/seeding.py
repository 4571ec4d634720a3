"""Randomness that depends on who draws and why, never on who drew before.

Every generator is seeded by (seed, round, client, purpose), so that a client's fit is the same whichever clients ran
before it, in whichever order and on whichever worker, and a resumed run draws what the uninterrupted one would have.
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
    """A 63-bit seed for one purpose.

    Args:
        seed: The run's seed.
        purpose: What the numbers are for, such as ``"batches"``.
        parts: Whom they are for, such as (round, client).
    """
    entropy = (seed, crc32(purpose.encode()), *parts)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seeded_generator(seed: int, purpose: str, *parts: int) -> torch.Generator:
    """A CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *parts))


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's default generators inside the block (weight initialization, dropout) and restore them after it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def global_seed() -> int:
    """The seed that ``lightning.seed_everything`` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
