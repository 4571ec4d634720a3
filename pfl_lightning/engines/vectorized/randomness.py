"""States of random generators, compared to detect steps that draw random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["device_generators", "host_generators"]


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
