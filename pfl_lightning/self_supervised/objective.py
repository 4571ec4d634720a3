"""The base of self-supervised objectives: what a client learns from two views of a batch, without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least
from pfl_lightning.functional.numerics import at_least_single, without_autocast

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext

__all__ = ["Objective", "ObjectiveOutput", "in_single_precision", "of_both_views", "of_each_view"]


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective makes of a batch of B samples.

    Attributes:
        loss: The objective's loss, a scalar.
        encodings: z = f(x) of each view by the client's own encoder, (B, d).
        projections: Of each view by the client's own projector, (B, p), not normalized.
    """

    loss: Tensor
    encodings: tuple[Tensor, Tensor]
    projections: tuple[Tensor, Tensor]


class Objective(nn.Module):
    """A loss of two views of a batch, with the networks that it needs besides the encoder.

    The encoder is the client's and comes with every call; the objective holds no reference to it. All parameters of an
    objective train; a network that follows another one is made of buffers
    (:class:`~pfl_lightning.self_supervised.TargetNetwork`). What neither travels nor is kept by the client lies in
    non-persistent buffers and is made anew in :meth:`before_fit`.

    ``forward`` is part of a client's ``training_step`` and, like it, a pure function of parameters, buffers and batch.

    Args:
        encoder: Network from inputs to features (N, d), with an attribute ``out_features`` (d); a target network is
            made as a copy of it.
        hidden: Width of the projector's hidden layers.
        out: Width of the projections, p.
    """

    shared: tuple[str, ...] = ("projector.*",)
    """Patterns of the objective's parameters and buffers that travel; other persistent ones stay with the client."""

    projector: nn.Module

    def __init__(self, encoder: nn.Module, hidden: int = 2048, out: int = 256) -> None:
        super().__init__()
        check_at_least("hidden", hidden, 1)
        check_at_least("out", out, 1)
        self.in_features, self.hidden, self.out = cast(int, encoder.out_features), hidden, out

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse clients with too few samples; called before the first round.

        Args:
            samples: Number of training samples of each client that takes part.

        Raises:
            ConfigurationError: Names a client, its samples, and what to do.
        """

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Called at the start of a local fit, with the received state; torch's generators are seeded for the fit."""

    def forget(self) -> None:
        """Give up what the client has kept from earlier fits, so that the next one starts as the first did."""

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """The loss of a batch, and what the encoder and the projector make of it.

        Args:
            encoder: The client's encoder.
            first: One view of each sample, (B, ...).
            second: Another one.
        """
        raise NotImplementedError


def of_both_views(network: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A network's outputs for two views, in one pass: batch normalization sees both (SimCLR, SwAV)."""
    one, other = network(torch.cat([first, second])).chunk(2)
    return one, other


def of_each_view(network: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A network's outputs for two views, one after the other: batch normalization sees one at a time.

    So it is in the published code of BYOL, SimSiam and MoCo: no view learns of the other by the statistics of a batch
    that they share, and a loss of one direction has no gradient for the view that it only asks for.
    """
    return network(first), network(second)


def in_single_precision(loss: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A loss computed in single precision at least, also under autocast: its exponentials overflow in half."""
    with without_autocast(tensors[0].device):
        return loss(*(at_least_single(tensor) for tensor in tensors))
