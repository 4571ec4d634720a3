"""One optimizer over the stacked parameters of many clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.schedules import Scheduler, advance, unpack_optimizers
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, check_elementwise
from pfl_lightning.engines.vectorized.optimizer_state import (
    History,
    OptimizerState,
    Rows,
    first_state,
    merge_equal,
    own,
    split,
)
from pfl_lightning.engines.vectorized.stack import put_state
from pfl_lightning.messages import State

__all__ = ["StackedOptimizer", "check_same_settings"]

Settings = list[dict[str, Any]]
Tensors = Mapping[str, Tensor]


class StackedOptimizer:
    """The optimizer that a client configures, over stacked parameters (K, ...), with a schedule for each client.

    The client configures its optimizer over its own parameters; then stacked ones replace them in its groups. So a
    choice by a parameter's name or shape stays valid. Each client takes a step as long as it has batches
    left; but learning rates may differ, as a client with fewer batches begins its next epoch earlier, and so may the
    numbers of steps, where some are skipped. Clients that differ in neither are stepped together.

    Args:
        client: The module, in the current phase.
        phase: The phase.
        fits: Context and number of steps of each of the K clients.

    Raises:
        ConfigurationError: The optimizer is not elementwise, or a schedule cannot go on from earlier fits.
        CannotVectorizeError: It holds a parameter that is not the client's.
    """

    def __init__(self, client: FederatedClient, phase: Phase, fits: Sequence[tuple[FitContext, int]]) -> None:
        self._optimizer, schedulers = unpack_optimizers(client.configure_optimizers())
        check_elementwise(self._optimizer)
        self.names = _names_of(self._optimizer, client)
        self._tensors: dict[str, Tensor] = {}
        self._first_state: OptimizerState | None = first_state(self._optimizer, self.names, len(fits))
        # Without schedulers the settings never differ; with them every client needs its own.
        self._schedules = [_Schedule(*unpack_optimizers(client.configure_optimizers())) for _ in fits if schedulers]
        for schedule, (context, steps) in zip(self._schedules, fits, strict=False):
            for entry in schedule.schedulers:
                advance(entry.scheduler, client, phase, context, steps if entry.every_step else phase.epochs)
        self._groups: list[tuple[Settings, list[int]]] = []  # clients stepped together; empty: to be found again
        # While clients are stepped apart, their state; otherwise torch's optimizer holds that of all.
        self._rows: Rows | None = None
        self._histories: list[History] = []

    def bind(self, parameters: Tensors) -> None:
        """Go on with these parameters (A, ...), which are changed in place: those of the first A clients."""
        state, self._first_state = self._first_state or self._state(), None
        count = _count(parameters)
        for name, content in state.items():
            trailing = parameters[name].shape[1:]
            for key, value in content.items():
                if isinstance(value, Tensor) and value.ndim > 0 and value.shape[1:] == trailing:
                    content[key] = value[:count]
        if self._rows is not None:
            self._rows.narrow(count)
            self._histories = self._histories[:count]
        self._put({name: parameters[name].detach() for names in self.names for name in names}, state)
        self._groups = []

    @torch.no_grad()
    def step(self, gradients: Tensors, skipped: Collection[int] = ()) -> None:
        """One step of every client.

        Args:
            gradients: By name, (A, ...); a parameter without gradient stays as it is.
            skipped: The clients that take no step, by row: they stay as they are.
        """
        if not self._groups:
            self._groups = self._find_groups()
            if len(self._groups) == 1:
                self._gather()
        if len(self._groups) == 1 and not skipped:
            self._step(gradients)
        else:
            self._step_apart(gradients, skipped)

    def after_step(self) -> None:
        """Advance the schedules that advance every step."""
        for schedule in self._schedules:
            if schedule.advance(every_step=True):
                self._groups = []

    def after_epoch(self, client: int) -> None:
        """Advance the schedules of the client in this row that advance every epoch."""
        if self._schedules and self._schedules[client].advance(every_step=False):
            self._groups = []

    def _find_groups(self) -> list[tuple[Settings, list[int]]]:
        """Groups of clients with equal settings and histories."""
        count = _count(self._tensors)
        same = _settings_of(self._optimizer)
        if not self._schedules and self._rows is None:
            return [(same, list(range(count)))]
        groups: list[tuple[Settings, list[int]]] = []
        for row in range(count):
            settings = _settings_of(self._schedules[row].optimizer) if self._schedules else same
            alike = (rows for others, rows in groups if others == settings and self._equal_histories(row, rows[0]))
            rows = next(alike, None)
            if rows is None:
                groups.append((settings, [row]))
            else:
                rows.append(row)
        return groups

    def _equal_histories(self, one: int, other: int) -> bool:
        return self._rows is None or self._histories[one] is self._histories[other]

    def _step(self, gradients: Tensors) -> None:
        for name, tensor in self._tensors.items():
            tensor.grad = gradients.get(name)
        self._optimizer.step()

    def _step_apart(self, gradients: Tensors, skipped: Collection[int]) -> None:
        """Step the clients of each group as an optimizer of their own would."""
        tensors = self._tensors
        if self._rows is None:
            self._rows, history = split(self._state(), tensors)
            self._histories = [history] * _count(tensors)
        regroup = bool(skipped) or any(history is not self._histories[0] for history in self._histories)
        for settings, rows in self._groups:
            stepped = [row for row in rows if row not in skipped]
            if not stepped:
                continue
            index = torch.tensor(stepped, device=next(iter(tensors.values())).device)
            chosen = {name: tensor.index_select(0, index) for name, tensor in tensors.items()}
            self._put(chosen, self._rows.joined(self._histories[stepped[0]], index))
            self._apply(settings)
            self._step({name: gradient.index_select(0, index) for name, gradient in gradients.items()})
            for name, tensor in chosen.items():
                tensors[name].index_copy_(0, index, tensor)
            changed, history = split(self._state(), chosen)
            self._rows.write(index, changed, tensors)
            for row in stepped:
                self._histories[row] = history
        self._put(tensors, {})
        self._histories = merge_equal(self._histories)
        if regroup:
            self._groups = []

    def _gather(self) -> None:
        """Return the state of all clients to torch's optimizer, once their histories are equal."""
        if self._rows is not None:
            self._put(self._tensors, self._rows.joined(self._histories[0]))
            self._rows = None
        self._apply(self._groups[0][0])

    def _apply(self, settings: Settings) -> None:
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)

    def _put(self, tensors: dict[str, Tensor], state: OptimizerState) -> None:
        self._tensors = tensors
        for group, names in zip(self._optimizer.param_groups, self.names, strict=True):
            group["params"] = [tensors[name] for name in names]
        self._optimizer.state.clear()
        for name, content in state.items():
            self._optimizer.state[tensors[name]] = content

    def _state(self) -> OptimizerState:
        held = self._optimizer.state
        return {name: held[tensor] for name, tensor in self._tensors.items() if tensor in held}


