"""Shared, personal and fixed parts of a client's model, as its method declares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import lightning as L
from torch import nn

from pfl_lightning.phases import Phase
from pfl_lightning.state.tensors import matching, norm_names

__all__ = ["DeclaredParts"]


class DeclaredParts(L.LightningModule):
    """Names of the parameters and buffers that a method shares, keeps or fixes, for any model."""

    shared: tuple[str, ...] = ("encoder.*", "head.*")
    """Patterns of the parameters and buffers that clients and server exchange; the others are personal."""

    heads: tuple[str, ...] = ("head.*",)
    """Patterns of the parameters that ``fine_tune="head"`` trains."""

    fixed: tuple[str, ...] = ()
    """Patterns of the parameters and buffers that keep their first value, the same for every client."""

    batch_norm: Literal["shared", "own_statistics", "own"] = "shared"
    """Batch normalization inside the shared part: shared with it (``"shared"``), shared but for its running statistics
    (``"own_statistics"``), or personal (``"own"``)."""

    eval_model: str = "aggregated"
    """Model of a client that is evaluated: its personal state with what the server would send now (``"aggregated"``),
    or the model after the client's last local fit, before the averaging (``"trained"``)."""

    def match(self, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """Names that match one of a method's patterns, such as ``encoder.*``."""
        return list(matching(tuple(names), tuple(patterns)))

    def trained_names(self, phase: Phase) -> set[str]:
        """Names of the parameters that train in a phase."""
        return set(self.match([name for name, _ in self.named_parameters()], phase.train))

    def frozen_norms(self) -> Iterator[nn.Module]:
        """Normalization layers of the parts that do not train in the current phase."""
        for part in self.children():
            if not any(parameter.requires_grad for parameter in part.parameters()):
                yield from (layer for layer in part.modules() if isinstance(layer, nn.modules.batchnorm._NormBase))

    def shared_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that clients and server exchange."""
        own = set() if self.batch_norm == "shared" else norm_names(self, affine=self.batch_norm == "own")
        return [name for name in self.match(self.state_dict().keys(), self.shared) if name not in own]

    def personal_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that stay with the client."""
        elsewhere = {*self.shared_names(), *self.fixed_names()}
        return [name for name in self.state_dict() if name not in elsewhere]

    def kept_names(self) -> list[str]:
        """Names of the tensors stored after a local fit: the personal state, or all that is evaluated."""
        if self.eval_model == "aggregated":
            return self.personal_names()
        fixed = set(self.fixed_names())
        return [name for name in self.state_dict() if name not in fixed]

    def fixed_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that keep their first value."""
        return self.match(self.state_dict().keys(), self.fixed)

    def exported_names(self) -> list[str]:
        """Names of the client's tensors for prediction in :meth:`~pfl_lightning.FederatedClient.exported_module`."""
        return list(self.state_dict())
