"""All inspection callbacks at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pfl_lightning.callbacks.inspection.accuracy import ClientAccuracy
from pfl_lightning.callbacks.inspection.attribution import UnitAttribution
from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.combination import CombinationWeights
from pfl_lightning.callbacks.inspection.communication import Communication
from pfl_lightning.callbacks.inspection.embedding import FeatureEmbedding
from pfl_lightning.callbacks.inspection.losses import LossComponents
from pfl_lightning.callbacks.inspection.partition import PartitionPicture
from pfl_lightning.callbacks.inspection.probe import PartName, ProbeSettings
from pfl_lightning.callbacks.inspection.separation import RepresentationMeasures
from pfl_lightning.callbacks.inspection.settings import RunSettings
from pfl_lightning.checks import check_at_least

__all__ = ["Inspection"]


@dataclass(frozen=True)
class Inspection:
    """All inspection callbacks with common settings; a method without what one of them shows leaves it out.

    Attributes:
        every_n_rounds: Rounds between two pictures; scalars that cost nothing are logged in every round.
        clients: At most so many clients' features are looked at.
        samples: At most so many samples of each.
        part: Which part of a client's data: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: Folder for what no logger takes; ``None`` is ``inspection`` in the run's folder.
    """

    every_n_rounds: int = 10
    clients: int = 10
    samples: int = 50
    part: PartName = "test"
    dirpath: str | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_at_least("inspect.every_n_rounds", self.every_n_rounds, 1)
        ProbeSettings(self.clients, self.samples, self.part)

    def callbacks(self, config: str | None = None, without: Collection[type] = ()) -> list[InspectionCallback]:
        """The callbacks.

        Args:
            config: The config as text, for :class:`RunSettings`.
            without: Classes to leave out, which the Trainer has already.
        """
        every, probe = self.every_n_rounds, (self.clients, self.samples, self.part)
        found: list[InspectionCallback] = [
            RunSettings(config, self.dirpath),
            PartitionPicture(self.dirpath),
            ClientAccuracy(every, self.dirpath),
            LossComponents(every, self.dirpath),
            Communication(every, self.dirpath),
            CombinationWeights(every, self.dirpath),
            FeatureEmbedding(every, *probe, dirpath=self.dirpath),
            RepresentationMeasures(every, self.clients, self.samples, part=self.part, dirpath=self.dirpath),
            UnitAttribution(every, *probe, dirpath=self.dirpath),
        ]
        for callback in found:
            callback.optional = True
        return [callback for callback in found if type(callback) not in without]
