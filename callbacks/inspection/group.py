"""Group of all inspection callbacks with common settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, final

import lightning as L

from pfl_lightning.callbacks.inspection import over_clients
from pfl_lightning.callbacks.inspection.attribution import UnitAttribution
from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.combination import CombinationWeights
from pfl_lightning.callbacks.inspection.communication import Communication
from pfl_lightning.callbacks.inspection.features import FeatureEmbedding, RepresentationMeasures
from pfl_lightning.callbacks.inspection.probe import SplitName
from pfl_lightning.callbacks.inspection.settings import RunSettings


@final  # to jsonargparse a group of options, as a dataclass that is no callback
@dataclass(eq=False)
class Inspection(L.Callback):
    """All inspection callbacks with common settings. A callback without anything to show for a method is silent.

    Among the callbacks of a Trainer it adds those to them when a fit or an evaluation begins, apart from those that are
    there already.

    Attributes:
        every_n_rounds: Rounds between two figures; cheap scalars are logged in every round.
        clients: Greatest number of clients whose features are inspected.
        samples: Greatest number of samples of each client.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: Folder for figures and text that no logger accepts; ``None`` is ``inspection`` in the run's folder.

    Raises:
        ConfigurationError: If a setting is out of range.

    Example:
        >>> trainer = L.Trainer(callbacks=[FederatedLoop(), Inspection(every_n_rounds=20)])  # doctest: +SKIP
        >>> from pfl_lightning.callbacks import FeatureEmbedding, Inspection
        >>> callbacks = Inspection(every_n_rounds=20).callbacks(without={FeatureEmbedding})
        >>> [type(callback).__name__ for callback in callbacks][:4]
        ['RunSettings', 'PartitionPicture', 'ClientAccuracy', 'ClientMetrics']
        >>> len(callbacks)
        9
    """

    every_n_rounds: int = 10
    clients: int = 10
    samples: int = 50
    part: SplitName = "test"
    dirpath: str | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.callbacks()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Add the callbacks behind this one, before anything but a prediction."""
        if stage != "predict":
            known: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            # Into the list itself, which the Trainer is going through: it sets up what it finds further on.
            place = known.index(self) + 1
            known[place:place] = self.callbacks(without=[type(callback) for callback in known])

    def callbacks(self, config: str | None = None, without: Collection[type] = ()) -> list[InspectionCallback]:
        """Make the callbacks.

        Args:
            config: The config as text, for :class:`RunSettings`.
            without: Classes to leave out, which the Trainer already has.

        Returns:
            One callback of each class, with ``optional`` set.
        """
        every, probe = self.every_n_rounds, (self.clients, self.samples, self.part)
        found: list[InspectionCallback] = [
            RunSettings(config, self.dirpath),
            over_clients.PartitionPicture(self.dirpath),
            over_clients.ClientAccuracy(every, self.dirpath),
            over_clients.ClientMetrics(every, self.dirpath),
            over_clients.LossComponents(every, self.dirpath),
            Communication(every, self.dirpath),
            CombinationWeights(every, self.dirpath),
            FeatureEmbedding(every, *probe, dirpath=self.dirpath),
            RepresentationMeasures(every, *probe, dirpath=self.dirpath),
            UnitAttribution(every, *probe, dirpath=self.dirpath),
        ]
        for callback in found:
            callback.optional = True
        return [callback for callback in found if type(callback) not in without]
