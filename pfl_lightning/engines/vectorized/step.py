"""Forward and backward pass of one step of many clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.batches import Batches
from pfl_lightning.engines.vectorized.computation.eager import (
    Computation,
    EagerComputation,
    StepInputs,
    Tensors,
    Terms,
)
from pfl_lightning.engines.vectorized.limits import (
    CannotVectorizeError,
    PythonState,
    explain,
    python_state,
    refuse_changes,
)
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.state.tensors import norm_names

__all__ = ["StackedStep"]


class StackedStep:
    """Step of many clients at once: a client's ``training_step``, applied to many states.

    Args:
        client: The module, in the current phase; its own tensors are not used.
        environment: Settings of the outer Trainer.
        computation: Computes the step; by default ``training_step`` under ``vmap``.

    Attributes:
        trained: Names of the parameters that train.
        gradients: Of the step so far, by name, (A, ...), in the layout of the parameters, as fused optimizers need. A
            parameter that the loss does not use has none, so that the optimizer leaves it alone.
    """

    def __init__(
        self, client: FederatedClient, environment: FitEnvironment, computation: Computation | None = None
    ) -> None:
        self._client, self._compute = client, computation or EagerComputation(client, environment)
        self._statistics = norm_names(client, affine=False)
        parameters = dict(client.named_parameters())
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        self.buffers = [name for name, _ in client.named_buffers()]
        self.gradients: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}  # gradients kept from step to step, since fresh memory is slow
        self._attributes: PythonState | None = python_state(client)
        self._used: frozenset[str] | None = None
        self._terms: frozenset[str] | None = None

    def bind(self, tensors: Tensors, count: int) -> None:
        """Go on with the first ``count`` clients (A) of the whole stack, which changes in place."""
        self._tensors = {name: tensors[name][:count] for name in (*self.trained, *self.frozen, *self.buffers)}
        self._spare = {}

    def begin(self) -> None:
        """Begin another step."""
        self._used, self.gradients = None, {}

    def run(self, rows: Tensor | None, batch: Batches, index: int, scales: Tensor | None = None) -> Terms:
        """Compute the losses of some clients, note their gradients, and change buffers.

        Args:
            rows: The clients, (R,); ``None`` for all that are bound.
            batch: Inputs and labels of each, and the values attached to its samples, if any are.
            index: Number of the batch in its epoch.
            scales: Factor of each client's loss before the backward pass, (R,).

        Returns:
            The loss and its terms, (R,) each, detached and not scaled.

        Raises:
            CannotVectorizeError: The step uses a parameter for some clients only, which an optimizer of stacked
                parameters cannot leave alone for the others; or it returns a term in some steps only.
        """
        tensors, parts = self._tensors, batch
        if rows is not None:
            tensors = {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}
        trained, frozen, buffers = (
            {name: tensors[name] for name in names} for names in (self.trained, self.frozen, self.buffers)
        )
        versions = {name: buffer._version for name, buffer in buffers.items()}
        values = parts[2] if len(parts) == 3 else None
        inputs = StepInputs(trained, frozen, buffers, parts[0], parts[1], scales, in_place=rows is None, values=values)
        with self._explained():
            found = self._compute(inputs, index)
        self._compare(found.gradients, found.terms)
        for name, gradient in found.gradients.items():
            if rows is None:
                self.gradients[name] = gradient
            else:
                self._gradient_buffer(name).index_copy_(0, rows, gradient)
        # Only now are buffers written: the backward pass may need the old values.
        for name, buffer in buffers.items():
            if name in found.assigned:
                _write(self._tensors[name], rows, found.assigned[name])
            # The kernels of batch normalization change statistics without telling autograd.
            elif rows is not None and (name in self._statistics or buffer._version != versions[name]):
                _write(self._tensors[name], rows, buffer)
        return found.terms

    def _gradient_buffer(self, name: str) -> Tensor:
        """Buffer for the gradients of all clients; its content is overwritten by the end of the step."""
        if name not in self.gradients:
            if name not in self._spare:
                self._spare[name] = torch.empty_like(self._tensors[name])
            self.gradients[name] = self._spare[name]
        return self.gradients[name]

    def _compare(self, used: Iterable[str], terms: Iterable[str]) -> None:
        """Refuse parameters used for some clients only, and loss terms returned in some steps only."""
        used, terms = frozenset(used), frozenset(terms)
        self._used = used if self._used is None else self._used
        self._terms = terms if self._terms is None else self._terms
        name = type(self._client).__name__
        if used != self._used:
            some = min(used ^ self._used)
            raise CannotVectorizeError(f"a step of {name} uses the parameter {some!r} for some clients only")
        if terms != self._terms:
            some = min(terms ^ self._terms)
            raise CannotVectorizeError(f"{name}.training_step returns the term {some!r} in some steps only")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the line of the user's code that cannot be vectorized."""
        try:
            yield
        except (torch.OutOfMemoryError, CannotVectorizeError):
            raise
        except Exception as error:
            raise explain(error, self._client) from error
        if self._attributes is not None:  # after the first step
            before, self._attributes = self._attributes, None
            refuse_changes(self._client, before, "training_step")


@torch.no_grad()
def _write(tensor: Tensor, rows: Tensor | None, value: Tensor) -> None:
    if rows is None:
        tensor.copy_(value)
    else:
        tensor.index_copy_(0, rows, value.to(tensor.dtype))
