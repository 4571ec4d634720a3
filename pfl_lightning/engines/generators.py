"""States of random generators, to detect steps that draw random numbers, and to go on where they stopped."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.state.equality import same

__all__ = ["GeneratorStates"]


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """States of all default generators: Python's, NumPy's, and torch's of the CPU and of a device."""

    python: tuple[Any, ...]
    numpy: Any
    tensors: tuple[Tensor, ...]

    @classmethod
    def read(cls, device: torch.device) -> GeneratorStates:
        """The current states."""
        own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
        return cls(random.getstate(), np.random.get_state(), (torch.get_rng_state(), *own))  # noqa: NPY002

    def is_as_on_host(self, other: GeneratorStates) -> bool:
        """Whether nothing was drawn in between from Python's and NumPy's generators."""
        return self.python == other.python and same(self.numpy, other.numpy)

    def is_as(self, other: GeneratorStates) -> bool:
        """Whether nothing was drawn in between."""
        return self.is_as_on_host(other) and same(self.tensors, other.tensors)

    def restore(self, device: torch.device) -> None:
        """Go on from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.tensors[0])
        for state in self.tensors[1:]:
            torch.cuda.set_rng_state(state, device)
