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
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer
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
    streams = {member: Stream(client, member, phase, environment, purpose) for member in stack.members}
    on_features = stack.members[0].features is not None
    stack.keep(sorted(stack.members, key=lambda member: -streams[member].steps))
    ordered = [streams[member] for member in stack.members]
    # Of the client as it is, with its encoder.
    optimizer = StackedOptimizer(client, phase, stack, [stream.steps for stream in ordered])
    with passed_through(client) if on_features else nullcontext(), client.recorded_logs(NoLogs()):
        step = StackedStep(client, computations.make(client, phase, environment))
        batches = StackedBatches(ordered, environment, uses_batch_index(client))
        losses = train(stack, step, optimizer, ordered, batches, clip)
    for row, member in enumerate(stack.members):
        own = {name: values[row, : ordered[row].steps] for name, values in losses.items() if ordered[row].steps}
        try:
            check_finite_losses(list(own.get("loss", ())), member.context, phase)
            member.add_losses({name: float(values.float().mean()) for name, values in own.items()})
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
        for rows, index, batch in batches.next(active):
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
