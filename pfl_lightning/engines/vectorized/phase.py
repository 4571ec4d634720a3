"""One phase of many clients at once: their batches, stacked step by step, and their gradients, clipped for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.data import BatchSource
from pfl_lightning.engines.lifecycle import check_finite_losses, phase_data
from pfl_lightning.engines.sequential import passed_through
from pfl_lightning.engines.vectorized.limits import NoLogs, uses_batch_index
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer
from pfl_lightning.engines.vectorized.stack import Member, Stack
from pfl_lightning.engines.vectorized.step import Batches, Computation, StackedStep
from pfl_lightning.errors import NonFiniteLossError
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.seeding import seeded_generator

Batch = tuple[Tensor, ...]
Tensors = Mapping[str, Tensor]


class Stream:
    """Batches of one client in all epochs of a phase, in the same order as under every other engine.

    Attributes:
        steps: Number of batches, over all epochs.
        index: Number of the last batch in its epoch.
        epoch_ended: Whether it was the epoch's last.
    """

    def __init__(
        self, client: FederatedClient, member: Member, phase: Phase, environment: FitEnvironment, purpose: str
    ) -> None:
        context = member.context
        generator = seeded_generator(environment.seed, purpose, context.round, context.client)
        data = phase_data(client, phase, context)
        loader = data.loader(generator)
        self._length = len(loader)
        self.steps = phase.epochs * self._length
        self.index, self.epoch_ended = -1, True
        if not loader.augmented:  # the samples of an epoch at once, in the same order, of which batches are views
            loader = replace(data, batch_size=data.num_samples, drop_last=False).loader(generator)
        loader = loader if member.features is None else loader.with_inputs(member.features)
        self._items = _batches(loader, data.batch_size, self._length, phase.epochs)

    def next(self) -> Batch:
        """Parts of the next batch."""
        self.index = (self.index + 1) % self._length
        self.epoch_ended = self.index + 1 == self._length
        return next(self._items)


def _batches(loader: BatchSource, size: int, count: int, epochs: int) -> Iterator[Batch]:
    """So many batches of each epoch; they do not hold the stream, whose memory ends with its group."""
    for _ in range(epochs):
        pieces = (zip(*(part.split(size) for part in item), strict=True) for item in loader)
        yield from islice(chain.from_iterable(pieces), count)


def next_batches(
    streams: Sequence[Stream], environment: FitEnvironment, by_index: bool
) -> Iterator[tuple[Tensor | None, int, Batches]]:
    """Next batches of some clients, stacked where their shapes are the same.

    Args:
        streams: The clients' streams, in the stack's order.
        environment: Settings of the outer Trainer.
        by_index: Whether batches of different numbers are kept separate.

    Yields:
        The clients' rows, or None for all of them; the batch's number in its epoch, of at least one of them; and the
        batches.
    """
    groups: dict[object, tuple[list[int], list[Batch], int]] = {}
    for row, stream in enumerate(streams):
        item = stream.next()
        key = (item[0].shape, stream.index if by_index else 0)
        rows, items, _ = groups.setdefault(key, ([], [], stream.index))
        rows.append(row)
        items.append(item)
    for rows, items, index in groups.values():
        batch: Batches = environment.precision.convert_input(
            tuple(torch.stack(column) for column in zip(*items, strict=True))
        )
        yield None if len(rows) == len(streams) else torch.tensor(rows, device=batch[0][0].device), index, batch


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
    """
    streams = {member: Stream(client, member, phase, environment, purpose) for member in stack.members}
    on_features = stack.members[0].features is not None
    stack.keep(sorted(stack.members, key=lambda member: -streams[member].steps))
    ordered = [streams[member] for member in stack.members]
    # Of the client as it is, with its encoder.
    optimizer = StackedOptimizer(client, phase, stack, [stream.steps for stream in ordered])
    with passed_through(client) if on_features else nullcontext(), client.recorded_logs(NoLogs()):
        step = StackedStep(client, make_computation(client, environment))
        batches = partial(next_batches, environment=environment, by_index=uses_batch_index(client))
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
    batches: Callable[[Sequence[Stream]], Iterator[tuple[Tensor | None, int, Batches]]],
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
        for rows, index, batch in batches(active):
            for name, values in step.run(rows, batch, index).items():
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
    return {name: values.cpu() for name, values in losses.items()}  # once for all clients
