"""MoCo v2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised import _lightly
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_both_views
from pfl_lightning.self_supervised.target import TargetNetwork

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext

__all__ = ["MoCoV2"]


class MoCoV2(Objective):
    """The first view (query) is closer to the second by the target network (key) than to a bank of earlier keys.

    Source: X. Chen, H. Fan, R. Girshick and K. He, Improved Baselines with Momentum Contrastive Learning, 2020. The
    loss is that of the paper, of one direction; the other is left to ``symmetric``. The encoder sees the second view
    as well, for what methods build on the encodings of both.

    The bank starts every fit anew with random directions, so that no client keeps the keys of an old encoder. It must
    not be larger than the client's data, since it would hold other views of the very samples of the batch.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See there.
        out: See there.
        temperature: Of the contrastive loss.
        bank: Keys in the memory bank. (The paper has 65536, for one large data set.)
        momentum: Of the target network.
        symmetric: Whether each view is the query once; the bank then takes the keys of both.
        keep_target: See :class:`~pfl_lightning.self_supervised.BYOL`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        temperature: float = 0.2,
        bank: int = 256,
        momentum: float = 0.99,
        symmetric: bool = False,
        keep_target: bool = False,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_number("temperature", temperature, strict=True)
        check_at_least("bank", bank, 1)
        self.bank, self.symmetric = bank, symmetric
        self.projector = _lightly.heads("MoCoV2").MoCoProjectionHead(self.in_features, hidden, out)
        self.target = TargetNetwork(encoder, self.projector, momentum=momentum, keep=keep_target)
        self.nt_xent = _lightly.losses("MoCoV2").NTXentLoss(temperature, memory_bank_size=(bank, out))

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Start the target network and the bank.

        Raises:
            ConfigurationError: The bank is larger than the client's data.
        """
        if self.bank > context.data.num_samples:
            raise ConfigurationError(
                f"client {context.client}, round {context.round}: MoCo's memory bank of {self.bank} keys is larger "
                f"than the client's {context.data.num_samples} training samples, so that a sample would be its own "
                f"negative; set bank to at most the samples of the smallest client, or give clients more samples"
            )
        self.target.start(encoder, self.projector)
        memory = self._memory
        directions = torch.randn(memory.bank.shape, dtype=torch.float32)  # on the CPU: alike on all devices
        memory.bank.copy_(F.normalize(directions, dim=1))
        memory.bank_ptr.zero_()

    @property
    def _memory(self) -> Any:
        """The loss's memory bank: the loss itself in lightly 1.5.0, a module inside later."""
        return next(module for module in self.nt_xent.modules() if "bank" in module._buffers)

    def forget(self) -> None:
        """Give up the client's own target network."""
        self.target.forget()

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        self.target.follow(encoder, self.projector)
        encodings = of_both_views(encoder, first, second)
        projections = of_both_views(self.projector, *encodings)
        if self.symmetric:
            queries, keys = torch.cat(projections), self.target(torch.cat([second, first]))
        else:
            queries, keys = projections[0], self.target(second)
        return ObjectiveOutput(in_single_precision(self._loss, queries, keys), encodings, projections)

    def _loss(self, queries: Tensor, keys: Tensor) -> Tensor:
        dtype = self._memory.bank.dtype
        loss: Tensor = self.nt_xent(queries.to(dtype), keys.to(dtype))
        return loss
