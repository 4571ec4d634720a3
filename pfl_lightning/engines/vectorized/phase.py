"""One phase of many clients at once: their batches, stacked step by step, and their gradients, clipped for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.data import to_device
from pfl_lightning.engines.lifecycle import check_finite_losses, phase_data
from pfl_lightning.engines.sequential import passed_through
from pfl_lightning.engines.vectorized.limits import NoLogs, averages_samples, uses_batch_index
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer
from pfl_lightning.engines.vectorized.stack import Member, Stack
from pfl_lightning.engines.vectorized.step import FEW, Batches, Computation, Measure, StackedStep
from pfl_lightning.errors import NonFiniteLossError
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.functional.tensor_lists import HOST, moved
from pfl_lightning.seeding import seeded_generator

Batch = tuple[Tensor, ...]
Tensors = Mapping[str, Tensor]


class Stream:
    """Batches of one client in all epochs of a phase, in the same order as under every other engine.

    Batches are given by the positions of their samples, so that those of all clients can be gathered, and augmented, at
    once; data of other kinds that augment give the batches themselves.

    Attributes:
        steps: Number of batches, over all epochs, as far as the fit's ``max_steps`` allows.
        whole: Number of batches, over all epochs.
        generator: Generator of the order and the augmentations.
        transform: Augmentation of the batches; ``None`` where there is none.
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
        self.generator = seeded_generator(environment.seed, purpose, context.round, context.client)
        loader = self._data.loader(self.generator)
        self._loader: Any = loader if member.features is None else loader.with_inputs(member.features)
        self._epochs = phase.epochs
        self.whole = phase.epochs * len(self._loader)
        self.steps = int(min(self.whole, context.max_steps - member.num_steps))
        member.is_cut = member.is_cut or self.steps < self.whole
        self.transform = getattr(self._loader, "transform", None) if self._loader.augmented else None
        self.pooled = not self._loader.augmented or self.transform is not None
        self.index, self.epoch_ended, self.offset = -1, True, 0
        self._items: Iterator[Batch] | None = None

    def next(self) -> Batch:
        """Parts of the next batch, or its positions alone."""
        if self._items is None:
            self._items = _items(self._data, self._loader, self.generator, self._epochs, self.pooled)
        item, length = next(self._items), len(self._loader)
        self.index = (self.index + 1) % length
        self.epoch_ended = self.index + 1 == length
        return (item[0] + self.offset,) if self.pooled else item

    def tensors(self) -> Batch:
        """All inputs (n, ...), labels (n,) and attached values, to which positions refer."""
        values = () if self._data.values is None else (self._data.values,)
        return (*(self._loader.tensors() if self.transform is None else self._loader.stored()), *values)

    def transformed(self, inputs: Tensor, counts: Sequence[tuple[torch.Generator, int]]) -> Tensor:
        """Stored inputs of several clients, augmented and normalized; generators and numbers of images of each."""
        return cast(Tensor, self._loader.transformed(inputs, tuple(counts)))


def _items(data: FitData, loader: Any, generator: torch.Generator, epochs: int, pooled: bool) -> Iterator[Batch]:
    """All batches of a client, or their positions; they do not hold the stream, whose memory ends with its group."""
    for _ in range(epochs):
        yield from ((positions,) for positions in data.positions(generator)) if pooled else loader


class StackedBatches:
    """Next batches of the clients, stacked where their shapes are the same, or can be made so by padding.

    Args:
        streams: The clients' streams, in the stack's order.
        environment: Settings of the outer Trainer.
        by_index: Whether batches of different numbers are kept separate.
        pads: Whether smaller batches are filled up by samples of theirs.
    """

    def __init__(
        self, streams: Sequence[Stream], environment: FitEnvironment, by_index: bool, pads: bool = False
    ) -> None:
        self._environment, self._by_index, self._pads = environment, by_index, pads and not by_index
        self._pool: Batch | None = None
        self._common: int | None = None  # number of samples whose inputs are the same tensor for all clients
        at_once = all(s.pooled and s.transform == streams[0].transform for s in streams)
        parts = [stream.tensors() for stream in streams] if at_once else []
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

    def next(self, active: Sequence[Stream]) -> Iterator[tuple[Tensor | None, int, Batches, Tensor | None]]:
        """Next batch of every active client.

        Yields:
            The clients' rows, or None for all active ones; the batch's number in its epoch, of at least one of them;
            the batches; and, where they are padded, a mask of their own samples.
        """
        pads = self._pads and len(active) > FEW
        groups: dict[object, tuple[list[int], list[Batch], int]] = {}
        for row, stream in enumerate(active):
            item = stream.next()
            key = (item[0].shape[pads:], stream.index if self._by_index else 0)
            rows, items, _ = groups.setdefault(key, ([], [], stream.index))
            rows.append(row)
            items.append(item)
        for rows, items, index in groups.values():
            batch: Batches = self._environment.precision.convert_input(
                self._gathered(items, [active[row] for row in rows])
                if self._pool is not None
                else tuple(torch.cat(column) for column in zip(*items, strict=True))
            )
            sizes, mask, device = torch.tensor([len(item[0]) for item in items]), None, batch[0].device
            if (sizes != sizes[0]).any():
                numbers = torch.arange(int(sizes.max()))
                mask = numbers < sizes[:, None]
                places = torch.where(mask, numbers, 0) + (sizes.cumsum(0) - sizes)[:, None]
                mask, places = to_device(mask, device), to_device(places.flatten(), device)
                batch = tuple(part.index_select(0, places) for part in batch)
            batch = tuple(part.unflatten(0, (len(items), -1)) for part in batch)
            yield None if len(rows) == len(active) else to_device(torch.tensor(rows), device), index, batch, mask

    def _gathered(self, items: Sequence[Batch], streams: Sequence[Stream]) -> Batch:
        """Batches of several clients, one after the other, from the positions of their samples."""
        assert self._pool is not None
        inputs, *others = self._pool
        positions = to_device(torch.cat([item[0] for item in items]), inputs.device)  # (N,), or (N, views)
        samples = positions if positions.ndim == 1 else positions[..., 0].contiguous()
        rows = positions if self._common is None else positions % self._common
        gathered = inputs.index_select(0, rows.flatten())
        if streams[0].transform is not None:
            counts = [(own.generator, item[0].numel()) for own, item in zip(streams, items, strict=True)]
            gathered = streams[0].transformed(gathered, counts)
        return (gathered.unflatten(0, positions.shape), *(other.index_select(0, samples) for other in others))


