"""Computation of one step from the clients' tensors: losses and gradients under ``vmap``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError
from pfl_lightning.engines.vectorized.stack import places_of
from pfl_lightning.fit.tasks import FitEnvironment

__all__ = ["Computation", "EagerComputation", "StepInputs", "StepOutputs", "Tensors", "Terms", "mean_terms"]

Tensors = Mapping[str, Tensor]
Terms = dict[str, Tensor]


@dataclass(frozen=True)
class StepInputs:
    """Input tensors of a step of some clients, each (R, ...).

    Attributes:
        trained: Parameters that train.
        frozen: The other parameters.
        buffers: Buffers, which the step may change in place.
        inputs: Inputs of the batches, (R, B, ...).
        labels: Labels of the batches, (R, B).
        scales: Factor of each loss before the backward pass, (R,).
        in_place: Whether parameters and buffers are the stack's memory and not copies.
        values: Values attached to the batches' samples, (R, B, ...); ``None`` where none are.
    """

    trained: Tensors
    frozen: Tensors
    buffers: Tensors
    inputs: Tensor
    labels: Tensor
    scales: Tensor | None = None
    in_place: bool = True
    values: Tensor | None = None

    def batch(self) -> tuple[Tensor, ...]:
        """Parts of the batches, as ``training_step`` takes them."""
        return (self.inputs, self.labels) if self.values is None else (self.inputs, self.labels, self.values)

    def names(self) -> tuple[str, ...]:
        """Names of :meth:`tensors`, in their order."""
        batch = ("inputs", "labels", "values")[: len(self.batch())]
        scales = () if self.scales is None else ("scales",)
        return (*self.trained, *self.frozen, *self.buffers, *batch, *scales)

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        scales = () if self.scales is None else (self.scales,)
        return [*self.trained.values(), *self.frozen.values(), *self.buffers.values(), *self.batch(), *scales]

    def like(self, tensors: Sequence[Tensor]) -> StepInputs:
        """Inputs with other tensors, in the order of :meth:`tensors`."""
        rest = iter(tensors)
        trained, frozen, buffers = (
            {name: next(rest) for name in part} for part in (self.trained, self.frozen, self.buffers)
        )
        inputs, labels = next(rest), next(rest)
        values = None if self.values is None else next(rest)
        return StepInputs(trained, frozen, buffers, inputs, labels, next(rest, None), self.in_place, values)

    def with_own_buffers(self) -> StepInputs:
        """Inputs with copies of the buffers, which may then change."""
        return replace(self, buffers={name: buffer.clone() for name, buffer in self.buffers.items()})


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step.

    Attributes:
        terms: The loss and its terms, (R,) each, detached and not scaled.
        gradients: Gradients of the parameters that the loss uses, in their layout.
        assigned: Buffers to which the step assigned new tensors.
    """

    terms: Terms
    gradients: dict[str, Tensor]
    assigned: dict[str, Tensor]


class Computation(Protocol):
    """Computation of a step."""

    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """Losses and gradients of the batch with this number in its epoch; buffers may change in place."""
        ...

    def settled(self, inputs: StepInputs) -> bool:
        """Whether later steps of these shapes will be computed in the same way as now."""
        ...


class EagerComputation:
    """Computation by ``training_step`` under ``vmap``.

    The forward pass is vectorized, and the backward pass is ordinary autograd's over stacked leaves: where
    ``torch.func.grad`` gives zeros, and so weight decay, to a parameter that the loss does not use, autograd gives it
    no gradient, as in every other engine; and the backward pass runs outside of autocast.

    Args:
        client: The module, in the current phase.
        environment: Settings of the outer Trainer.
    """

    def __init__(self, client: FederatedClient, environment: FitEnvironment) -> None:
        self._client, self._environment = client, environment
        self._module = _TrainingStep(client)
        self._places = places_of(client)

    @torch.enable_grad()
    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """See :class:`Computation`."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.trained.items()}
        batch = inputs.batch()
        vectorized = vmap(self._one, in_dims=(0, 0, 0, 0, None), randomness="different")
        terms, assigned = vectorized(leaves, dict(inputs.frozen), dict(inputs.buffers), batch, index)
        loss = terms["loss"] if inputs.scales is None else terms["loss"] * inputs.scales
        loss.sum().backward(inputs=list(leaves.values()))
        return StepOutputs(
            {name: term.detach() for name, term in terms.items()},
            {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
            {name: tensor.detach() for name, tensor in assigned.items()},
        )

    def settled(self, inputs: StepInputs) -> bool:
        """Always: there is only one way."""
        return True

    def _one(
        self, trained: Tensors, frozen: Tensors, buffers: Tensors, batch: Any, index: int
    ) -> tuple[Terms, dict[str, Tensor]]:
        """Loss terms of one client, and the buffers to which the step assigned new tensors."""
        state = {**frozen, **trained, **buffers}
        given = {f"client.{place}": state[name] for place, name in self._places.items()}
        with self._environment.precision.forward_context():
            output, after = functional_call(self._module, dict(given), (batch, index), tie_weights=False)
        assigned = {name.removeprefix("client."): t for name, t in after.items() if t is not given.get(name)}
        return mean_terms(self._client, output), assigned


def mean_terms(client: FederatedClient, output: Any) -> Terms:
    """Scalar loss terms by name, from the output of ``training_step``; other tensors in it are left out.

    Raises:
        CannotVectorizeError: The output is ``None``, or its loss is not a single number.
    """
    if output is None:
        raise CannotVectorizeError(f"{type(client).__name__}.training_step returned None to skip a batch")
    terms = output if isinstance(output, dict) else {"loss": output}
    found = {name: t.reshape(()) for name, t in terms.items() if isinstance(t, Tensor) and t.numel() == 1}
    if "loss" not in found:
        raise CannotVectorizeError(f"{type(client).__name__}.training_step returned no single number as the loss")
    return found


class _TrainingStep(nn.Module):
    """Module whose forward pass is ``training_step``, with the buffers afterwards."""

    def __init__(self, client: FederatedClient) -> None:
        super().__init__()
        self.client = client

    def forward(self, batch: Any, index: int) -> tuple[Any, dict[str, Tensor]]:
        output = self.client.training_step(batch, index)
        return output, {f"client.{name}": buffer for name, buffer in self.client.named_buffers()}
