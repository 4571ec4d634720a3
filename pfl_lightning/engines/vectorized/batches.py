"""Batches of many clients, stacked step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.lifecycle import phase_data
from pfl_lightning.engines.vectorized.stack import Member
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.seeding import seeded_generator

Batch = tuple[Tensor, ...]
Batches = tuple[Tensor, ...]
"""Inputs (R, B, ...), labels (R, B) and, where samples have values, these."""


class Stream:
    """Batches of one client in all epochs of a phase, in the same order as under every other engine.

    Batches without augmentation are given by the positions of their samples, so that those of all clients can be
    gathered at once.

    Attributes:
        steps: Number of batches, over all epochs.
        pooled: Whether the stream gives positions.
        index: Number of the last batch in its epoch.
        epoch_ended: Whether it was the epoch's last.
        offset: Offset added to positions.
    """

    def __init__(
        self, client: FederatedClient, member: Member, phase: Phase, environment: FitEnvironment, purpose: str
    ) -> None:
        context = member.context
        self._data = phase_data(client, phase, context)
        self._generator = seeded_generator(environment.seed, purpose, context.round, context.client)
        loader = self._data.loader(self._generator)
        self._loader = loader if member.features is None else loader.with_inputs(member.features)
        self._epochs = phase.epochs
        self.steps = phase.epochs * len(self._loader)
        self.pooled = not self._loader.augmented
        self.index, self.epoch_ended, self.offset = 0, False, 0
        self._items = self._all()

    def next(self) -> Batch:
        """Parts of the next batch, or its positions alone."""
        return next(self._items)

    def tensors(self) -> Batch:
        """All inputs (n, ...), labels (n,) and attached values, to which positions refer."""
        values = () if self._data.values is None else (self._data.values,)
        return (*self._loader.tensors(), *values)

    def _all(self) -> Generator[Batch]:
        for _ in range(self._epochs):
            epoch = self._positions() if self.pooled else iter(self._loader)
            for index, item in enumerate(epoch):
                self.index, self.epoch_ended = index, index + 1 == len(self._loader)
                yield item

    def _positions(self) -> Iterator[Batch]:
        for positions in self._data.positions(self._generator):
            yield (positions + self.offset,)


class StackedBatches:
    """Next batches of the clients, stacked where their shapes are the same.

    Args:
        streams: The clients' streams, in the stack's order.
        environment: Settings of the outer Trainer.
        by_index: Whether batches of different numbers are kept separate.
    """

    def __init__(self, streams: Sequence[Stream], environment: FitEnvironment, by_index: bool) -> None:
        self._environment, self._by_index = environment, by_index
        self._pool: Batch | None = None
        self._common: int | None = None  # number of samples whose inputs are the same tensor for all clients
        parts = [stream.tensors() for stream in streams] if all(s.pooled for s in streams) else []
        if len({tuple((column.shape[1:], column.dtype) for column in part) for part in parts}) == 1:
            offset = 0
            for stream, part in zip(streams, parts, strict=True):
                stream.offset = offset
                offset += len(part[0])
            inputs, *others = zip(*parts, strict=True)
            if all(own is inputs[0] for own in inputs):  # public samples, and one client alone
                self._common = len(inputs[0])
            pooled = inputs[0] if self._common is not None else torch.cat(inputs)
            self._pool = (pooled, *(torch.cat(column) for column in others))
        else:
            for stream in streams:
                stream.pooled = False

    def next(self, active: Sequence[Stream]) -> Iterator[tuple[Tensor | None, int, Batches]]:
        """Next batch of every active client.

        Yields:
            The clients' rows, or None for all active ones; the batch's number in its epoch, of at least one of them;
            and the batches.
        """
        groups: dict[object, tuple[list[int], list[Batch], int]] = {}
        for row, stream in enumerate(active):
            item = stream.next()
            key = (item[0].shape, stream.index if self._by_index else 0)
            rows, items, _ = groups.setdefault(key, ([], [], stream.index))
            rows.append(row)
            items.append(item)
        for rows, items, index in groups.values():
            batch: Batches = self._environment.precision.convert_input(self._together(items))
            complete = len(rows) == len(active)
            yield None if complete else torch.tensor(rows, device=batch[0][0].device), index, batch

    def _together(self, items: Sequence[Batch]) -> Batches:
        if self._pool is None:
            return tuple(torch.stack(column) for column in zip(*items, strict=True))
        inputs, *others = self._pool
        positions = torch.stack([item[0] for item in items]).to(
            inputs.device, non_blocking=True
        )  # (R, B), or (R, B, views)
        samples = positions if positions.ndim == 2 else positions[..., 0]
        rows = positions if self._common is None else positions % self._common
        gathered = inputs.index_select(0, rows.flatten()).unflatten(0, positions.shape)
        return (gathered, *(other.index_select(0, samples.flatten()).unflatten(0, samples.shape) for other in others))
