"""Attribution of the clients' predictions to feature units (FedClassAvg, ICPP 2022, Figure 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import lightning as L
import numpy as np
import torch
from torch import Tensor

from pfl_lightning.callbacks.inspection.figures import new_figure, thin_ticks
from pfl_lightning.callbacks.inspection.probe import ProbingCallback, names_of_classes, own_classes, represent
from pfl_lightning.client import FederatedClient
from pfl_lightning.federation import Federation
from pfl_lightning.functional import layer_conductance, rank_correlation, rank_scores
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.architectures import width_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STEPS = 32
"""Steps of the integral of the conductance."""


@dataclass(frozen=True)
class Attribution:
    """Contributions of the feature units to the classification of one sample.

    Attributes:
        label: Class of the sample.
        clients: Ids of the m clients that classify it correctly.
        conductance: Conductance of each of their units, shape (m, d).
    """

    label: int
    clients: tuple[int, ...]
    conductance: Tensor


class UnitAttribution(ProbingCallback):
    """Ranks of the feature units by their conductance, for each client (FedClassAvg, section 5.3 and Figure 9).

    Of the inspected samples, the one that most clients classify correctly is used. For these clients, the layer
    conductance of each feature unit for the score of its class (:func:`~pfl_lightning.functional.layer_conductance`) is
    converted to a rank. The figure ``attribution_ranks`` shows units by clients: horizontal stripes mean that clients
    use units alike. ``attribution/rank_correlation`` is the mean of Spearman's correlation over pairs of these clients,
    ``attribution/clients`` their number.

    Units are compared by position, so all clients need features of one width. A method without a trained head, or with
    a different ``forward`` (FedProto), has nothing to show.

    Args:
        every_n_rounds: Rounds between two figures.
        clients: Greatest number of inspected clients.
        samples: Greatest number of samples of all clients together, in equal shares.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: See :class:`InspectionCallback`.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    charts: ClassVar = {
        "representations": {"rank correlation of units between clients": ["Multiline", ["attribution/rank_.*"]]}
    }

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if there is no trained head on features of one width, or no client has samples; else None."""
        if lacks := super().unavailable(trainer, federation):
            return lacks
        models = federation.clients.models
        widths = {width_of(model.encoder): label for model, label in zip(models, federation.clients.labels)}
        if len(widths) > 1:
            named = ", ".join(f"{width} ({label})" for width, label in widths.items())
            return f"units are compared by position, and the clients' features have several widths: {named}"
        made = type(models[0])
        otherwise = made.class_scores is not FederatedClient.class_scores or (
            models[0].step_module is models[0] and made.forward is not FederatedClient.forward
        )
        if models[0].evaluation != "classifier" or otherwise:
            return f"{federation.method_name} does not classify by a head on the features"
        inputs, _ = self.probe.samples(federation, self.probe.clients[0])
        if not inputs.is_floating_point():
            return "inputs are whole numbers, between which there is no line to integrate along"
        return self.probe.lacks_common(federation)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the rank correlation and the figure of the ranks."""
        found = self.attribute(federation)
        if found is None:
            return
        correlation = rank_correlation(found.conductance)
        pairs = correlation[~torch.eye(len(correlation), dtype=torch.bool)]
        pairs = pairs[pairs.isfinite()]
        values = {"attribution/clients": float(len(found.clients))}
        if len(pairs):
            values["attribution/rank_correlation"] = float(pairs.mean())
        self.recorder.scalars(values, round)
        figure = draw_attribution(found, names_of_classes(federation)[found.label], round)
        self.recorder.figure("attribution_ranks", figure, round)

    def attribute(self, federation: Federation) -> Attribution | None:
        """Attribution of the sample that most clients classify correctly; ``None`` if no sample is."""
        inputs, labels = self.probe.common_samples(federation, self.samples)
        correct: dict[int, Tensor] = {}
        for client, model in federation.client_models(self.probe.clients):
            correct[client] = self._correct(federation, client, model, inputs, labels)
        votes = torch.stack(list(correct.values())).sum(dim=0)
        sample = int(votes.argmax())  # the first of equal ones
        clients = [client for client, own in correct.items() if bool(own[sample])]
        if not clients:
            return None
        rows = []
        x, label = inputs[sample : sample + 1], labels[sample : sample + 1]
        precision = federation.environment.precision
        for client, model in federation.client_models(clients):
            with torch_seed(derive_seed(federation.seed, Purpose.INSPECTION, client)), precision.forward_context():
                y = own_classes(federation, client, label)
                units = layer_conductance(model.encoder, model.classify, precision.convert_input(x), y, STEPS)
            rows.append(units[0].float().cpu())
        return Attribution(int(label), tuple(clients), torch.stack(rows))

    @staticmethod
    @torch.no_grad()
    def _correct(federation: Federation, client: int, model: FederatedClient, inputs: Tensor, labels: Tensor) -> Tensor:
        found = represent(federation, client, model, inputs, lambda features: {"scores": model.classify(features)})
        scores = found["scores"]
        finite = scores.isfinite().all(dim=1)  # argmax takes NaN for the greatest
        return (scores.argmax(dim=1) == own_classes(federation, client, labels).cpu()) & finite


def draw_attribution(found: Attribution, class_name: str, round: int) -> Figure:
    """Heat map of the ranks, units by clients."""
    ranks = rank_scores(found.conductance).numpy().T
    figure = new_figure(float(np.clip(2.5 + 0.3 * len(found.clients), 4, 12)), 6)
    axes = figure.add_subplot()
    image = axes.imshow(ranks, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    thin_ticks(axes, "x", [str(client) for client in found.clients])
    axes.set(xlabel="client", ylabel="feature unit", title=f"attribution ranks, class {class_name}, round {round + 1}")
    figure.colorbar(image, ax=axes, label="rank", fraction=0.046, pad=0.02)
    return figure
