"""Forward and backward pass of one step of many clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl_lightning.client import FederatedClient
from pfl_lightning.local_fit._limits import CannotVectorizeError, PythonState, explain, python_state, refuse_changes
from pfl_lightning.local_fit._stack import places_of
from pfl_lightning.local_fit._stacked_batches import Batches
from pfl_lightning.local_fit.tasks import FitEnvironment
from pfl_lightning.state import norm_names

__all__ = ["LoopedStep", "StackedStep", "VectorizedStep"]

Tensors = Mapping[str, Tensor]
Terms = dict[str, Tensor]


class StackedStep(ABC):
    """A client's ``training_step``, applied to many states.

    Args:
        client: The module, in the current phase; its own tensors play no part.
        environment: What the outer Trainer gives.
    """

    def __init__(self, client: FederatedClient, environment: FitEnvironment) -> None:
        self._client, self._environment = client, environment
        self._module = _TrainingStep(client)
        self._places = places_of(client)
        parameters, buffers = dict(client.named_parameters()), dict(client.named_buffers())
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        self.buffers = list(buffers)
        self._attributes: PythonState | None = python_state(client)
        self._used: frozenset[str] | None = None
        self._terms: frozenset[str] | None = None

    def begin(self) -> None:
        """Say that another step begins."""
        self._used = None

    @abstractmethod
    def run(self, leaves: Tensors, tensors: Tensors, rows: Tensor | None, batch: Batches, index: int) -> Terms:
        """Compute the losses of some clients, add to the gradients of ``leaves``, and change buffers.

        A parameter that the loss does not use gets no gradient, so that the optimizer leaves it alone.

        Args:
            leaves: Parameters that train, (A, ...).
            tensors: The whole stack, (K, ...) with K >= A.
            rows: The clients, (R,); ``None`` for the first A.
            batch: Inputs and labels of each.
            index: Number of the batch in its epoch.

        Returns:
            The loss and its terms, (R,) each, detached.

        Raises:
            CannotVectorizeError: The step uses a parameter for some clients only, which an optimizer of stacked
                parameters cannot leave alone for the others; or it returns a term in some steps only.
        """

    def _one(
        self, trained: Tensors, frozen: Tensors, buffers: Tensors, batch: Any, index: int
    ) -> tuple[Terms, dict[str, Tensor]]:
        """The loss terms of one client, and the buffers to which the step assigned new tensors."""
        state = {**frozen, **trained, **buffers}
        given = {f"client.{place}": state[name] for place, name in self._places.items()}
        with self._environment.forward_context():
            output, after = functional_call(self._module, dict(given), (batch, index), tie_weights=False)
        if output is None:
            raise CannotVectorizeError(f"{type(self._client).__name__}.training_step returned None to skip a batch")
        terms = output if isinstance(output, dict) else {"loss": output}
        means = {name: term if term.ndim == 0 else term.mean() for name, term in terms.items()}
        assigned = {name.removeprefix("client."): t for name, t in after.items() if t is not given.get(name)}
        return means, assigned

    def _compare(self, used: Iterable[str], terms: Iterable[str]) -> None:
        """Refuse what the training step does for some clients of a step, or in some steps, only."""
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
        """Name the line of the user's code that cannot be vectorised."""
        try:
            yield
        except (torch.OutOfMemoryError, CannotVectorizeError):
            raise
        except Exception as error:
            raise explain(error, self._client) from error
        if self._attributes is not None:  # after the first step
            before, self._attributes = self._attributes, None
            refuse_changes(self._client, before, "training_step")


