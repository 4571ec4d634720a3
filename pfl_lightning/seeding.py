"""Seeds that depend on the client and the purpose of a draw, never on earlier draws.

Every generator is seeded by (seed, round, client, purpose), so that a client's fit is the same whichever clients ran
before it, in any order and on any worker, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
import torch


class Purpose(StrEnum):
    """Purposes that the package derives seeds for.

    The values are a contract with checkpoints and published results: a run of another value draws other numbers. Add
    members, never change one.
    """

    INITIAL_WEIGHTS = "initial weights"
    """First weights of an architecture; its number follows for all but the first."""
    PARTNER_WEIGHTS = "partner weights"
    """First weights of a second network, the same beside every architecture."""
    FURTHER_WEIGHTS = "further weights"
    """First weights of a further encoder of an architecture, by the numbers of both."""
    COHORT = "cohort"
    """Clients that train in a round."""
    EVAL_CLIENTS = "evaluated clients"
    """Clients that are evaluated, the same in every round."""
    FIT = "fit"
    """A local fit: ``fit/0`` are batch orders and augmentations of its first phase, ``fit/stack`` draws of models that
    train together, such as dropout."""
    FIT_MODEL = "fit/model"
    """Draws of the model itself in a local fit, such as dropout."""
    PERSONALIZE = "personalize"
    """Personalization before an evaluation: orders, augmentations and draws, as in a fit."""
    PERSONALIZE_MODEL = "personalize/model"
    """Draws of the model itself in a personalization."""
    EVALUATION_MODEL = "evaluation/model"
    """Draws of a client before its evaluation, apart from those of a personalization."""
    EVALUATION_STEPS = "evaluation/steps"
    """Draws of a client's model while it is evaluated on its validation part (0) or its test part (1)."""
    PERSONALIZE_HEAD = "personalize/head"
    """First weights of the linear head that a personalization trains."""
    SERVER = "server"
    """First weights of what the server trains."""
    SERVER_BATCHES = "server batches"
    """Batches that the server trains on in a round."""
    VIRTUAL_FEATURES = "virtual features"
    """Features that DCPFL's server samples in a round."""
    FIRST_CLUSTER = "first cluster"
    """Client whose model becomes the first of HypCluster's by k-means++."""
    FOMO_MODELS = "FedFomo models"
    """Models that FedFomo's server sends a client in a round."""
    INSPECTION = "inspection"
    """Draws of a client's model while it is inspected."""
    INSPECTED_CLIENTS = "inspected clients"
    """Clients that are inspected."""
    INSPECTED_SAMPLES = "inspected samples"
    """Samples of a client that are inspected."""
    PUBLIC = "public"
    """Public samples of a round."""
    PRIVATE_COHORT = "private cohort"
    """Clients that train in a round with privacy, by its secret seed."""
    PRIVATE_NOISE = "private noise"
    """Noise of a round with privacy, by its secret seed."""
    TSNE = "t-SNE"
    """Start of the embedding of features in the plane."""
    DEVICES = "devices"
    """Simulated devices: how fast a client is (0), whether it is there in a round (1), whether it drops out (2), whom
    the server asks in the places of others (3)."""


class DataStream(IntEnum):
    """Streams of random numbers that divide a data set, one for each purpose.

    The values are a contract, as those of :class:`Purpose`: another value is another partition.
    """

    RULE = 0
    """Parts of the clients, by the partition's rule."""
    TEST = 1
    """Test samples of a client."""
    VALIDATION = 2
    """Validation samples of a client."""
    POOL = 3
    """Test samples of the data set, where it has none of its own."""
    QUANTITY = 4
    """Number of samples of a client."""
    SHIFT = 5
    """Which client has which shift of features or labels."""
    NOVEL = 6
    """Clients that never train."""
    UNLABELED = 7
    """Parts of the samples without labels."""
    PUBLIC = 8
    """Training samples that are held back as public ones."""


def derive_seed(seed: int, purpose: str, *parts: int) -> int:
    """Seed of 63 bits for one purpose.

    Args:
        seed: Seed of the run.
        purpose: Purpose of the numbers: a :class:`Purpose`, or a name of your own method.
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
def torch_seed(seed: int, *, python: bool = False) -> Iterator[None]:
    """Seed torch's default generators inside the block (weight initialization, dropout) and restore them after it.

    Args:
        seed: The seed.
        python: Whether Python's and NumPy's are seeded, too, as by :func:`python_seed`: by what runs a user's code.

    Example:
        >>> import torch
        >>> from pfl_lightning.seeding import torch_seed
        >>> def linear():
        ...     with torch_seed(3):
        ...         return torch.nn.Linear(4, 4)
        >>> torch.equal(linear().weight, linear().weight)
        True
    """
    before = [(device, _state_of(device)) for device in _devices()] if _has_accelerator() else []
    with torch.random.fork_rng(devices=[]), python_seed(seed) if python else nullcontext():
        if _has_accelerator():
            torch.manual_seed(seed)
        else:  # the same on the CPU, without the formatting of a stack that torch keeps for a GPU that may come
            torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            for device, states in before:
                _restore(device, states)


@contextmanager
def python_seed(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators inside the block (transforms of a user's Dataset) and restore them after it.

    Example:
        >>> import random
        >>> from pfl_lightning.seeding import python_seed
        >>> def draw():
        ...     with python_seed(3):
        ...         return random.random()
        >>> draw() == draw()
        True
    """
    before = random.getstate(), np.random.get_state()  # noqa: NPY002  (transforms draw from it)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


_has_accelerator = lru_cache(torch.accelerator.is_available)


def _devices() -> list[torch.device]:
    """All devices in use that have generators of their own."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    if kind.type == "mps":  # there is one
        return [kind]
    module = torch.get_device_module(kind)
    used = getattr(module, "is_initialized", lambda: True)()
    return [torch.device(kind.type, number) for number in range(module.device_count())] if used else []


def _state_of(device: torch.device) -> tuple[torch.Tensor, ...]:
    """State of a device's generator; empty where it has none."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "get_rng_state"):
        return ()
    return (module.get_rng_state() if device.type == "mps" else module.get_rng_state(device),)


def _restore(device: torch.device, states: tuple[torch.Tensor, ...]) -> None:
    for state in states:
        torch.get_device_module(device).set_rng_state(state, *() if device.type == "mps" else (device,))


def global_seed() -> int:
    """Seed that ``lightning.seed_everything`` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """States of all default generators: Python's, NumPy's, and torch's of the CPU and of a device."""

    python: tuple[Any, ...]
    numpy: Any
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def read(cls, device: torch.device) -> GeneratorStates:
        """The current states."""
        return cls(random.getstate(), np.random.get_state(), (torch.get_rng_state(), *_state_of(device)))  # noqa: NPY002

    def is_as(self, other: GeneratorStates) -> bool:
        """Whether nothing was drawn in between."""
        on_host = self.python == other.python and all(map(np.array_equal, self.numpy, other.numpy))
        return on_host and all(map(torch.equal, self.tensors, other.tensors))

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.tensors[0])
        _restore(device, self.tensors[1:])
