"""FedAvgM, FedAdam, FedYogi and FedAdagrad: FedAvg with an optimizer of the server."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from pfl_lightning import server_optimizers
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.learner import MakeOptimizer
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator

PAPER = Citation("Adaptive Federated Optimization", "Reddi et al.", "ICLR", 2021)


class _FedOpt(FederatedClient):
    model_agnostic = True
    batch_norm = "shared"

    def step_by(self, make: MakeOptimizer) -> None:
        """Let the server step by this optimizer; one is made at once, which checks its options."""
        make([nn.Parameter(torch.empty(0))])
        self.make_server_optimizer = make

    def configure_aggregator(self, num_clients: int) -> AveragingAggregator:
        """The mean of the clients' models, weighted by samples, towards which the optimizer steps."""
        return AveragingAggregator(self, num_clients, optimizer=self.make_server_optimizer)


class FedAvgM(_FedOpt):
    """FedAvg with momentum on the server; see :class:`pfl_lightning.server_optimizers.FedAvgM`.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        server_lr: Rate of the server.
        server_momentum: Momentum of the server; 0 is FedAvg.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        "Hsu et al.",
        "arXiv",
        2019,
    )

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        server_lr: float = 1.0,
        server_momentum: float = 0.9,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        self.step_by(partial(server_optimizers.FedAvgM, lr=server_lr, momentum=server_momentum))


class FedAdam(_FedOpt):
    """FedAvg with Adam on the server (Algorithm 2); see :class:`pfl_lightning.server_optimizers.FedAdam`.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        server_lr: Rate of the server, eta.
        beta1: Share of the first moment that is kept.
        beta2: Share of the second moment that is kept.
        tau: How adaptive the steps are: the smaller, the more.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = PAPER
    server_optimizer_class: type[server_optimizers.FedAdam] = server_optimizers.FedAdam

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        make = self.server_optimizer_class
        self.step_by(partial(make, lr=server_lr, beta1=beta1, beta2=beta2, tau=tau))


class FedYogi(FedAdam):
    """FedAvg with Yogi on the server (Algorithm 2); see :class:`pfl_lightning.server_optimizers.FedYogi`."""

    citation = PAPER
    server_optimizer_class = server_optimizers.FedYogi


class FedAdagrad(_FedOpt):
    """FedAvg with Adagrad on the server (Algorithm 2); see :class:`pfl_lightning.server_optimizers.FedAdagrad`.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        server_lr: Rate of the server, eta.
        beta1: Share of the first moment that is kept; 0 for the usual Adagrad, which has no momentum.
        tau: How adaptive the steps are: the smaller, the more.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = PAPER

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        self.step_by(partial(server_optimizers.FedAdagrad, lr=server_lr, beta1=beta1, tau=tau))
