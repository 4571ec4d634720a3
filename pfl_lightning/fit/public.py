"""Public samples as clients and servers see them: no labels, and the same samples for everybody in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pfl_lightning.data import BatchSource, FederatedData, SplitSource
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.seeding import Purpose, seeded_generator

if TYPE_CHECKING:
    from pfl_lightning.client.base import FederatedClient


HELD = 2
"""Draws whose inputs are held: a client trains on those of a round, and speaks of those of the next one."""

_inputs: WeakKeyDictionary[PublicSource, dict[tuple[object, ...], BatchSource]] = WeakKeyDictionary()


class PublicSource(SplitSource, Protocol):
    """All public samples (see ``pfl_lightning.datamodules.FederatedDataModule.public_split``)."""

    def select(self, positions: Tensor) -> SplitSource:
        """The samples at the given positions, (k,)."""
        ...


def public_positions(count: int, size: int, seed: int, round: int) -> Tensor:
    """Positions of a round's samples among all public ones, drawn without replacement, alike wherever it is asked for.

    Args:
        count: Number of public samples.
        size: Number of samples of a round, |S|.
        seed: Seed of the run.
        round: Number of the round, from 0.

    Example:
        >>> from pfl_lightning.fit.public import public_positions
        >>> public_positions(100, 4, seed=0, round=2).tolist() == public_positions(100, 4, seed=0, round=2).tolist()
        True
    """
    return torch.randperm(count, generator=seeded_generator(seed, Purpose.PUBLIC, round))[:size]


class PublicSamples:
    """Public samples in one client's fit. Their labels are -1, and their batches are plain: single views, all of them.

    What clients attach to them is each client's own; the inputs are the same tensor for all clients of a process.

    Args:
        part: All public samples.
        size: Number of samples of a round, |S|.
        seed: Seed of the run.
        like: The client's own data, whose device, precision and batch sizes apply.
    """

    def __init__(self, part: PublicSource, size: int, seed: int, like: FitData) -> None:
        self._part, self._size, self._seed, self._like = part, size, seed, like
        self._drawn: dict[int, FitData] = {}

    def of_round(self, round: int) -> FitData:
        """Samples S_r of a round, in the order in which they were drawn; the same object whenever it is asked for.

        So that what :meth:`~pfl_lightning.fit.data.FitData.attach` gives them in ``before_fit`` is there in the phases.
        """
        if round not in self._drawn:
            positions = public_positions(len(self._part), self._size, self._seed, round)
            part = self._part.select(positions)
            own = self._like
            self._drawn[round] = FitData(
                part,
                own.batch_size,
                eval_batch_size=own.eval_batch_size,
                device=own.device,
                forward_context=own.forward_context,
                convert_input=own.convert_input,
                _plain=self._inputs_of(round, part),
            )
        return self._drawn[round]

    def _inputs_of(self, round: int, part: SplitSource) -> BatchSource:
        """What gives the inputs of a round's samples on the client's device, made once for all clients."""
        held, key = _inputs.setdefault(self._part, {}), (self._size, self._seed, round, self._like.device)
        if key not in held:
            held[key] = part.loader(self._like.eval_batch_size, device=self._like.device)
            while len(held) > HELD:
                del held[next(iter(held))]
        return held[key]


def check_public(model: FederatedClient, data: FederatedData) -> None:
    """Refuse data without enough public samples for a method that trains on them; called before the first round.

    Raises:
        ConfigurationError: Names what the method takes, what there is, and what to do.
    """
    part = _all_public(data)
    count = 0 if part is None else len(part)
    if count < model.public_samples:
        raise ConfigurationError(
            f"{type(model).__name__} draws {model.public_samples} public samples a round, and {type(data).__name__} "
            f"has {count}: set the data module's public=... to a number of training samples to hold back, or a folder "
            "of images, with at least the method's public_samples"
        )


def public_for(model: FederatedClient, data: FederatedData, like: FitData, seed: int) -> PublicSamples:
    """Public samples for a client's fit under a method that uses some."""
    part = _all_public(data)
    assert part is not None  # or check_public has refused the data
    return PublicSamples(part, model.public_samples, seed, like)


def _all_public(data: FederatedData) -> PublicSource | None:
    return cast("PublicSource | None", getattr(data, "public_split", None))  # other data modules have none
