"""States of random generators, to detect steps that draw random numbers, and to go on where they stopped."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["GeneratorStates", "device_generators", "host_generators"]


@dataclass(frozen=True)
class GeneratorStates:
    """States of all default generators: Python's, NumPy's, and torch's of the CPU and of a device."""

    python: tuple[Any, ...]
    numpy: Any
    host: Tensor
    device: Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> GeneratorStates:
        """The current states."""
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), own)  # noqa: NPY002

    def restore(self, device: torch.device) -> None:
        """Go on from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def host_generators() -> tuple[Any, ...]:
    """States of Python's and NumPy's generators, to be compared."""
    state: Any = np.random.get_state()  # noqa: NPY002
    _, keys, *rest = state
    return random.getstate(), keys.tobytes(), *rest


def device_generators(device: torch.device) -> tuple[Any, ...]:
    """States of torch's generators of the CPU and of a device, to be compared."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(state.numpy().tobytes() for state in states)
