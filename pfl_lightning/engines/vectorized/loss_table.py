"""Table of the loss terms of many clients."""

from __future__ import annotations

from torch import Tensor

from pfl_lightning.client import Phase
from pfl_lightning.engines.lifecycle import check_finite_losses
from pfl_lightning.engines.vectorized.stack import Member

__all__ = ["LossTable"]


class LossTable:
    """Loss terms of every client and step by name, (K, steps) each."""

    def __init__(self, clients: int, steps: int) -> None:
        self._shape = (clients, steps)
        self._terms: dict[str, Tensor] = {}

    def record(self, rows: Tensor | slice, step: int, terms: dict[str, Tensor]) -> None:
        """Record the terms (R,) of some clients in a step."""
        for name, values in terms.items():
            if name not in self._terms:
                self._terms[name] = values.new_zeros(self._shape)
            self._terms[name][rows, step] = values

    def fetch(self) -> None:
        """Copy the terms to the host, once for all clients."""
        self._terms = {name: values.cpu() for name, values in self._terms.items()}

    def losses_of(self, row: int, steps: int, member: Member, phase: Phase) -> dict[str, float]:
        """Means over the client's own steps, by name.

        Raises:
            NonFiniteLossError: The loss of a step is not finite.
        """
        own = {name: values[row, :steps] for name, values in self._terms.items()}
        if steps:
            check_finite_losses(list(own["loss"]), member.context, phase)
        return {name: float(values.float().mean()) for name, values in own.items()} if steps else {}
