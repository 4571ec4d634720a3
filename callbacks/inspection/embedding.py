"""Clients' features as t-SNE figures, and in TensorBoard's Embedding Projector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.callbacks.inspection.figures import colors, new_figure
from pfl_lightning.callbacks.inspection.probe import ProbingCallback, Representations, names_of_classes
from pfl_lightning.federation import Federation
from pfl_lightning.seeding import Purpose, derive_seed
from pfl_lightning.state.architectures import width_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FEWEST, COMPONENTS, USUAL_PERPLEXITY = 4, 50, 30.0
MAX_IN_LEGEND = 20
LARGEST_IMAGE = 64  # pixels; a sprite of thousands of images stays below what browsers load


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
    and architecture of each sample, and its image if it has one.

    Args:
        every_n_rounds: Rounds between two figures.
        clients: Greatest number of inspected clients.
        samples: Greatest number of samples of each client.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: See :class:`InspectionCallback`.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if the clients have no samples, or too few for a t-SNE; else None."""
        if lacks := super().unavailable(trainer, federation):
            return lacks
        points: dict[int, int] = {}
        for client in self.probe.clients:
            width = width_of(federation.clients.model_of(client).encoder)
            points[width] = points.get(width, 0) + self.probe.size(federation, client)
        most = max(points.values())
        return f"there are {most} samples, a t-SNE takes at least {FEWEST}" if most < FEWEST else None

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Draw the figures and write the projector's files."""
        class_names = names_of_classes(federation)
        for points in gather_points(self.probe.representations(federation)):
            if len(points.values) < FEWEST:
                continue
            plane = tsne(points.values, derive_seed(federation.seed, Purpose.TSNE))
            figure = draw_points(points, plane, class_names, f"{points.name}, round {round + 1}")
            self.recorder.figure(f"features/{points.name}", figure, round)
            self._project(federation, points, class_names, round)

    def _project(self, federation: Federation, points: Points, class_names: Sequence[str], round: int) -> None:
        clients = federation.clients
        rows = [
            [" ".join(class_names[label].split()), str(client), clients.labels[clients.architecture_of[client]]]
            for label, client in zip(points.labels.tolist(), points.clients.tolist(), strict=True)
        ]
        shown = dict.fromkeys(points.clients.tolist())
        small = [thumbnails(self.probe.samples(federation, client)[0]) for client in shown]
        images = [own for own in small if own is not None]
        of_one_size = len({own.shape[1:] for own in images}) == 1
        pictures = torch.cat(images) if of_one_size else None
        self.recorder.embedding(points.name, points.values, rows, ["class", "client", "encoder"], pictures, round)


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


def thumbnails(inputs: Tensor) -> Tensor | None:
    """Small square images of inputs, each scaled from 0, black, to 1, white; shorter sides get black margins.

    Args:
        inputs: Any floats, shape (n, 1 or 3, H, W) for images.

    Returns:
        Floats on the CPU, shape (n, 3, S, S) with S of at most 64 pixels; ``None`` if the inputs are no images.

    Example:
        >>> images = thumbnails(torch.randn(5, 1, 128, 64))
        >>> images.shape, float(images.min()), float(images.max())
        (torch.Size([5, 3, 64, 64]), 0.0, 1.0)
        >>> thumbnails(torch.randn(5, 30)) is None
        True
    """
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    height, width = inputs.shape[-2:]
    factor = min(1.0, LARGEST_IMAGE / max(height, width))
    values = inputs.float()
    if factor < 1:
        values = F.interpolate(values, (max(1, int(height * factor)), max(1, int(width * factor))), mode="area")
    flat = values.flatten(start_dim=1)
    low, high = (end[:, None, None, None] for end in (flat.amin(dim=1), flat.amax(dim=1)))
    scaled = ((values - low) / (high - low).clamp(min=1e-12)).cpu()
    height, width = scaled.shape[-2:]
    above, left = max(0, width - height), max(0, height - width)
    square = F.pad(scaled, (left // 2, left - left // 2, above // 2, above - above // 2))
    return square.expand(-1, 3, -1, -1)