class VectorizedStep(StackedStep):
    """All clients at once.

    The forward pass is vectorised, and the backward pass is ordinary autograd's over stacked leaves: where
    ``torch.func.grad`` gives zeros, and so weight decay, to a parameter that the loss does not use, autograd gives it
    no gradient, as in every other engine; and the backward pass runs outside of autocast.
    """

    def __init__(self, client: FederatedClient, environment: FitEnvironment) -> None:
        super().__init__(client, environment)
        self._statistics = norm_names(client, affine=False)

    def run(self, leaves: Tensors, tensors: Tensors, rows: Tensor | None, batch: Batches, index: int) -> Terms:
        """See :meth:`StackedStep.run`."""
        count = len(batch[0])

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[:count] if rows is None else tensor.index_select(0, rows)

        trained = {name: leaf if rows is None else chosen(leaf) for name, leaf in leaves.items()}
        frozen = {name: chosen(tensors[name]) for name in self.frozen}
        buffers = {name: chosen(tensors[name]) for name in self.buffers}
        versions = {name: buffer._version for name, buffer in buffers.items()}
        with self._explained():
            vectorized = vmap(self._one, in_dims=(0, 0, 0, 0, None), randomness="different")
            terms, assigned = vectorized(trained, frozen, buffers, batch, index)
        self._add_gradients(terms, leaves)
        # Only now are buffers written: the backward pass may need the old values.
        for name, buffer in buffers.items():
            if name in assigned:
                _write(tensors[name], rows, assigned[name])
            # The kernels of batch normalisation change statistics without telling autograd.
            elif rows is not None and (name in self._statistics or buffer._version != versions[name]):
                _write(tensors[name], rows, buffer)
        return {name: term.detach() for name, term in terms.items()}

    def _add_gradients(self, terms: Terms, leaves: Tensors) -> None:
        earlier = {name: leaf.grad for name, leaf in leaves.items()}  # of other clients in the same step
        for leaf in leaves.values():
            leaf.grad = None
        terms["loss"].sum().backward(inputs=list(leaves.values()))
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        self._compare(found, terms)
        for name, gradient in found.items():
            others = earlier[name]
            if others is not None:
                gradient.add_(others)


class LoopedStep(StackedStep):
    """One client after the other, on rows of the stack."""

    def __init__(self, client: FederatedClient, environment: FitEnvironment) -> None:
        super().__init__(client, environment)
        self._gradients: dict[str, Tensor] = {}  # kept from step to step, since fresh memory is slow

    def run(self, leaves: Tensors, tensors: Tensors, rows: Tensor | None, batch: Batches, index: int) -> Terms:
        """See :meth:`StackedStep.run`."""
        found = []
        for place, row in enumerate(range(len(batch[0])) if rows is None else rows.tolist()):
            own = {name: leaf.detach()[row].requires_grad_() for name, leaf in leaves.items()}
            frozen = {name: tensors[name][row] for name in self.frozen}
            buffers = {name: tensors[name][row] for name in self.buffers}
            with self._explained():
                terms, assigned = self._one(own, frozen, buffers, (batch[0][place], batch[1][place]), index)
            terms["loss"].backward(inputs=list(own.values()))
            self._compare((name for name, leaf in own.items() if leaf.grad is not None), terms)
            for name, leaf in leaves.items():
                gradient = own[name].grad
                if gradient is not None:
                    leaf.grad = self._zeros(name, leaf) if leaf.grad is None else leaf.grad
                    leaf.grad[row] = gradient
            for name, value in assigned.items():
                buffers[name].copy_(value.detach())
            found.append(terms)
        return {name: torch.stack([terms[name].detach() for terms in found]) for name in found[0]}

    def _zeros(self, name: str, leaf: Tensor) -> Tensor:
        if name not in self._gradients or len(self._gradients[name]) != len(leaf):
            self._gradients[name] = torch.empty_like(leaf, requires_grad=False)
        return self._gradients[name].zero_()


class _TrainingStep(nn.Module):
    """``training_step`` as a forward pass, with the buffers that it leaves."""

    def __init__(self, client: FederatedClient) -> None:
        super().__init__()
        self.client = client

    def forward(self, batch: Any, index: int) -> tuple[Any, dict[str, Tensor]]:
        output = self.client.training_step(batch, index)
        return output, {f"client.{name}": buffer for name, buffer in self.client.named_buffers()}


@torch.no_grad()
def _write(tensor: Tensor, rows: Tensor | None, value: Tensor) -> None:
    if rows is None:
        tensor[: len(value)] = value
    else:
        tensor.index_copy_(0, rows, value.to(tensor.dtype))
