"""Layers that a module makes in ``setup`` or ``configure_model``, for the module that was given."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.drop_in.client.copies import held_tensors
from pfl_lightning.older_package import written_class

__all__ = ["take_layers"]


def take_layers(given: nn.Module, model: nn.Module) -> None:
    """Give a module copies of the layers, parameters and buffers that another one has and it lacks.

    What both have stays, with its ties and references: a copied layer that holds one of the model holds the module's.
    Values are to be loaded afterwards.

    Args:
        given: The module.
        model: A copy of it that has made its layers, and is used up.
    """
    if _form(given) == _form(model):
        return
    _Taking(given, model).take(given, model)


class _Taking:
    def __init__(self, given: nn.Module, model: nn.Module) -> None:
        self._memo: dict[int, Any] = held_tensors(model) | {id(model): given}
        own = dict(given.named_modules())
        self._memo |= {id(o): own[n] for n, o in model.named_modules() if n in own and _is_as(own[n], o)}
        tensors = dict(_tensors(given))
        both = [(tensors[n], t) for n, t in _tensors(model) if n in tensors and tensors[n].shape == t.shape]
        self._memo |= {id(other): mine for mine, other in both}
        self._device = next((mine.device for mine, _ in both), torch.device("cpu"))
        floating = [(mine.dtype, other.dtype) for mine, other in both if mine.is_floating_point()]
        # Of a Trainer(precision="bf16-true"), which has converted the model and not the module.
        self._dtype = next((mine for mine, other in floating if mine != other), None)

    def take(self, own: nn.Module, other: nn.Module) -> None:
        """Give a layer what it lacks."""
        for name, parameter in other._parameters.items():
            if _shape(own._parameters.get(name)) != _shape(parameter):
                setattr(own, name, self._copied(parameter))
        for name, buffer in other._buffers.items():
            if name not in own._buffers or _shape(own._buffers[name]) != _shape(buffer):
                vars(own).pop(name, None)
                own.register_buffer(name, self._copied(buffer), name not in other._non_persistent_buffers_set)
        for name, layer in other.named_children():
            mine = own._modules.get(name)
            if mine is None or written_class(mine) is not written_class(layer):
                setattr(own, name, self._copied(layer))
            elif _form(mine) != _form(layer):
                self.take(mine, layer)

    def _copied(self, part: Any) -> Any:
        with suppress(Exception):  # whatever an object's own copying may raise: then it is the model's
            part = copy.deepcopy(part, self._memo)
        return part if part is None else self._as_given(part)

    def _as_given(self, part: Any) -> Any:
        if isinstance(part, nn.Module):
            return part.to(self._device) if self._dtype is None else part.to(self._device, self._dtype)
        dtype = self._dtype if part.is_floating_point() else None
        part.data = part.data.to(self._device, dtype or part.dtype)
        return part


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _is_as(mine: nn.Module, other: nn.Module) -> bool:
    return written_class(mine) is written_class(other) and _form(mine) == _form(other)


def _form(module: nn.Module) -> dict[str, Any]:
    """Shapes of the tensors, and classes of the layers, some of which have none."""
    layers = {f"{name}.": written_class(layer) for name, layer in module.named_modules() if name}
    return layers | {name: tensor.shape for name, tensor in _tensors(module)}