@torch.no_grad()
def clip_per_client(gradients: Tensors, limit: float, algorithm: str) -> None:
    """Clip every client's gradients in place, like ``nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` for one.

    Args:
        gradients: Gradients of A clients by name, (A, ...).
        limit: Largest norm of a client's gradient, or largest absolute value of its entries.
        algorithm: ``"norm"`` or ``"value"``.

    Example:
        >>> import torch
        >>> from pfl_lightning.engines.vectorized.phase import clip_per_client
        >>> gradients = {"weight": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}  # two clients, of norms 5 and 0.5
        >>> clip_per_client(gradients, limit=1.0, algorithm="norm")
        >>> gradients["weight"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if algorithm == "value":
        for gradient in gradients.values():
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype))


def run_stacked_phase(
    client: FederatedClient,
    phase: Phase,
    stack: Stack,
    environment: FitEnvironment,
    purpose: str,
    clip: Callable[[Tensors], None] | None,
    make_computation: Callable[[FederatedClient, FitEnvironment], Computation],
    pads: bool = False,
    measure: Measure | None = None,
) -> None:
    """Train the clients of a stack through one phase; those whose loss became non-finite get an error.

    Args:
        client: The module, in the phase.
        phase: The phase.
        stack: The clients' states, which are trained in place; clients with more batches come first afterwards.
        environment: Settings of the outer Trainer.
        purpose: Purpose of the seeds of batch orders and augmentations.
        clip: Clips the gradients; ``None`` leaves them.
        make_computation: Makes the computation of a step.
        pads: Whether incomplete batches are padded, where the loss is a mean over samples.
        measure: Is shown the first step before it is taken, and may refuse it.
    """
    streams = {member: Stream(client, member, phase, environment, purpose) for member in stack.members}
    on_features = stack.members[0].features is not None
    stack.keep(sorted(stack.members, key=lambda member: -streams[member].steps))
    ordered = [streams[member] for member in stack.members]
    # Of the client as it is, with its encoder.
    optimizer = StackedOptimizer(client, phase, stack, [stream.whole for stream in ordered])
    with passed_through(client) if on_features else nullcontext(), client.recorded_logs(NoLogs()):
        step = StackedStep(client, make_computation(client, environment), measure)
        pads = pads and averages_samples(client)
        batches = StackedBatches(ordered, environment, uses_batch_index(client), pads)
        losses = train(stack, step, optimizer, ordered, batches, clip)
    for row, member in enumerate(stack.members):
        own = {name: values[row, : ordered[row].steps] for name, values in losses.items() if ordered[row].steps}
        try:
            check_finite_losses(list(own.get("loss", ())), member.context, phase)
            for name, values in own.items():
                member.losses.setdefault(name, []).append(float(values.float().mean()))
        except NonFiniteLossError as error:
            member.error = error.with_traceback(None)  # whose frames hold the stack


def train(
    stack: Stack,
    step: StackedStep,
    optimizer: StackedOptimizer,
    streams: Sequence[Stream],
    batches: StackedBatches,
    clip: Callable[[Tensors], None] | None,
) -> dict[str, Tensor]:
    """Take all steps of a phase, of clients of which those with more batches come first.

    Returns:
        The loss terms of every client and step by name, (K, steps) each.
    """
    count, losses = 0, dict[str, Tensor]()
    steps = max(stream.steps for stream in streams)
    for number in range(steps):
        active = [stream for stream in streams if stream.steps > number]
        if len(active) != count:  # the others stay as they are
            count = len(active)
            step.bind(stack.tensors, count)
            optimizer.bind({name: stack.tensors[name][:count] for name in optimizer.names})
        step.begin()
        for rows, index, batch, mask in batches.next(active):
            for name, values in step.run(rows, batch, index, mask).items():
                if name not in losses:
                    losses[name] = values.new_zeros((len(streams), steps))
                losses[name][slice(count) if rows is None else rows, number] = values
        gradients = {name: step.gradients[name] for name in optimizer.names if name in step.gradients}
        if clip is not None and gradients:
            clip(gradients)
        optimizer.step(gradients)
        for row, stream in enumerate(active):
            stack.members[row].num_steps += 1
            if stream.epoch_ended:
                optimizer.after_epoch(row)
    return dict(zip(losses, moved(list(losses.values()), HOST), strict=True))  # once for all clients
