"""What a module has beside its state_dict, which one client must not leave to the next."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

__all__ = ["Transient"]

_NOT_THE_AUTHORS = ("torch.", "torchvision.", "torchmetrics.")
_LIGHTNINGS = frozenset({*vars(L.LightningModule()), *vars(nn.Module()), "_compiled_call_impl"})
_DATA = (Dataset, DataLoader, L.LightningDataModule)


class Transient:
    """The Python attributes and non-persistent buffers of a module and its layers, as they were.

    Attributes are kept as copies, in which modules, parameters and buffers stand for themselves; data sets and what
    cannot be copied are left alone. Layers of torch and metric objects have none that a step changes, or are reset
    otherwise.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        known, kept = _tensors_and_layers(module), set(module.state_dict())
        self._attributes: dict[str, dict[str, Any]] = {}
        self._names: dict[str, set[str]] = {}
        self._buffers = {n: b.detach().clone() for n, b in module.named_buffers() if n not in kept}
        for name, layer in module.named_modules():
            if _is_the_authors(layer):
                self._attributes[name], self._names[name] = _copies(_own(layer), known), set(_own(layer))

    def restore(self, module: nn.Module) -> None:
        """Bring the module back to that."""
        known = _tensors_and_layers(module)
        for name, first in self._attributes.items():
            layer = module.get_submodule(name)
            for added in _own(layer).keys() - self._names[name]:
                delattr(layer, added)
            vars(layer).update(_copies(first, known))
        buffers = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._buffers.items():
                if name in buffers and buffers[name].shape == value.shape:
                    buffers[name].copy_(value)


def _is_the_authors(layer: nn.Module) -> bool:
    return not isinstance(layer, Metric) and not type(layer).__module__.startswith(_NOT_THE_AUTHORS)


def _own(layer: nn.Module) -> dict[str, Any]:
    return {
        name: value for name, value in vars(layer).items() if name not in _LIGHTNINGS and not isinstance(value, _DATA)
    }


def _tensors_and_layers(module: nn.Module) -> dict[int, Any]:
    found: list[nn.Module | Tensor] = [*module.modules(), *module.parameters(), *module.buffers()]
    return {id(one): one for one in found}


def _copies(values: dict[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    memo, found = dict(known), {}
    for name, value in values.items():
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:  # whatever an object's own copying may raise: a lock, a file, an open connection
            continue
    return found
