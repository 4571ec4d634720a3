"""FedEM: federated expectation maximization, multi-task learning under a mixture of distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.methods._starts import check_starts, reset_layers, take_weights
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import Aggregator


class FedEM(FederatedClient):
    """M shared models, the components, of which every client has its own mixture pi_k.

    FedEM-FT is ``fine_tune="all"``: all components, on the client's own samples and their responsibilities.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; the other components begin with new weights.
        num_classes: Number of classes, C.
        components: M, number of components; with one the method is FedAvg.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Federated Multi-Task Learning under a Mixture of Distributions", "Marfoq et al.", "NeurIPS", 2021
    )
    batch_norm = "shared"

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, components: int = 3, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_at_least("components", components, 1)
        self.num_components, self.further_encoders = components, components - 1
        for number in range(1, components):
            # Not inside a list: whether normalization is frozen is decided for each child of a client.
            further: Any = self.copy_network()
            reset_layers(further, keep=self.frozen)
            self.add_module(f"encoder_{number}", further["encoder"])
            self.add_module(f"head_{number}", further["head"])
            self.frozen |= self.find_frozen(further)
        if components > 1:
            self.shared = ("encoder.*", "head.*", "encoder_*", "head_*")
            self.heads = ("head.*", "head_*")
        self.mixture: Tensor
        self.register_buffer("mixture", torch.full((components,), 1 / components))  # pi_k, personal

    def take_encoders(self, encoders: Sequence[nn.Module]) -> None:
        """Begin the further components with encoders of their own; what is frozen stays."""
        frozen = {name.removeprefix("encoder.") for name in self.frozen}
        for number, encoder in enumerate(encoders, start=1):
            take_weights(self.get_submodule(f"encoder_{number}"), encoder, keep=frozen)

    def configure_aggregator(self, num_clients: int) -> Aggregator:
        """The server of FedEM: the mean of each component.

        Raises:
            ConfigurationError: The components would begin equal, and stay so.
        """
        starts = [
            {
                f"{part}.{name}": value
                for part, own in zip(("encoder", "head"), networks, strict=True)
                for name, value in own.named_parameters()
                if f"{part}.{name}" not in self.frozen
            }
            for networks in self._networks()
        ]
        check_starts(type(self).__name__, "component", starts)
        return super().configure_aggregator(num_clients)

    def before_fit(self, context: FitContext) -> None:
        """E step (Algorithm 1, lines 5 to 7) at the received components: q of each sample, and pi_k, their mean."""
        self._expect(context.data)

    def before_evaluation(self, context: FitContext) -> None:
        """A client that has never trained gets its mixture by one E step from equal weights.

        Before a fine-tuning, every client gets the responsibilities of its samples.
        """
        novel = not context.stored
        if novel or self.personalization_phases():
            before = self.mixture.clone()
            self._expect(context.data)
            if not novel:
                self.mixture.copy_(before)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """M step (line 8): (1 / B) sum_i sum_j q_i(j) loss_j(x_i), for all components at once."""
        inputs, labels, *attached = batch
        losses = self._losses(inputs, labels)
        # An exported model trains outside of a federation, where nothing is attached.
        weights = attached[0] if attached else self._responsibilities(losses.detach())
        return self.sum_of_terms({"cross_entropy": (weights.to(losses) * losses).sum(1).mean()})

    def forward(self, inputs: Tensor) -> Tensor:
        """Logarithms of the mixed probabilities, log sum_j pi_k(j) softmax_j(x), (N, C)."""
        spoken = [at_least_single(head(encoder(inputs))).log_softmax(1) for encoder, head in self._networks()]
        weighted = [log + weight for log, weight in zip(spoken, at_least_single(self.mixture).log(), strict=True)]
        return torch.stack(weighted).logsumexp(0)

    # ------------------------------------------------------------------ components

    def _networks(self) -> Iterator[tuple[Any, Any]]:
        """Encoder and head of each component."""
        yield self.encoder, self.head
        for number in range(1, self.num_components):
            yield self.get_submodule(f"encoder_{number}"), self.get_submodule(f"head_{number}")

    def _losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of each sample under each component, (N, M)."""
        losses = [
            F.cross_entropy(head(encoder(inputs)), labels, reduction="none") for encoder, head in self._networks()
        ]
        return torch.stack(losses, dim=1)

    def _responsibilities(self, losses: Tensor) -> Tensor:
        """q_i(j), the softmax over components of log pi_k(j) - loss_j(x_i), (N, M)."""
        return (at_least_single(self.mixture).log() - at_least_single(losses)).softmax(1)

    @torch.no_grad()
    def _expect(self, data: FitData) -> None:
        """E step on all samples, not augmented, in evaluation mode: q is attached to them, and pi_k their mean."""
        if self.num_components == 1:
            return
        inputs, labels = data.tensors()
        pieces = zip(inputs.split(data.eval_batch_size), labels.split(data.eval_batch_size), strict=True)
        with evaluating(self), data.forward_context():
            losses = torch.cat([self._losses(data.convert_input(own), classes) for own, classes in pieces])
        found = self._responsibilities(losses)
        data.attach(found)
        mean = found.mean(0)
        self.mixture.copy_(torch.where(mean.isfinite().all(), mean, self.mixture))  # or NaN in the data would outlast
