"""Attributes that a module gives itself in ``prepare_data`` and where it makes its loaders, for the clients' copies."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

import lightning as L
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.datamodules.adapters.loading.stages import data_in, made_again
from pfl_lightning.drop_in.client.copies import held_tensors
from pfl_lightning.drop_in.outer.changes import Look
from pfl_lightning.drop_in.outer.set_up import OF_LOADERS
from pfl_lightning.state.closures import bind_functions

__all__ = ["Gained"]

_log = logging.getLogger(__name__)


class Gained:
    """Knows what the module that was given has gained since it was copied: a Trainer calls these hooks on it alone.

    Layers and weights are not looked at: clients have those of the first copy.

    Args:
        module: The module.

    Attributes:
        places: Where a copy has got its attributes from, by their names.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._look: Look | None = Look(module)
        self._buffers = {name: ref(buffer) for name, buffer in module.named_buffers()}
        self._prepared: dict[str, Any] = {}  # as it was before a setup could change it
        self._set_up: set[str] = set()
        self._handed_back: set[str] = set()
        self._data: dict[str, Any] = {}  # of which clients have parts
        self.places: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State without the module's objects, which are others in another process."""
        nothing: dict[str, Any] = {"_look": None, "_buffers": {}, "_prepared": {}, "_data": {}, "_handed_back": set()}
        return {**nothing, "_set_up": self._set_up, "places": {}}

    @contextmanager
    def preparing(self, module: L.LightningModule) -> Iterator[None]:
        """Inside, the module's ``prepare_data`` is called."""
        look, data = Look(module), _data_sets(module)
        yield
        names = {name for name, value in _data_sets(module).items() if value is not data.get(name)}
        for name in sorted(names | look.attributes_changed_in(module)):
            self._prepared[name] = vars(module)[name]
            with suppress(Exception):  # what cannot be copied is named when it is handed over
                self._prepared[name] = copy.deepcopy(vars(module)[name], _memo(module, module))

    @contextmanager
    def handed_to(self, other: L.LightningModule, module: L.LightningModule) -> Iterator[None]:
        """Hand over what was prepared; inside, the copy is set up; afterwards, hand over the rest.

        What the copy has set itself stays.

        Args:
            other: The copy.
            module: The module.
        """
        if self._look is None:
            yield
            return
        _hand_over(module, other, self._prepared)
        self.places = dict.fromkeys(self._prepared, "prepare_data")
        buffers = dict(other.named_buffers())
        self._set_up = set()
        with self.setting_up(other):
            yield
        self.places |= dict.fromkeys(self._set_up, "setup or configure_model")
        # Not earlier: a setup that finds what another setup has made may believe that its layers are there, too.
        names = self._look.attributes_changed_in(module) - self._set_up
        data = _data_sets(module)
        names |= {name for name in data if vars(other).get(name) is None}
        self._data = data
        self._put_data_back(other)
        _hand_over(module, other, {name: vars(module)[name] for name in sorted(names)})
        self.places = dict.fromkeys(names, OF_LOADERS) | self.places
        own = dict(other.named_buffers())
        for name, buffer in module.named_buffers():
            known = self._buffers.get(name)
            if (known is None or known() is not buffer) and own.get(name) is buffers.get(name):
                _set_buffer(module, other, name)

    @contextmanager
    def setting_up(self, other: L.LightningModule) -> Iterator[None]:
        """Inside, the ``setup`` of a copy is called; what it sets is noted.

        Args:
            other: The copy.
        """
        look, data = Look(other), _data_sets(other)
        yield
        self._set_up |= look.attributes_changed_in(other)
        self._set_up |= {name for name, value in _data_sets(other).items() if value is not data.get(name)}
        self._put_data_back(other)

    def _put_data_back(self, other: L.LightningModule) -> None:
        """Where a further ``setup`` has made data once more: clients have parts of the first."""
        vars(other).update({name: self._data[name] for name in made_again(self._data, vars(other))})

    def hand_back(self, model: L.LightningModule, module: L.LightningModule) -> None:
        """Give the module what ``setup`` has set on a copy of it, as it would have in a plain run.

        Args:
            model: The copy, with the layers of the module; it is used up.
            module: The module.
        """
        memo, shared = _memo(model, module), _data_sets(model)
        # What a setup of its own has set, which was called for its loaders, stays.
        own = set() if self._look is None else self._look.attributes_changed_in(module) - self._handed_back
        self._handed_back |= self._set_up - own
        for name in (self._set_up - own) & vars(model).keys():
            vars(module)[name] = vars(model)[name]
            with suppress(Exception):  # what cannot be copied is the model's
                vars(module)[name] = shared[name] if name in shared else copy.deepcopy(vars(model)[name], memo)
        if self._set_up:
            bind_functions(model, module)


def _data_sets(module: L.LightningModule) -> dict[str, Any]:
    """Data sets and loaders that all copies may share, also in lists and dictionaries: a stream is each copy's own."""
    found = ((name, value, list(data_in(value))) for name, value in vars(module).items())
    return {name: value for name, value, data in found if data and all(map(_is_shared, data))}


def _is_shared(data: Any) -> bool:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)


def _hand_over(module: L.LightningModule, other: L.LightningModule, values: Mapping[str, Any]) -> None:
    memo = _memo(module, other)
    for name, value in values.items():
        try:
            vars(other)[name] = copy.deepcopy(value, memo)
        except Exception as error:  # whatever an object's own copying may raise: a lock, an open file
            _log.warning(
                "%s.%s, which the module made in prepare_data or with its loaders, cannot be copied (%s): clients do "
                "not have it; make it in setup",
                type(module).__name__,
                name,
                error,
            )
    if values:  # functions among them hold layers
        bind_functions(module, other)


def _memo(module: L.LightningModule, other: L.LightningModule) -> dict[int, Any]:
    """A memo of ``copy.deepcopy`` in which layers and tensors of a module are those of another one."""
    memo: dict[int, Any] = held_tensors(module)
    memo |= _same_places(dict(module.named_modules()), dict(other.named_modules()))
    memo |= _same_places(dict(module.named_parameters()), dict(other.named_parameters()))
    return memo | _same_places(dict(module.named_buffers()), dict(other.named_buffers()))


def _same_places(own: dict[str, Any], others: dict[str, Any]) -> dict[int, Any]:
    return {id(one): others[name] for name, one in own.items() if name in others}


def _set_buffer(module: nn.Module, other: nn.Module, name: str) -> None:
    parent, _, last = name.rpartition(".")
    if parent in dict(other.named_modules()):
        persistent = last not in module.get_submodule(parent)._non_persistent_buffers_set
        vars(layer := other.get_submodule(parent)).pop(last, None)
        layer.register_buffer(last, module.get_buffer(name).detach().clone(), persistent)
