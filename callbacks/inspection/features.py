"""Clients' features: t-SNE figures and TensorBoard's Embedding Projector; class separation and CKA (DualFed)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.inspection.figures import client_map, colors, new_figure
from pfl_lightning.callbacks.inspection.probe import ProbingCallback, Representations, names_of_classes
from pfl_lightning.federation import Federation
from pfl_lightning.functional import class_separation, pairwise_linear_cka
from pfl_lightning.seeding import Purpose, derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FEWEST, COMPONENTS, USUAL_PERPLEXITY = 4, 50, 30.0
MAX_IN_LEGEND = 20
COMMON = 200
"""Greatest number of samples that all clients share, for CKA."""


@dataclass(frozen=True)
class Points:
    """Representations of several clients, of one kind and one width.

    Attributes:
        name: Name of the representation in figures.
        values: Representations, shape (n, d).
        labels: Class of each, shape (n,).
        clients: Client of each, shape (n,).
    """

    name: str
    values: Tensor
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]


class FeatureEmbedding(ProbingCallback):
    """Features of some clients' samples by their own models: t-SNE figures, and the Embedding Projector.

    A figure ``features/<representation>`` has the same points twice, colored by class and by client. DualFed has two
    representations, before and after the projector; clients whose features differ in width get separate figures. For
    the Embedding Projector, which only TensorBoard has, the features of each such round are written with class, client
    and architecture of each sample.

    Args:
        every_n_rounds: Rounds between two figures.
        clients: Greatest number of inspected clients.
        samples: Greatest number of samples of each client.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: See :class:`InspectionCallback`.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Draw the figures and write the projector's files."""
        class_names, clients = names_of_classes(federation), federation.clients
        for points in gather_points(self.probe.representations(federation)):
            if (count := len(points.values)) < FEWEST:
                if not self.optional:
                    lacks = f"{count} samples, a t-SNE needs at least {FEWEST}"
                    warnings.warn(f"no figure of {points.name}: {lacks}", stacklevel=2)
                continue
            plane = tsne(points.values, derive_seed(federation.seed, Purpose.TSNE))
            figure = draw_points(points, plane, class_names, f"{points.name}, round {round + 1}")
            self.recorder.figure(f"features/{points.name}", figure, round)
            owners = points.clients.tolist()
            texts = {
                "class": [" ".join(class_names[label].split()) for label in points.labels.tolist()],
                "client": [str(client) for client in owners],
                "encoder": [clients.labels[clients.architecture_of[client]] for client in owners],
            }
            self.recorder.embedding(points.name, points.values, texts, round)


def gather_points(found: Iterable[Representations]) -> list[Points]:
    """Representations of all clients, grouped by name and width.

    A name with several widths becomes one name per width.

    Example:
        >>> from pfl_lightning.callbacks.inspection.probe import Representations
        >>> labels = torch.tensor([0, 1])
        >>> found = [Representations(0, {"features": torch.rand(2, 4)}, labels)]
        >>> found += [Representations(1, {"features": torch.rand(2, 8)}, labels)]
        >>> [(points.name, tuple(points.values.shape)) for points in gather_points(found)]
        [('features_4', (2, 4)), ('features_8', (2, 8))]
    """
    held: dict[tuple[str, int], list[tuple[Representations, Tensor]]] = {}
    for own in found:
        for name, values in own.by_name.items():
            held.setdefault((name, values.shape[1]), []).append((own, values))
    names = [name for name, _ in held]
    return [
        Points(
            name=name if names.count(name) == 1 else f"{name}_{width}",
            values=torch.cat([values for _, values in members]),
            labels=np.concatenate([own.labels.numpy() for own, _ in members]),
            clients=np.concatenate([np.full(len(values), own.client) for own, values in members]),
        )
        for (name, width), members in held.items()
    ]


