"""Which parts of a client's model are shared, personal or fixed, as its method declares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import lightning as L
from torch import nn

from pfl_lightning.phases import Phase
from pfl_lightning.state.tensors import matching, norm_names

__all__ = ["DeclaredParts"]


class DeclaredParts(L.LightningModule):
    """What a method declares of the names of parameters and buffers, whatever the model consists of."""

    shared: tuple[str, ...] = ("encoder.*", "head.*")
    """Patterns of the parameters and buffers that travel; the rest is personal and never leaves the client."""

    heads: tuple[str, ...] = ("head.*",)
    """Patterns of what ``fine_tune="head"`` trains."""

    fixed: tuple[str, ...] = ()
    """Patterns of those that a local fit never changes: they keep their first value, the same for every client."""

    batch_norm: Literal["shared", "own_statistics", "own"] = "shared"
    """What of batch normalization travels with the shared part that it lies in: everything (``"shared"``), its weights
    and biases but not its running statistics (``"own_statistics"``), or nothing (``"own"``)."""

    eval_model: str = "aggregated"
    """Which model of a client is evaluated: its personal state under what the server would send now (``"aggregated"``),
    or the model as it was after the client's last local fit, before the averaging (``"trained"``)."""

    def match(self, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """The names that fit one of a method's patterns, such as ``encoder.*``."""
        return list(matching(tuple(names), tuple(patterns)))

    def trained_names(self, phase: Phase) -> set[str]:
        """Names of the parameters that train in a phase."""
        return set(self.match([name for name, _ in self.named_parameters()], phase.train))

    def frozen_norms(self) -> Iterator[nn.Module]:
        """The normalization layers of the parts of which nothing trains in the current phase."""
        for part in self.children():
            if not any(parameter.requires_grad for parameter in part.parameters()):
                yield from (layer for layer in part.modules() if isinstance(layer, nn.modules.batchnorm._NormBase))

    def shared_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that travel."""
        own = set() if self.batch_norm == "shared" else norm_names(self, affine=self.batch_norm == "own")
        return [name for name in self.match(self.state_dict().keys(), self.shared) if name not in own]

    def personal_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that stay with the client."""
        elsewhere = {*self.shared_names(), *self.fixed_names()}
        return [name for name in self.state_dict() if name not in elsewhere]

    def kept_names(self) -> list[str]:
        """Names of what is stored for the client after a local fit: its personal state, or all that is evaluated."""
        if self.eval_model == "aggregated":
            return self.personal_names()
        fixed = set(self.fixed_names())
        return [name for name in self.state_dict() if name not in fixed]

    def fixed_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that keep their first value."""
        return self.match(self.state_dict().keys(), self.fixed)

    def exported_names(self) -> list[str]:
        """Names, in :meth:`~pfl_lightning.FederatedClient.exported_module`, of what the client predicts with."""
        return list(self.state_dict())
