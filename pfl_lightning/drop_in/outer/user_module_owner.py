"""The module that a federation was made of: its copies, what hooks of a run give it, and the global model in it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

import lightning as L
import torch
from torch import Tensor, nn

from pfl_lightning.datamodules.adapters.loading.stages import made_again
from pfl_lightning.drop_in.client.copies import Factory, copied, held_tensors
from pfl_lightning.drop_in.client.frozen import frozen_parameters
from pfl_lightning.drop_in.client.plain_state import load_plain_state, plain_state
from pfl_lightning.drop_in.outer.fingerprint import Changes, ModuleFingerprint, data_sets
from pfl_lightning.drop_in.outer.set_up import OF_LOADERS
from pfl_lightning.older_package import written_class
from pfl_lightning.state.closures import bind_functions

__all__ = ["UserModuleOwner", "take_layers"]

_log = logging.getLogger(__name__)


class UserModuleOwner:
    """Owns the author's module, which holds the global model in the end, and a copy of it as it was.

    A Trainer calls ``prepare_data`` and the hooks that make loaders on the author's module alone. What these set is
    handed to the copy that clients train, and what ``setup`` sets on the copy is handed back. Clients have the layers
    and weights of the first copy.

    Args:
        module: The author's module.
        first: A copy of it.
        factory: Makes the module once more; ``None`` copies it.
        frozen: Which of the frozen parameters never change.

    Attributes:
        places: Where a copy has got its attributes from, by their names.
        changes: What the author changes in the module between calls of a Trainer.
    """

    def __init__(
        self,
        module: L.LightningModule,
        first: L.LightningModule,
        factory: Factory | None = None,
        frozen: Sequence[str] | None = None,
    ) -> None:
        self.module, self.first = module, first
        self._factory, self._frozen = factory, frozen
        self.changes, self.places = Changes(), dict[str, str]()
        self._start: ModuleFingerprint | None = ModuleFingerprint(module)
        self._buffers = {name: ref(buffer) for name, buffer in module.named_buffers()}
        self._prepared: dict[str, Any] = {}  # as it was before a setup could change it
        self._set_up, self._handed_back = set[str](), set[str]()
        self._data: dict[str, Any] = {}  # of which clients have parts

    def __getstate__(self) -> dict[str, Any]:
        """State without what is known of the module's objects, which are others in another process."""
        nothing: dict[str, Any] = {"_start": None, "_buffers": {}, "_prepared": {}, "_data": {}, "_handed_back": set()}
        return {**vars(self), **nothing, "places": {}}

    # ------------------------------------------------------------------ copies

    def first_once_more(self) -> L.LightningModule:
        """A copy of the module as it was when it was given."""
        return self.copied(self.first)

    def copied(self, module: L.LightningModule) -> L.LightningModule:
        """A copy of the module, or of one that was made of it."""
        return copied(module, self._factory, self.shared_names())

    def shared_names(self) -> frozenset[str]:
        """Names of the parameters whose memory copies of the first module share."""
        return frozen_parameters(self.first, self._frozen)

    def take(self, model: L.LightningModule) -> None:
        """Let the author's module hold a model, with layers and attributes that ``setup`` has set.

        Args:
            model: The model, of a copy of the module; it is used up.
        """
        take_layers(self.module, model)
        self._hand_back(model)
        load_plain_state(self.module, plain_state(model))
        self.changes.end(self.module)

    # ------------------------------------------------------------------ attributes

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, the module's ``prepare_data`` is called."""
        before = ModuleFingerprint(self.module)
        yield
        for name in sorted(before.attributes_changed_in(self.module)):
            self._prepared[name] = value = vars(self.module)[name]
            with suppress(Exception):  # what cannot be copied is named when it is handed over
                self._prepared[name] = copy.deepcopy(value, _memo(self.module, self.module))

    @contextmanager
    def handed_to(self, other: L.LightningModule) -> Iterator[None]:
        """Hand over what was prepared; inside, a copy is set up; afterwards, hand over the rest.

        What the copy has set itself stays.

        Args:
            other: The copy.
        """
        if self._start is None:
            yield
            return
        self._hand_over(other, self._prepared)
        self.places = dict.fromkeys(self._prepared, "prepare_data")
        buffers = dict(other.named_buffers())
        self._set_up = set()
        with self.setting_up(other):
            yield
        self.places |= dict.fromkeys(self._set_up, "setup or configure_model")
        # Not earlier: a setup that finds what another setup has made may believe that its layers are there, too.
        self._data = data_sets(self.module)
        names = self._start.attributes_changed_in(self.module) - self._set_up
        names |= {name for name in self._data if vars(other).get(name) is None}
        self._put_data_back(other)
        self._hand_over(other, {name: vars(self.module)[name] for name in sorted(names)})
        self.places = dict.fromkeys(names, OF_LOADERS) | self.places
        own = dict(other.named_buffers())
        for name, buffer in self.module.named_buffers():
            known = self._buffers.get(name)
            if (known is None or known() is not buffer) and own.get(name) is buffers.get(name):
                _set_buffer(self.module, other, name)

    @contextmanager
    def setting_up(self, other: L.LightningModule) -> Iterator[None]:
        """Inside, the ``setup`` of a copy is called; what it sets is noted.

        Args:
            other: The copy.
        """
        before = ModuleFingerprint(other)
        yield
        self._set_up |= before.attributes_changed_in(other)
        self._put_data_back(other)

    def _put_data_back(self, other: L.LightningModule) -> None:
        """Where a further ``setup`` has made data once more: clients have parts of the first."""
        vars(other).update({name: self._data[name] for name in made_again(self._data, vars(other))})

    def _hand_back(self, model: L.LightningModule) -> None:
        """Give the module what ``setup`` has set on a copy of it, as it would have in a plain run."""
        module, memo, shared = self.module, _memo(model, self.module), data_sets(model)
        # What a setup of its own has set, which was called for its loaders, stays.
        own = set() if self._start is None else self._start.attributes_changed_in(module) - self._handed_back
        self._handed_back |= self._set_up - own
        for name in (self._set_up - own) & vars(model).keys():
            vars(module)[name] = vars(model)[name]
            with suppress(Exception):  # what cannot be copied is the model's
                vars(module)[name] = shared[name] if name in shared else copy.deepcopy(vars(model)[name], memo)
        if self._set_up:
            bind_functions(model, module)

    def _hand_over(self, other: L.LightningModule, values: Mapping[str, Any]) -> None:
        memo = _memo(self.module, other)
        for name, value in values.items():
            try:
                vars(other)[name] = copy.deepcopy(value, memo)
            except Exception as error:  # whatever an object's own copying may raise: a lock, an open file
                _log.warning(
                    "%s.%s, which the module made in prepare_data or with its loaders, cannot be copied (%s): clients "
                    "do not have it; make it in setup",
                    type(self.module).__name__,
                    name,
                    error,
                )
        if values:  # functions among them hold layers
            bind_functions(self.module, other)


