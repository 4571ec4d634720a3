"""State of an optimizer over stacked parameters, split by client and joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_lightning.state.equality import same

__all__ = ["History", "OptimizerState", "Rows", "first_state", "merge_equal", "own", "split"]

OptimizerState = dict[str, dict[str, Any]]
"""State by parameter name and by the optimizer's key; tensors of the parameter's shape have a row for each client."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class History:
    """Optimizer state of clients in addition to their rows: the number of steps, and the names of existing tensors.

    Clients of equal histories can be stepped together. They are equal as long as the clients step together; a client
    that skipped a step is behind in the number of steps, if the optimizer counts them, or has no momentum yet.

    Attributes:
        shared: State by parameter name and by the optimizer's key; ``None`` where there is a tensor of rows.
    """

    shared: OptimizerState

    def is_as(self, other: History) -> bool:
        """Whether the histories are equal."""
        return self is other or (
            self.shared.keys() == other.shared.keys()
            and all(
                content.keys() == other.shared[name].keys()
                and all(same(value, other.shared[name][key]) for key, value in content.items())
                for name, content in self.shared.items()
            )
        )


def merge_equal(histories: Sequence[History]) -> list[History]:
    """Histories with one object for all equal ones."""
    known: list[History] = []
    found: dict[int, History] = {}
    for history in histories:
        if id(history) not in found:
            same = next((other for other in known if other.is_as(history)), history)
            known += [same] if same is history else []
            found[id(history)] = same
    return [found[id(history)] for history in histories]


class Rows:
    """Rows of all clients in the tensors of an optimizer's state.

    Args:
        tensors: Tensors by parameter name and by the optimizer's key, (K, ...).
    """

    def __init__(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self._tensors = tensors

    def narrow(self, count: int) -> None:
        """Keep the first clients."""
        for content in self._tensors.values():
            content.update({key: tensor[:count] for key, tensor in content.items()})

    def joined(self, history: History, index: Tensor | None = None) -> OptimizerState:
        """State of some clients, with copies of their rows, or of all clients, without copies."""
        return {
            name: {
                key: self._select(name, key, index) if value is None else own(value) for key, value in content.items()
            }
            for name, content in history.shared.items()
        }

    def _select(self, name: str, key: str, index: Tensor | None) -> Tensor:
        rows = self._tensors[name][key]
        return rows if index is None else rows.index_select(0, index)

    def write(self, index: Tensor, rows: Rows, parameters: Tensors) -> None:
        """Write the rows of some clients; missing tensors are first made for all of ``parameters``."""
        for name, content in rows._tensors.items():
            held = self._tensors.setdefault(name, {})
            for key, value in content.items():
                if key not in held:
                    held[key] = torch.zeros_like(parameters[name], dtype=value.dtype)
                held[key].index_copy_(0, index, value)


def split(state: OptimizerState, parameters: Tensors) -> tuple[Rows, History]:
    """Split the state of all ``parameters`` (K, ...) into rows and history."""
    rows: dict[str, dict[str, Tensor]] = {}
    shared: OptimizerState = {}
    for name, content in state.items():
        kept = {key: value for key, value in content.items() if value is not None}
        if not kept:
            continue
        rows[name], shared[name] = {}, {}
        for key, value in kept.items():
            stacked = isinstance(value, Tensor) and value.shape == parameters[name].shape
            shared[name][key] = None if stacked else own(value)
            if stacked:
                rows[name][key] = value
    return Rows(rows), History(shared)


def first_state(optimizer: Optimizer, names: Sequence[Sequence[str]], count: int) -> OptimizerState:
    """Initial state of an optimizer such as Adagrad, for ``count`` clients."""
    state: OptimizerState = {}
    for group, held in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], held, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    value = value.expand(count, *value.shape).clone()
                state.setdefault(name, {})[key] = value
    return state


def own(value: Any) -> Any:
    """Copy of a tensor; any other value unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value
