"""A CUDA graph without CUDA: records tensor operations and repeats them on the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class EmulatedGraph(TorchDispatchMode):
    """Behaves as a CUDA graph does towards its user.

    A capture does nothing: what the work changes is undone, and its outputs hold NaN before the first replay. A replay
    repeats the operations on the tensors of then, whatever they hold by now, and gives the outputs in the same memory.

    Args:
        device: Where the work would be done.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.warmed_up, self.replays = 0, 0
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # memory that the work itself allocates
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory, and copies

    def warm_up(self, work: Any) -> Any:
        self.warmed_up += 1
        return work()

    @torch.no_grad()
    def capture(self, work: Any) -> Any:
        with self, torch.enable_grad():
            outputs = work()
        for tensor, copy in self._before.values():
            tensor.copy_(copy)
        for _, args, kwargs, results in self._operations:
            for result in self._new(args, kwargs, results):
                if result.is_floating_point():
                    result.fill_(torch.nan)
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self._operations:
            again = function(*args, **kwargs)
            new = {id(result) for result in self._new(args, kwargs, results)}
            for result, value in zip(_tensors(results), _tensors(again), strict=True):
                if id(result) in new:
                    result.copy_(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if _memory(tensor) not in self._made and id(tensor) not in self._before:
                self._before[id(tensor)] = (tensor, tensor.clone())
        results = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, results))
        self._made |= {_memory(result) for result in self._new(args, kwargs, results)}
        return results

    @staticmethod
    def _new(args: Any, kwargs: Any, results: Any) -> list[Tensor]:
        """The results that have memory of their own: neither views nor what was changed in place."""
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        return [result for result in _tensors(results) if _memory(result) not in given]
