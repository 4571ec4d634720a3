"""Class separation and similarity between clients of the representations (DualFed, Figures 5 and 6)."""

from __future__ import annotations

import lightning as L
import numpy as np
from torch import Tensor

from pfl_lightning.callbacks.inspection.figures import client_map
from pfl_lightning.callbacks.inspection.probe import ProbingCallback
from pfl_lightning.callbacks.inspection.recorder import Chart
from pfl_lightning.federation import Federation
from pfl_lightning.functional import class_separation, pairwise_linear_cka

COMMON = 200
"""Greatest number of samples that all clients share, for CKA."""


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

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if no client has samples; else None."""
        return super().unavailable(trainer, federation) or self.probe.lacks_common(federation)

    def charts(self, federation: Federation) -> tuple[Chart, ...]:
        """Charts of both measures of every representation."""
        return (
            Chart("representations", "class separation (R²), mean over clients", ("separation/.*",)),
            Chart("representations", "linear CKA, mean over pairs of clients", ("cka/.*",)),
        )

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
