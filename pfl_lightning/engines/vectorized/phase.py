"""One phase of many clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.lifecycle import check_finite_losses
from pfl_lightning.engines.sequential import new_scaler, passed_through
from pfl_lightning.engines.vectorized.batches import StackedBatches, Stream
from pfl_lightning.engines.vectorized.computation.factory import ComputationFactory
from pfl_lightning.engines.vectorized.gradients import LossScaling, clip_per_client
from pfl_lightning.engines.vectorized.limits import NoLogs, uses_batch_index
from pfl_lightning.engines.vectorized.optimizer import StackedOptimizer, check_same_settings
from pfl_lightning.engines.vectorized.stack import Member, Stack
from pfl_lightning.engines.vectorized.step import StackedStep
from pfl_lightning.errors import NonFiniteLossError
from pfl_lightning.fit.tasks import FitEnvironment

__all__ = ["Clipping", "run_stacked_phase"]


@dataclass(frozen=True)
class Clipping:
    """Clipping of gradients, by norm or value; without a value there is none."""

    value: float | None
    algorithm: str


def run_stacked_phase(
    client: FederatedClient,
    phase: Phase,
    stack: Stack,
    environment: FitEnvironment,
    purpose: str,
    clipping: Clipping,
    computations: ComputationFactory | None = None,
) -> None:
    """Train the clients of a stack through one phase; those whose loss became non-finite get an error.

    Args:
        client: The module, in the phase.
        phase: The phase.
        stack: The clients' states, which are trained in place; clients with more batches come first afterwards.
        environment: Settings of the outer Trainer.
        purpose: Purpose of the seeds of batch orders and augmentations.
        clipping: Clipping of the gradients.
        computations: Factory of the computation of a step; by default it is neither compiled nor captured.
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
            computation = None if computations is None else computations.make(client, phase, environment)
            step = StackedStep(client, environment, computation)
            batches = StackedBatches(ordered, environment, uses_batch_index(client))
            scaler = new_scaler(environment)
            scaling = None if scaler is None else LossScaling(scaler, len(ordered), environment.device)
            table = _Run(stack, step, optimizer, scaling).train(ordered, batches, clipping)
    finally:
        for stream in streams.values():
            stream.close()
    for row, member in enumerate(stack.members):
        try:
            member.add_losses(table.losses_of(row, ordered[row].steps, member, phase))
        except NonFiniteLossError as error:
            member.error = error.with_traceback(None)  # whose frames hold the stack


class _Run:
    """The steps of one phase.

    Args:
        stack: The clients, longest first.
        step: Forward and backward pass.
        optimizer: Of the phase.
        scaling: Of the losses, in half precision.
    """

    def __init__(
        self, stack: Stack, step: StackedStep, optimizer: StackedOptimizer, scaling: LossScaling | None = None
    ) -> None:
        self._stack, self._step, self._optimizer, self._scaling = stack, step, optimizer, scaling
        self._held = [name for group in self._optimizer.names for name in group]
        self._count = 0

    def train(self, streams: Sequence[Stream], batches: StackedBatches, clipping: Clipping) -> _LossTable:
        """All steps of all clients."""
        steps = max(stream.steps for stream in streams)
        table = _LossTable(len(streams), steps)
        for step in range(steps):
            active = [stream for stream in streams if stream.steps > step]
            if len(active) != self._count:
                self._narrow(len(active))
            gradients = self._gradients(active, batches, step, table)
            skipped = self._scaling.unscale(gradients) if self._scaling is not None else []
            if clipping.value is not None and gradients:
                clip_per_client(gradients, clipping.value, clipping.algorithm)
            self._optimizer.step(gradients, skipped)
            for row in range(len(active)):
                self._stack.members[row].num_steps += row not in skipped
            self._optimizer.after_step()
            for row, stream in enumerate(active):
                if stream.epoch_ended:
                    self._optimizer.after_epoch(row)
        table.fetch()
        return table

    def _narrow(self, count: int) -> None:
        """Go on with the first clients; the others stay as they are."""
        tensors, self._count = self._stack.tensors, count
        self._step.bind(tensors, count)
        if self._scaling is not None:
            self._scaling.narrow(count)
        self._optimizer.bind({name: tensors[name][:count] for name in self._held})

    def _gradients(
        self, active: Sequence[Stream], batches: StackedBatches, step: int, table: _LossTable
    ) -> dict[str, Tensor]:
        """Gradients of what the optimizer holds."""
        self._step.begin()
        for rows, index, batch in batches.next(active):
            scales = None if self._scaling is None else self._scaling.scales
            if scales is not None and rows is not None:
                scales = scales.index_select(0, rows)
            terms = self._step.run(rows, batch, index, scales)
            table.record(slice(len(active)) if rows is None else rows, step, terms)
        found = self._step.gradients
        return {name: found[name] for name in self._held if name in found}


class _LossTable:
    """Loss terms of every client and step by name, (K, steps) each."""

    def __init__(self, clients: int, steps: int) -> None:
        self._shape = (clients, steps)
        self._terms: dict[str, Tensor] = {}

    def record(self, rows: Tensor | slice, step: int, terms: dict[str, Tensor]) -> None:
        """Record the terms (R,) of some clients in a step."""
        for name, values in terms.items():
            if name not in self._terms:
                self._terms[name] = values.new_zeros(self._shape)
            self._terms[name][rows, step] = values

    def fetch(self) -> None:
        """Copy the terms to the host, once for all clients."""
        self._terms = {name: values.cpu() for name, values in self._terms.items()}

    def losses_of(self, row: int, steps: int, member: Member, phase: Phase) -> dict[str, float]:
        """Means over the client's own steps, by name.

        Raises:
            NonFiniteLossError: The loss of a step is not finite.
        """
        own = {name: values[row, :steps] for name, values in self._terms.items()}
        if steps:
            check_finite_losses(list(own["loss"]), member.context, phase)
        return {name: float(values.float().mean()) for name, values in own.items()} if steps else {}
