"""MoCo v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_each_view
from pfl_lightning.self_supervised.target import TargetNetwork

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext


class MoCoV2(Objective):
    """MoCo v2: a query (first view) is closer to its key (second view, target network) than to a bank of earlier keys.

    Source: X. Chen, H. Fan, R. Girshick and K. He, Improved Baselines with Momentum Contrastive Learning, 2020. The
    loss is that of the paper, in one direction. The encoder sees the second view as well, for methods that use the
    encodings of both.

    At the start of every fit the bank is filled with random directions, so that no client keeps the keys of an old
    encoder. It must not be larger than the client's data: it would then always hold other views of the batch's samples.
    Bank and loss equal those of lightly's ``NTXentLoss(memory_bank_size=...)``, which cannot store keys under
    ``torch.func.vmap`` since it reads its position in the bank as a Python number.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        temperature: Temperature of the contrastive loss.
        bank: Number of keys in the memory bank. (The paper has 65536, for one large data set.)
        momentum: Momentum of the target network, in [0, 1].
    """

    bank: Tensor
    place: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        temperature: float = 0.2,
        bank: int = 256,
        momentum: float = 0.99,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_number("temperature", temperature, strict=True)
        check_at_least("bank", bank, 1)
        self.temperature = temperature
        self.projector = self.heads.MoCoProjectionHead(self.in_features, hidden, out)
        self.target = TargetNetwork(encoder, self.projector, momentum=momentum)
        self.register_buffer("bank", torch.zeros(bank, out), persistent=False)
        self.register_buffer("place", torch.zeros((), dtype=torch.int64), persistent=False)  # of the oldest key

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse a bank that is larger than a client's data; see :meth:`Objective.check_samples`."""
        client, count = min(samples.items(), key=lambda item: item[1])
        if len(self.bank) > count:
            raise ConfigurationError(
                f"MoCo's memory bank of {len(self.bank)} keys is larger than the {count} training samples of client "
                f"{client}, so a sample would be its own negative; set bank to at most {count}, or give clients "
                "more samples"
            )

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Start the target network and the bank.

        Raises:
            ConfigurationError: The bank is larger than the client's data.
        """
        self.check_samples({context.client: context.data.num_samples})
        self.target.start(encoder, self.projector)
        directions = torch.randn(self.bank.shape, dtype=torch.float32)  # on the CPU: alike on all devices
        self.bank.copy_(F.normalize(directions.to(self.bank.dtype), dim=1))
        self.place.zero_()

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        self.target.follow(encoder, self.projector)
        encodings = of_each_view(encoder, first, second)
        projections = of_each_view(self.projector, *encodings)
        return ObjectiveOutput(
            in_single_precision(self._loss, projections[0], self.target(second)), encodings, projections
        )

    def _loss(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Cross entropy of each query's key against all keys of the bank, which then stores the new keys."""
        queries, keys = F.normalize(queries, dim=1), F.normalize(keys, dim=1)
        negatives = self.bank.to(queries.dtype, copy=True)  # what autograd needs stays as it is
        scores = torch.cat([(queries * keys).sum(dim=1, keepdim=True), queries @ negatives.T], dim=1)
        self._take_in(keys)
        return F.cross_entropy(
            scores / self.temperature, torch.zeros(len(scores), dtype=torch.int64, device=keys.device)
        )

    @torch.no_grad()
    def _take_in(self, keys: Tensor) -> None:
        """Replace the oldest keys; keys past the end of the bank are dropped, and the next ones go to its start."""
        size, count = len(self.bank), len(keys)
        source = torch.arange(size, device=keys.device) - self.place  # the key that comes to each place
        new = keys.index_select(0, source.clamp(0, count - 1)).to(self.bank.dtype)
        self.bank.copy_(torch.where(((source >= 0) & (source < count)).unsqueeze(1), new, self.bank))
        after = self.place + count
        self.place.copy_(torch.where(after >= size, 0, after))
