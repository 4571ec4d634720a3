"""One phase of many clients at once: gradients clipped and stepped for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.lifecycle import check_finite_losses
from pfl_lightning.engines.sequential import passed_through
from pfl_lightning.engines.vectorized.batches import StackedBatches, Stream
from pfl_lightning.engines.vectorized.graphs import ComputationFactory
from pfl_lightning.engines.vectorized.limits import NoLogs, uses_batch_index
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer, check_same_settings
from pfl_lightning.engines.vectorized.stack import Stack
from pfl_lightning.engines.vectorized.step import StackedStep
from pfl_lightning.errors import NonFiniteLossError
from pfl_lightning.fit.tasks import FitEnvironment

Tensors = Mapping[str, Tensor]


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
    computations: ComputationFactory,
) -> None:
    """Train the clients of a stack through one phase; those whose loss became non-finite get an error.

    Args:
        client: The module, in the phase.
        phase: The phase.
        stack: The clients' states, which are trained in place; clients with more batches come first afterwards.
        environment: Settings of the outer Trainer.
        purpose: Purpose of the seeds of batch orders and augmentations.
        clip: Clips the gradients; ``None`` leaves them.
        computations: Factory of the computation of a step.
    """
    check_same_settings(client, (stack.row(member) for member in stack.members))
    streams = {member: Stream(client, member, phase, environment, purpose) for member in stack.members}
    on_features = stack.members[0].features is not None
    try:
        stack.keep(sorted(stack.members, key=lambda member: -streams[member].steps))
        ordered = [streams[member] for member in stack.members]
        fits = [(member.context, streams[member].steps) for member in stack.members]
        optimizer = StackedOptimizer(client, phase, fits)  # of the client as it is, with its encoder
        with passed_through(client) if on_features else nullcontext(), client.recorded_logs(NoLogs()):
            step = StackedStep(client, computations.make(client, phase, environment))
            batches = StackedBatches(ordered, environment, uses_batch_index(client))
            losses = _Run(stack, step, optimizer).train(ordered, batches, clip)
    finally:
        for stream in streams.values():
            stream.close()
    for row, member in enumerate(stack.members):
        own = {name: values[row, : ordered[row].steps] for name, values in losses.items() if ordered[row].steps}
        try:
            check_finite_losses(list(own.get("loss", ())), member.context, phase)
            member.add_losses({name: float(values.float().mean()) for name, values in own.items()})
        except NonFiniteLossError as error:
            member.error = error.with_traceback(None)  # whose frames hold the stack


class _Run:
    """The steps of one phase.

    Args:
        stack: The clients, longest first.
        step: Forward and backward pass.
        optimizer: Of the phase.
    """

    def __init__(self, stack: Stack, step: StackedStep, optimizer: StackedOptimizer) -> None:
        self._stack, self._step, self._optimizer = stack, step, optimizer
        self._held = [name for group in self._optimizer.names for name in group]
        self._count = 0
        self._losses: dict[str, Tensor] = {}

    def train(
        self, streams: Sequence[Stream], batches: StackedBatches, clip: Callable[[Tensors], None] | None
    ) -> dict[str, Tensor]:
        """All steps of all clients; returns the loss terms of every client and step by name, (K, steps) each."""
        steps = max(stream.steps for stream in streams)
        for step in range(steps):
            active = [stream for stream in streams if stream.steps > step]
            if len(active) != self._count:
                self._narrow(len(active))
            gradients = self._gradients(active, batches, step, (len(streams), steps))
            if clip is not None and gradients:
                clip(gradients)
            self._optimizer.step(gradients)
            self._optimizer.after_step()
            for row, stream in enumerate(active):
                self._stack.members[row].num_steps += 1
                if stream.epoch_ended:
                    self._optimizer.after_epoch(row)
        return {name: values.cpu() for name, values in self._losses.items()}  # once for all clients

    def _narrow(self, count: int) -> None:
        """Go on with the first clients; the others stay as they are."""
        tensors, self._count = self._stack.tensors, count
        self._step.bind(tensors, count)
        self._optimizer.bind({name: tensors[name][:count] for name in self._held})

    def _gradients(
        self, active: Sequence[Stream], batches: StackedBatches, step: int, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Gradients of what the optimizer holds."""
        self._step.begin()
        for rows, index, batch in batches.next(active):
            for name, values in self._step.run(rows, batch, index).items():
                if name not in self._losses:
                    self._losses[name] = values.new_zeros(shape)
                self._losses[name][slice(len(active)) if rows is None else rows, step] = values
        found = self._step.gradients
        return {name: found[name] for name in self._held if name in found}