class _Schedule:
    """One client's schedulers, and the optimizer whose settings they change; it never steps itself."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Scheduler]) -> None:
        self.optimizer = optimizer
        self.schedulers = schedulers
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns that it never stepped

    def advance(self, *, every_step: bool) -> bool:
        due = [entry for entry in self.schedulers if entry.every_step == every_step]
        for entry in due:
            entry.scheduler.step()
        return bool(due)


def _count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values())))


def check_same_settings(client: FederatedClient, states: Iterable[State]) -> None:
    """Refuse clients whose own ``configure_optimizers`` gives them different settings, from a buffer of theirs.

    Args:
        client: The module, in the current phase; afterwards it holds the first state.
        states: The clients' full states.

    Raises:
        CannotVectorizeError: They differ.
    """
    if type(client).configure_optimizers is FederatedClient.configure_optimizers:
        return
    first: tuple[State, Settings, list[str]] | None = None
    for state in states:
        put_state(client, state)
        optimizer, schedulers = unpack_optimizers(client.configure_optimizers())
        found = _settings_of(optimizer), [_facts_of(entry) for entry in schedulers]
        first = first or (state, *found)
        if found != first[1:]:
            raise CannotVectorizeError(
                f"{type(client).__name__}.configure_optimizers gives its clients different settings"
            )
    if first is not None:
        put_state(client, first[0])


def _facts_of(entry: Scheduler) -> str:
    """The plain values of a schedule, to be compared."""
    plain = (bool, int, float, str, list, tuple)
    return repr({name: value for name, value in entry.scheduler.state_dict().items() if isinstance(value, plain)})


def _settings_of(optimizer: Optimizer) -> Settings:
    return [{key: own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _names_of(optimizer: Optimizer, client: FederatedClient) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in client.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CannotVectorizeError(
                    f"the optimizer of {type(client).__name__} holds a tensor of shape {tuple(parameter.shape)} "
                    "that is no parameter of the client"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