def take_layers(given: nn.Module, model: nn.Module) -> None:
    """Give a module copies of the layers, parameters and buffers that another one has made in its ``setup``.

    What both have stays, with its ties and references: a copied layer that holds one of the model holds the module's.
    Values are to be loaded afterwards.

    Args:
        given: The module.
        model: A copy of it that has made its layers, and is used up.
    """
    if _form(given) == _form(model):
        return
    memo = held_tensors(model) | _memo(model, given, lambda one, other: _form(one) == _form(other))
    device = next((p.device for p in given.parameters()), torch.device("cpu"))

    def own(part: Any) -> Any:
        with suppress(Exception):  # whatever an object's own copying may raise: then it is the model's
            part = copy.deepcopy(part, memo)
        if isinstance(part, Tensor):
            part.data = part.data.to(device)
        return part.to(device) if isinstance(part, nn.Module) else part

    def take(mine: nn.Module, other: nn.Module) -> None:
        for name, parameter in other._parameters.items():
            if _form(mine._parameters.get(name)) != _form(parameter):
                setattr(mine, name, own(parameter))
        for name, buffer in other._buffers.items():
            if name not in mine._buffers or _form(mine._buffers[name]) != _form(buffer):
                vars(mine).pop(name, None)
                mine.register_buffer(name, own(buffer), name not in other._non_persistent_buffers_set)
        for name, layer in other.named_children():
            known = mine._modules.get(name)
            if known is None or written_class(known) is not written_class(layer):
                setattr(mine, name, own(layer))
            elif _form(known) != _form(layer):
                take(known, layer)

    take(given, model)


def _form(part: nn.Module | Tensor | None) -> Any:
    """The shape of a tensor; of a module the shapes of its tensors, and the classes of its layers and its own."""
    if not isinstance(part, nn.Module):
        return None if part is None else part.shape
    layers = {f"{name}.": written_class(layer) for name, layer in part.named_modules()}
    return layers | {name: tensor.shape for name, tensor in _tensors(part).items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _memo(
    one: nn.Module, other: nn.Module, alike: Callable[[Any, Any], bool] = lambda one, other: True
) -> dict[int, Any]:
    """A memo of ``copy.deepcopy`` in which layers and tensors of a module are those of another one."""
    found: dict[int, Any] = held_tensors(one)
    for own, others in (
        (dict(one.named_modules()), dict(other.named_modules())),
        (_tensors(one), _tensors(other)),
    ):
        found |= {id(part): others[n] for n, part in own.items() if n in others and alike(part, others[n])}
    return found | {id(one): other}


def _set_buffer(module: nn.Module, other: nn.Module, name: str) -> None:
    parent, _, last = name.rpartition(".")
    if parent in dict(other.named_modules()):
        persistent = last not in module.get_submodule(parent)._non_persistent_buffers_set
        vars(layer := other.get_submodule(parent)).pop(last, None)
        layer.register_buffer(last, module.get_buffer(name).detach().clone(), persistent)
