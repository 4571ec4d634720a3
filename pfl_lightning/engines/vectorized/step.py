"""Forward and backward pass of one step of many clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.vectorized.limits import (
    CannotVectorizeError,
    PaddingError,
    PythonState,
    explained,
    python_state,
    refuse_changes,
)
from pfl_lightning.engines.vectorized.precision import SinglePrecision
from pfl_lightning.engines.vectorized.stack import places_of
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.seeding import GeneratorStates
from pfl_lightning.state.tensors import norm_names

FEW = 2
"""Clients, of more, that are computed one after the other: for so few ``vmap`` takes more launches."""
TOLERANCE = 0.02
"""Relative difference of the loss of a padded batch, in half precision, too, above which it is another one."""

Tensors = Mapping[str, Tensor]
Terms = dict[str, Tensor]
Batches = tuple[Tensor, ...]
"""Inputs (R, B, ...), labels (R, B) and, where samples have values, these."""


@dataclass(frozen=True)
class StepInputs:
    """Input tensors of a step of some clients, each (R, ...).

    Attributes:
        trained: Parameters that train.
        others: Frozen parameters, and buffers, which the step may change in place.
        batch: Inputs (R, B, ...), labels (R, B) and, where samples have values, these.
        in_place: Whether parameters and buffers are the stack's memory and not copies.
        mask: False for samples by which batches were filled up, (R, B); ``None`` where none was.
        apart: Whether the clients are computed one after the other, as few of many are: that takes fewer launches.
    """

    trained: Tensors
    others: Tensors
    batch: Batches
    in_place: bool = True
    mask: Tensor | None = None
    apart: bool = False


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step.

    Attributes:
        terms: The loss and its terms, (R,) each, detached.
        gradients: Gradients of the parameters that the loss uses, in their layout.
        assigned: Buffers to which the step assigned new tensors.
    """

    terms: Terms
    gradients: dict[str, Tensor]
    assigned: dict[str, Tensor]


Computation = Callable[[StepInputs, int], StepOutputs]
"""Losses and gradients of the batch with this number in its epoch; buffers may change in place."""


