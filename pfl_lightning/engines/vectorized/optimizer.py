"""One optimizer over the stacked parameters of many clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.schedules import Scheduler, advance, unpack_optimizers
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, check_elementwise
from pfl_lightning.engines.vectorized.stack import put_state
from pfl_lightning.messages import State

OptimizerState = dict[str, dict[str, Any]]
"""State by parameter name and by the optimizer's key; tensors of the parameter's shape have a row for each client."""

Settings = list[dict[str, Any]]
Tensors = Mapping[str, Tensor]


@dataclass(eq=False)
class _Group:
    """Clients that are stepped together, since their settings are equal.

    Attributes:
        rows: Rows of the clients in the stack, in their order.
        settings: Of each of the optimizer's groups of parameters.
        state: The optimizer's, of these clients.
    """

    rows: list[int]
    settings: Settings
    state: OptimizerState

    def is_of_rows(self, value: Any, parameter: Tensor) -> bool:
        """Whether a value of the state has a row for each client."""
        return isinstance(value, Tensor) and value.shape == (len(self.rows), *parameter.shape[1:])

    def narrow(self, count: int, parameters: Tensors) -> None:
        """Keep the clients in the first rows of the stack."""
        rows = [row for row in self.rows if row < count]
        for name, content in self.state.items():
            for key, value in content.items():
                if self.is_of_rows(value, parameters[name]):
                    content[key] = value[: len(rows)]
        self.rows = rows


class StackedOptimizer:
    """The optimizer that a client configures, over stacked parameters (K, ...), with a schedule for each client.

    The client configures its optimizer over its own parameters; then stacked ones replace them in its groups. So a
    choice by a parameter's name or shape stays valid. Each client takes a step as long as it has batches
    left; but learning rates may differ, as a client with fewer batches begins its next epoch earlier. Clients of equal
    settings are stepped together.

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
        # Without schedulers the settings never differ; with them every client needs its own.
        self._schedules = [_Schedule(*unpack_optimizers(client.configure_optimizers())) for _ in fits if schedulers]
        for schedule, (context, steps) in zip(self._schedules, fits, strict=False):
            for entry in schedule.schedulers:
                advance(entry.scheduler, client, phase, context, steps if entry.every_step else phase.epochs)
        state = _first_state(self._optimizer, self.names, len(fits))
        self._groups = [_Group(list(range(len(fits))), _settings_of(self._optimizer), state)]
        self._may_differ = True  # from how clients are grouped
        self._loaded: _Group | None = None  # all clients, whose state torch's optimizer holds

    def bind(self, parameters: Tensors) -> None:
        """Go on with these parameters (A, ...), which are changed in place: those of the first A clients."""
        self._tensors = {name: parameters[name].detach() for names in self.names for name in names}
        for group in self._groups:
            group.narrow(_count(parameters), parameters)
        self._groups = [group for group in self._groups if group.rows]
        self._may_differ, self._loaded = True, None

    @torch.no_grad()
    def step(self, gradients: Tensors) -> None:
        """One step of every client.

        Args:
            gradients: By name, (A, ...); a parameter without gradient stays as it is.
        """
        if self._may_differ and self._schedules:
            self._regroup()
        self._may_differ = False
        for group in self._groups:
            if len(group.rows) == _count(self._tensors):
                if self._loaded is not group:
                    self._load(group, self._tensors)
                    self._loaded = group
                self._step(group, self._tensors, gradients)
                continue
            index = torch.tensor(group.rows, device=next(iter(self._tensors.values())).device)
            chosen = {name: tensor.index_select(0, index) for name, tensor in self._tensors.items()}
            self._load(group, chosen)
            self._step(group, chosen, {name: gradient.index_select(0, index) for name, gradient in gradients.items()})
            for name, tensor in chosen.items():
                self._tensors[name].index_copy_(0, index, tensor)

    def after_step(self) -> None:
        """Advance the schedules that advance every step."""
        for schedule in self._schedules:
            self._may_differ |= schedule.advance(every_step=True)

    def after_epoch(self, client: int) -> None:
        """Advance the schedules of the client in this row that advance every epoch."""
        if self._schedules:
            self._may_differ |= self._schedules[client].advance(every_step=False)

    def _regroup(self) -> None:
        """Group clients by the settings that their schedules give them now."""
        self._loaded = None
        found: list[tuple[Settings, list[int]]] = []
        for row in range(_count(self._tensors)):
            settings = _settings_of(self._schedules[row].optimizer)
            rows = next((rows for other, rows in found if other == settings), None)
            if rows is None:
                found.append((settings, [row]))
            else:
                rows.append(row)
        self._groups = [self._group_of(rows, settings) for settings, rows in found]

    def _group_of(self, rows: list[int], settings: Settings) -> _Group:
        """A group of clients that were in others."""
        place = {row: (group, index) for group in self._groups for index, row in enumerate(group.rows)}
        first = place[rows[0]][0]
        if first.rows == rows:
            return _Group(rows, settings, first.state)
        state: OptimizerState = {}
        for name, content in first.state.items():
            state[name] = {}
            for key, value in content.items():
                of_rows = first.is_of_rows(value, self._tensors[name])
                own = [place[row][0].state[name][key][place[row][1]] for row in rows] if of_rows else []
                state[name][key] = torch.stack(own) if of_rows else _own(value)
        return _Group(rows, settings, state)

    def _load(self, group: _Group, tensors: Tensors) -> None:
        for held, names, settings in zip(self._optimizer.param_groups, self.names, group.settings, strict=True):
            held.update(settings, params=[tensors[name] for name in names])
        self._optimizer.state.clear()
        self._optimizer.state.update((tensors[name], content) for name, content in group.state.items())

    def _step(self, group: _Group, tensors: Tensors, gradients: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.grad = gradients.get(name)
        self._optimizer.step()
        held = self._optimizer.state
        group.state = {name: held[tensor] for name, tensor in tensors.items() if tensor in held}


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
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


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


def _first_state(optimizer: Optimizer, names: Sequence[Sequence[str]], count: int) -> OptimizerState:
    """Initial state of an optimizer such as Adagrad, for ``count`` clients."""
    state: OptimizerState = {}
    for group, held in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], held, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    value = value.expand(count, *value.shape).clone()
                state.setdefault(name, {})[key] = value
    return state


def _own(value: Any) -> Any:
    """Copy of a tensor; any other value unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value
