"""FedAS: federated parameter alignment and client synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_learning_rate
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import ClientUpdate, statistics_field
from pfl_lightning.methods._class_means import class_statistics
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator

NEGLIGIBLE = 1e-30
"""Least weight of a client: clients whose gradients are all zero count the same."""


@dataclass(frozen=True, kw_only=True)
class FedASUpdate(ClientUpdate):
    """The trained encoder, and how much the client's data still say about the model.

    Attributes:
        fisher: Trace of the Fisher information of the trained model, a scalar.
    """

    fisher: Tensor = statistics_field(shape="", floating=True, at_least=0, tells="quality of fit")


class FedAS(FederatedClient):
    """A personal head, an encoder that is aligned to the client's own features before it trains, and a mean by Fisher.

    The received encoder first trains towards the class means of the features that the client's own encoder gave after
    its last fit; then encoder and head train together. The server weighs clients by the traces of their Fisher
    information, so that clients that have trained little, or are far from an optimum, count more.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alignment_epochs: Epochs of the alignment; 0 leaves it out.
        alignment_lr: Its learning rate, without momentum and weight decay.
        alignment_batch_size: Its batch size.
        alignment_mode: ``"training"`` lets batch normalization and dropout of the encoder work in the alignment as in
            the fit, ``"evaluation"`` as in an evaluation (published implementation). Without such layers both are one.
        aggregation: ``"fisher"`` weighs clients by the traces, ``"samples"`` by their samples, ``"plain"`` equally.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``eval_model`` is ``"trained"``: a
            client's model as its last fit left it (published implementation).
    """

    citation = Citation("FedAS: Bridging Inconsistency in Personalized Federated Learning", "Yang et al.", "CVPR", 2024)
    shared = ("encoder.*",)
    batch_norm = "shared"
    eval_model = "trained"
    loss_names = ("cross_entropy", "alignment")
    personalization_losses = ("cross_entropy",)
    not_exported = ("prototypes", "present")

    prototypes: Tensor
    present: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment_epochs: int = 1,
        alignment_lr: float = 0.01,
        alignment_batch_size: int = 16,
        alignment_mode: str = "training",
        aggregation: str = "fisher",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        if not any(parameter.requires_grad for parameter in self.encoder.parameters()):
            raise ConfigurationError(
                "FedAS aligns and averages the encoder, but all of this one is frozen (requires_grad=False): let some "
                "of it train, or use LocalOnly, which trains the heads"
            )
        check_at_least("alignment_epochs", alignment_epochs, 0)
        check_learning_rate("alignment_lr", alignment_lr)
        check_at_least("alignment_batch_size", alignment_batch_size, 1)
        check_choice("alignment_mode", alignment_mode, ("training", "evaluation"))
        check_choice("aggregation", aggregation, ("fisher", "samples", "plain"))
        self.alignment_epochs, self.alignment_batch_size = alignment_epochs, alignment_batch_size
        self.alignment_mode, self.aggregation = alignment_mode, aggregation
        self._alignment_sgd = partial(torch.optim.SGD, lr=alignment_lr)
        # Personal: class means at the encoder that the client's last fit ended with.
        self.register_buffer("prototypes", torch.zeros(num_classes, self.feature_width))
        self.register_buffer("present", torch.zeros(num_classes, dtype=torch.bool))

    def phases(self) -> tuple[Phase, ...]:
        """The alignment of the received encoder, once the client has a model; then encoder and head."""
        fit = Phase("fit", ("encoder.*", "head.*"), self.epochs, losses=("cross_entropy",))
        if self.alignment_epochs == 0 or not bool(self.present.any()):
            return (fit,)
        alignment = Phase(
            "alignment",
            ("encoder.*",),
            self.alignment_epochs,
            batch_size=self.alignment_batch_size,
            plain=True,
            optimizer=self._alignment_sgd,
            losses=("alignment",),
        )
        return alignment, fit

    def frozen_norms(self) -> Iterator[nn.Module]:
        """As in the base, and all layers of the encoder while it is aligned in evaluation mode.

        Recurrent layers stay in training mode, which their gradient needs on a GPU.
        """
        yield from super().frozen_norms()
        if self.phase.losses == ("alignment",) and self.alignment_mode == "evaluation":
            for layer in self.encoder.modules():
                if not any(isinstance(part, nn.RNNBase) for part in layer.modules()):
                    yield layer

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy; or the sum over a batch's classes of the mean squared distance to the class's prototype."""
        terms = super().loss_terms(features, labels)
        if self.uses("alignment"):
            squares = F.mse_loss(features, self.prototypes[labels].to(features.dtype), reduction="none").mean(dim=-1)
            of_class = F.one_hot(labels.long(), self.num_classes).to(squares.dtype).sum(dim=0)
            known = self.present[labels].to(squares.dtype)
            terms["alignment"] = (known * squares / of_class[labels]).sum()
        return terms

    def make_update(self, context: FitContext, before: None) -> FedASUpdate:
        """The trained encoder and the Fisher trace; the client keeps its prototypes."""
        statistics = class_statistics(self, context)
        self.prototypes.copy_(statistics.means)
        self.present.copy_(statistics.counts > 0)
        update = super().make_update(context, before)
        return FedASUpdate(**vars(update), fisher=self._fisher(context))

    def _fisher(self, context: FitContext) -> Tensor:
        """Sum over batches of the squared norm of the gradient of their mean cross entropy, in evaluation mode."""
        inputs, labels = context.data.tensors()
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        trace = torch.zeros((), dtype=torch.float64)
        size = context.data.batch_size
        with evaluating(self):
            for chunk, classes in zip(inputs.split(size), labels.split(size), strict=True):
                with torch.enable_grad(), context.data.forward_context():
                    scores = at_least_single(self(context.data.convert_input(chunk)))
                    loss = F.cross_entropy(scores, classes, reduction="sum")  # divided below, as in full_gradient
                gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
                parts = [(at_least_single(gradient) / len(classes)).square().sum() for gradient in gradients]
                trace += torch.stack(parts).sum().cpu()
        return trace.to(self.statistics_like())


class FedASAggregator(AveragingAggregator, of=FedAS):
    """Averages encoders, weighted by the clients' Fisher traces."""

    update_class = FedASUpdate

    def __init__(self, client: FedAS, num_clients: int) -> None:
        super().__init__(client, num_clients, by_samples=client.aggregation == "samples")
        self.by_fisher = client.aggregation == "fisher"

    def receive(self, update: FedASUpdate) -> None:
        """Add one client's encoder to the running average."""
        if self.by_fisher:
            self.running_average.update(update.weights, max(float(update.fisher), NEGLIGIBLE))
        else:
            super().receive(update)
