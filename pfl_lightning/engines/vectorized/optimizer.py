"""One optimizer over the stacked parameters of many clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
from pfl_lightning.state.equality import same

__all__ = ["StackedOptimizer", "check_same_settings"]

OptimizerState = dict[str, dict[str, Any]]
"""State by parameter name and by the optimizer's key; tensors of the parameter's shape have a row for each client."""

Settings = list[dict[str, Any]]
Tensors = Mapping[str, Tensor]


@dataclass(eq=False)
class _Group:
    """Clients that are stepped together: of equal settings, and of equal state but for their rows.

    A client that skipped a step is behind in the number of steps, if the optimizer counts them, or has no momentum yet.

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

    def shared(self, parameters: Tensors) -> OptimizerState:
        """State without rows: numbers of steps, and the names of the tensors that there are."""
        found = {
            name: {k: None if self.is_of_rows(v, parameters[name]) else v for k, v in content.items() if v is not None}
            for name, content in self.state.items()
        }
        return {name: content for name, content in found.items() if content}


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
    def step(self, gradients: Tensors, skipped: Collection[int] = ()) -> None:
        """One step of every client.

        Args:
            gradients: By name, (A, ...); a parameter without gradient stays as it is.
            skipped: The clients that take no step, by row: they stay as they are.
        """
        if self._may_differ or skipped:
            self._may_differ = self._regroup(skipped)
        for group in self._groups:
            if group.rows[0] in skipped:  # and so are its others
                continue
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

    def _regroup(self, skipped: Collection[int]) -> bool:
        """Group clients that can be stepped together now, those that skip a step apart; whether that may end soon."""
        self._loaded, same_settings = None, _settings_of(self._optimizer)
        kinds: list[OptimizerState] = []
        found: list[tuple[tuple[Any, ...], _Group, list[tuple[int, _Group]]]] = []
        for group in self._groups:
            shared = group.shared(self._tensors)
            kind = next((number for number, other in enumerate(kinds) if same(shared, other)), len(kinds))
            kinds += [shared] if kind == len(kinds) else []
            for row in group.rows:
                settings = _settings_of(self._schedules[row].optimizer) if self._schedules else same_settings
                key = (kind, row in skipped, settings)
                members = next((members for other, _, members in found if other == key), None)
                if members is None:
                    found.append((key, group, [(row, group)]))
                else:
                    members.append((row, group))
        self._groups = [self._joined(group, settings, sorted(m)) for (_, _, settings), group, m in found]
        return bool(skipped) or len(kinds) > 1

    def _joined(self, like: _Group, settings: Settings, members: Sequence[tuple[int, _Group]]) -> _Group:
        """A group of clients of several ones that are alike but for their rows."""
        rows = [row for row, _ in members]
        if like.rows == rows:
            return _Group(rows, settings, like.state)
        state: OptimizerState = {}
        for name, content in like.shared(self._tensors).items():
            state[name] = {}
            for key, value in content.items():
                own = [group.state[name][key][group.rows.index(row)] for row, group in members if value is None]
                state[name][key] = _own(value) if value is not None else torch.stack(own)
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