def tsne(values: Tensor, seed: int) -> NDArray[np.float64]:
    """Two-dimensional t-SNE of points, after a projection on their first 50 principal components.

    Its perplexity is 30, or a third of the other points if that is less.

    Args:
        values: At least four points, shape (n, d).
        seed: Seed of the optimization.

    Returns:
        Shape (n, 2).
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    count, width = values.shape
    state = seed % 2**32
    points = values.double().numpy()
    if width > COMPONENTS and count > COMPONENTS:
        points = PCA(COMPONENTS, random_state=state).fit_transform(points)
    perplexity = min(USUAL_PERPLEXITY, (count - 1) / 3)
    # If all points coincide, principal components have no scale to start from.
    start: Any = "pca" if float(np.ptp(points, axis=0).max()) > 0 and points.shape[1] > 1 else "random"
    found: NDArray[np.float64] = TSNE(perplexity=perplexity, init=start, random_state=state).fit_transform(points)
    return found


def draw_points(points: Points, plane: NDArray[np.float64], class_names: Sequence[str], title: str) -> Figure:
    """Figure of the points twice, colored by class and by client."""
    figure = new_figure(11, 5)
    figure.suptitle(f"t-SNE of {title}")
    colorings = (("class", points.labels, class_names), ("client", points.clients, None))
    for place, (what, values, names) in enumerate(colorings):
        axes = figure.add_subplot(1, 2, place + 1)
        kinds = np.unique(values)
        for kind, color in zip(kinds.tolist(), colors(len(kinds)), strict=True):
            own = plane[values == kind]
            label = str(names[kind]) if names is not None else str(kind)
            label = f" {label}" if label.startswith("_") else label  # matplotlib leaves such names out of a legend
            axes.scatter(own[:, 0], own[:, 1], s=9, color=color, label=label)
        axes.set(title=f"by {what}", xticks=[], yticks=[])
        if len(kinds) <= MAX_IN_LEGEND:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


class RepresentationMeasures(ProbingCallback):
    """Class separation and similarity between clients of every representation (DualFed, Figures 5 and 6).

    ``separation/<representation>`` is the mean over clients of the class separation of their own samples
    (:func:`~pfl_lightning.functional.class_separation`), high for a good personal representation.
    ``cka/<representation>`` is the mean over pairs of clients of the linear CKA of the same samples, drawn from all
    clients in equal shares (:func:`~pfl_lightning.functional.linear_cka`), high for a good general representation.
    ``cka_matrix/<representation>`` is a heat map of the pairs. DualFed has two representations, ``pre_projection`` and
    ``post_projection``, the others ``features``. Clients may have encoders of different widths.

    CKA is biased upwards with fewer samples than units of a representation: 200 samples are shared, where there are so
    many.

    Args:
        every_n_rounds: Rounds between two measurements.
        clients: Greatest number of inspected clients.
        samples: Greatest number of samples of each client.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: See :class:`InspectionCallback`.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    charts: ClassVar = {
        "representations": {
            "class separation (R²), mean over clients": ["Multiline", ["separation/.*"]],
            "linear CKA, mean over pairs of clients": ["Multiline", ["cka/.*"]],
        }
    }

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if no client has samples; else None."""
        return super().unavailable(trainer, federation) or self.probe.lacks_common(federation)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log both measures and the heat maps of CKA."""
        separations: dict[str, list[float]] = {}
        for own in self.probe.representations(federation):
            for name, values in own.by_name.items():
                separations.setdefault(name, []).append(class_separation(values, own.labels))
        common: dict[str, dict[int, Tensor]] = {}
        for own in self.probe.representations(federation, COMMON):
            for name, values in own.by_name.items():
                common.setdefault(name, {})[own.client] = values
        found = {f"separation/{name}": _mean(values) for name, values in separations.items()}
        for name, by_client in common.items():
            matrix = pairwise_linear_cka(list(by_client.values())).numpy()
            found[f"cka/{name}"] = _mean(matrix[~np.eye(len(matrix), dtype=bool)].tolist())
            figure, _ = client_map(matrix, list(by_client), f"linear CKA of {name}, round {round + 1}", label="CKA")
            self.recorder.figure(f"cka_matrix/{name}", figure, round)
        self.recorder.scalars({name: value for name, value in found.items() if np.isfinite(value)}, round)


def _mean(values: list[float]) -> float:
    """Mean of the finite values; NaN if there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return sum(finite) / len(finite) if finite else float("nan")