Measure = Callable[[Computation, StepInputs, int], None]


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
        self._places, kind = places_of(client), environment.device.type
        self._single = nullcontext() if kind == "cpu" else SinglePrecision(kind)  # a CPU's autocast has other rules

    @torch.enable_grad()
    def __call__(self, inputs: StepInputs, index: int) -> StepOutputs:
        """Losses and gradients of the batch with this number in its epoch; buffers may change in place."""
        if inputs.apart:
            rows = range(len(inputs.batch[0]))
            found = [self._backward(self._one, *parts_of(inputs, row), index) for row in rows]
            return _stacked(found, type(self._client).__name__)
        one = self._one if inputs.mask is None else self._masked
        return self._backward(vmap(one, in_dims=(0, 0, 0, None), randomness="different"), *parts_of(inputs), index)

    def _backward(self, step: Callable[..., Any], trained: Tensors, *given: Any) -> StepOutputs:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in trained.items()}
        terms, assigned = step(leaves, *given)
        terms["loss"].sum().backward(inputs=list(leaves.values()))
        return StepOutputs(
            {name: term.detach() for name, term in terms.items()},
            {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
            {name: tensor.detach() for name, tensor in assigned.items()},
        )

    def _masked(self, trained: Tensors, others: Tensors, batch: Any, index: int) -> tuple[Terms, dict[str, Tensor]]:
        """Loss terms of one client: means of those of single samples over the ones that the mask has."""
        *parts, mask = batch

        def of_sample(*sample: Tensor) -> Terms:
            terms, assigned = self._one(trained, others, tuple(part.unsqueeze(0) for part in sample), index)
            if assigned:
                raise PaddingError(f"a step assigns the buffer {next(iter(assigned))!r}")
            return terms

        terms = vmap(of_sample, randomness="different")(*parts)
        count = mask.sum()
        return {name: torch.where(mask, at_least_single(t), 0).sum() / count for name, t in terms.items()}, {}

    def _one(self, trained: Tensors, others: Tensors, batch: Any, index: int) -> tuple[Terms, dict[str, Tensor]]:
        """Loss terms of one client, and the buffers to which the step assigned new tensors."""
        state = {**trained, **others}
        given = {f"client.{place}": state[name] for place, name in self._places.items()}
        with self._environment.precision.forward_context(), self._single:
            output, after = functional_call(self._module, dict(given), (batch, index), tie_weights=False)
        assigned = {name.removeprefix("client."): t for name, t in after.items() if t is not given.get(name)}
        return mean_terms(self._client, output), assigned


def parts_of(inputs: StepInputs, rows: int | slice = slice(None)) -> tuple[Any, ...]:
    """Parameters, other tensors, and the batch with its mask, of all clients or of some; views."""
    batch = inputs.batch if inputs.mask is None else (*inputs.batch, inputs.mask)
    states = ({name: tensor[rows] for name, tensor in part.items()} for part in (inputs.trained, inputs.others))
    return (*states, tuple(part[rows] for part in batch))


def _stacked(found: Sequence[StepOutputs], name: str) -> StepOutputs:
    """Outputs of several clients, from those of each."""
    for some in sorted(found[0].gradients.keys() ^ found[-1].gradients.keys()):
        raise CannotVectorizeError(f"a step of {name} uses the parameter {some!r} for some clients only")
    parts = [[vars(own)[part] for own in found] for part in ("terms", "gradients", "assigned")]
    return StepOutputs(*({key: torch.stack([own[key] for own in part]) for key in part[0]} for part in parts))


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


class StackedStep:
    """Step of many clients at once: a client's ``training_step``, applied to many states.

    Args:
        client: The module, in the current phase; its own tensors are not used.
        computation: Computes the step.
        measure: Is shown the first step before it is taken, and may refuse it.

    Attributes:
        gradients: Of the step so far, by name, (A, ...), in the layout of the parameters, as fused optimizers need. A
            parameter that the loss does not use has none, so that the optimizer leaves it alone.
    """

    def __init__(self, client: FederatedClient, computation: Computation, measure: Measure | None = None) -> None:
        self._client, self._compute, self._measure = client, computation, measure
        self._statistics = norm_names(client, affine=False)
        named = (*client.named_parameters(), *client.named_buffers())
        self._trained = [name for name, tensor in named if tensor.requires_grad]
        self._others = [name for name, tensor in named if not tensor.requires_grad]
        self.gradients: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._attributes: PythonState | None = python_state(client)
        self._used: frozenset[str] | None = None
        self._terms: frozenset[str] | None = None
        self._whole, self._padded = 0, False  # number of clients at first; whether a batch was padded so far

    def bind(self, tensors: Tensors, count: int) -> None:
        """Continue with the first ``count`` clients (A) of the whole stack, which changes in place."""
        self._whole = max(self._whole, count)
        self._tensors = {name: tensors[name][:count] for name in (*self._trained, *self._others)}

    def begin(self) -> None:
        """Begin another step."""
        self._used, self.gradients = None, {}

    def run(self, rows: Tensor | None, batch: Batches, index: int, mask: Tensor | None = None) -> Terms:
        """Compute the losses of some clients, note their gradients, and change buffers.

        Args:
            rows: The clients, (R,); ``None`` for all that are bound.
            batch: Inputs and labels of each, and the values attached to its samples, if any are.
            index: Number of the batch in its epoch.
            mask: False for samples by which batches were filled up, (R, B).

        Returns:
            The loss and its terms, (R,) each, detached.

        Raises:
            PaddingError: The loss of a padded batch is not that of the batch.
            CannotVectorizeError: The step uses a parameter for some clients only, which an optimizer of stacked
                parameters cannot leave alone for the others; or it returns a term in some steps only.
        """
        tensors = self._tensors
        if rows is not None:
            tensors = {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}
        trained, others = ({name: tensors[name] for name in names} for names in (self._trained, self._others))
        versions = {name: tensor._version for name, tensor in others.items()}
        apart = mask is None and len(batch[0]) <= FEW < self._whole
        inputs = StepInputs(trained, others, batch, in_place=rows is None, mask=mask, apart=apart)
        with explained(self._client):
            if self._measure is not None and mask is None:
                measure, self._measure = self._measure, None
                measure(self._compute, inputs, index)
            if mask is not None and not self._padded:
                self._check_padding(inputs, mask, index)
            found = self._compute(inputs, index)
        if self._attributes is not None:  # after the first step
            before, self._attributes = self._attributes, None
            refuse_changes(self._client, before, "training_step")
        self._compare(found.gradients, found.terms)
        for name, gradient in found.gradients.items():
            if rows is None:
                self.gradients[name] = gradient
            else:
                self.gradients.setdefault(name, torch.empty_like(self._tensors[name])).index_copy_(0, rows, gradient)
        # Only now are buffers written: the backward pass may need the old values.
        for name, buffer in others.items():
            if name in found.assigned:
                _write(self._tensors[name], rows, found.assigned[name])
            # The kernels of batch normalization change statistics without telling autograd.
            elif rows is not None and (name in self._statistics or buffer._version != versions[name]):
                _write(self._tensors[name], rows, buffer)
        return found.terms

    def _check_padding(self, inputs: StepInputs, mask: Tensor, index: int) -> None:
        """Compare the loss of one client's padded batch with that of the batch: a declaration may be wrong.

        Raises:
            PaddingError: They differ, or the step draws random numbers, so that they cannot be compared.
        """
        self._padded, row = True, int(mask.sum(1).argmin())
        size, device, found = int(mask[row].sum()), mask.device, []
        before = GeneratorStates.read(device)
        for length in (size, None):
            trained, others, (*batch, own) = parts_of(inputs, slice(row, row + 1))
            others = {name: tensor.clone() for name, tensor in others.items()}
            parts = tuple(part[:, :length] for part in batch)
            given = StepInputs(trained, others, parts, False, own if length is None else None, length is not None)
            try:
                found.append({name: float(term) for name, term in self._compute(given, index).terms.items()})
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if length is not None:
                    raise
                raise PaddingError(f"its step cannot be taken sample by sample ({error})") from error
        if not GeneratorStates.read(device).is_as(before):
            raise PaddingError("its step draws random numbers", silent=True)
        for name, value in found[0].items():
            if not math.isclose(value, found[1].get(name, math.nan), rel_tol=TOLERANCE, abs_tol=TOLERANCE / 100):
                raise PaddingError(f"its {name} is {value:.6g}, and {found[1].get(name)} as a mean over samples")

    def _compare(self, used: Iterable[str], terms: Iterable[str]) -> None:
        """Refuse parameters used for some clients only, and loss terms returned in some steps only."""
        used, terms, name = frozenset(used), frozenset(terms), type(self._client).__name__
        self._used = used if self._used is None else self._used
        self._terms = terms if self._terms is None else self._terms
        for some in sorted(used ^ self._used):
            raise CannotVectorizeError(f"a step of {name} uses the parameter {some!r} for some clients only")
        for some in sorted(terms ^ self._terms):
            raise CannotVectorizeError(f"{name}.training_step returns the term {some!r} in some steps only")


@torch.no_grad()
def _write(tensor: Tensor, rows: Tensor | None, value: Tensor) -> None:
    if rows is None:
        tensor.copy_(value)
    else:
        tensor.index_copy_(0, rows, value.to(tensor.dtype))
