"""What a module has beside its state_dict, and the form of its buffers, which one client must not leave to the next."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning as L
import torch
from torch import nn
from torchmetrics import Metric, MetricTracker

from pfl_lightning.datamodules.adapters.stages import DATA, data_in
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.remembered import LOST, MISSING, Found, changes, class_values, put, set_at

_log = logging.getLogger(__name__)

_NOT_THE_AUTHORS = ("torch.", "torchvision.", "torchmetrics.")
_LIGHTNINGS = frozenset({*vars(L.LightningModule()), *vars(nn.Module()), "_compiled_call_impl"})
# Methods that a metric wraps when it is made: they cannot be pickled, and its own __setstate__ makes them again.
_WRAPPED = frozenset({"update", "compute"})


class _Uncopied:
    """Stands, as a class, for a value that cannot be copied (a lock, a file, an open connection) and is left alone."""


class Transient:
    """The Python attributes and non-persistent buffers of a module and its layers, and the form of all buffers.

    Attributes are kept as copies, in which modules, parameters and buffers stand for themselves, and an object that
    several layers have is one; dictionaries and lists are brought back in place, since functions may hold them, too.
    Data sets and what cannot be copied are left alone. Layers of torch have none that a step changes. Metric objects
    are reset beside this. Of buffers the tensors themselves are held: who sets a buffer to another tensor leaves the
    former one as it was.

    Args:
        module: The module.

    Attributes:
        attributes: Those of each layer, as they were.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, L.LightningModule):
            _ = module.hparams  # Lightning asks for them in a fit, which adds them where there are none
        memo, kept = _tensors_and_layers(module), set(plain_state(module))
        self._hold_buffers(module)
        self._scratch = {n: b.detach().clone() for n, b in module.named_buffers() if n not in kept}
        layers = dict(module.named_modules())
        self._steps = {name: set(layer._modules) for name, layer in layers.items() if isinstance(layer, MetricTracker)}
        owners = {name: layer for name, layer in layers.items() if keeps_attributes(layer)}
        self.attributes = {name: _copies(own_attributes(layer), memo) for name, layer in owners.items()}
        self._named: set[str] = set()
        self._class_values = class_values(type(module))

    def _hold_buffers(self, module: nn.Module) -> None:
        self._held = {
            name: (dict(layer._buffers.items()), {key: b.shape for key, b in layer._buffers.items() if b is not None})
            for name, layer in module.named_modules()
        }
        self._parameters = {name: set(layer._parameters.keys()) for name, layer in module.named_modules()}

    def restore_forms(self, module: nn.Module) -> list[str]:
        """Bring back buffers that were added, taken away, or set to tensors of other shapes.

        Returns:
            Names of those that are part of the ``state_dict``.
        """
        found = []
        for name, layer in module.named_modules():
            if name not in self._held:  # a layer that was added
                continue
            (held, shapes), now = self._held[name], dict(layer._buffers.items())
            # Parameters may have become buffers, as in a target network, and buffers attributes.
            added = [key for key in now if key not in held and key not in self._parameters[name]]
            for key in (*held, *added):
                own, before, shape = now.get(key), held.get(key), shapes.get(key)
                became = own is None and (key in vars(layer) or key in layer._parameters)
                if key in held and (became or (None if own is None else own.shape) == shape):
                    continue
                if key not in layer._non_persistent_buffers_set:
                    found.append(f"{name}.{key}".removeprefix("."))
                if key in added:
                    delattr(layer, key)
                    continue
                if before is not None and shape is not None and before.shape != shape:  # it was resized in place
                    before = before.new_zeros(shape)
                layer._buffers[key] = before if before is None or own is None else before.to(own.device)
        return found

    def restore(self, module: nn.Module) -> None:
        """Bring the module back to that."""
        self.restore_forms(module)
        self._hold_buffers(module)
        memo = _tensors_and_layers(module)
        for name, first in self.attributes.items():
            layer = module.get_submodule(name)
            for added in own_attributes(layer).keys() - first.keys():
                delattr(layer, added)
            for attribute, value in _copies(first, memo).items():
                if value is not _Uncopied:
                    put(vars(layer), attribute, value)
        for name, steps in self._steps.items():
            tracked = module.get_submodule(name)._modules
            for step in tracked.keys() - steps:
                del tracked[step]
        buffers = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._scratch.items():
                if name in buffers:
                    buffers[name].copy_(value)

    def changes(self, module: nn.Module) -> dict[str, Found]:
        """Plain values that a local fit has changed in attributes, by the names of the layers; the rest is named once.

        Metric objects are left out.
        """
        known, found, lost = _tensors_and_layers(module).keys(), dict[str, Found](), list[str]()
        for name, first in self.attributes.items():
            layer = module.get_submodule(name)
            measures = isinstance(layer, Metric | MetricTracker)
            for attribute, value in own_attributes(layer).items() if not measures else ():
                before = first.get(attribute, MISSING)
                changed = changes(value, before, (attribute,), known) if before is not _Uncopied else ()
                for path, now in changed:
                    if now is LOST:
                        lost.append(".".join(map(str, (name, *path))).removeprefix("."))
                    else:
                        found.setdefault(name, {})[path] = now
        self._warn_of(lost, type(module))
        return found

    def recall(self, module: nn.Module, found: dict[str, Found]) -> None:
        """Set the values that :meth:`changes` returned, on attributes as :meth:`restore` leaves them."""
        for name, values in found.items():
            owner = vars(module.get_submodule(name))
            for path, value in values.items():
                set_at(owner, path, value)

    def _warn_of(self, lost: list[str], kind: type) -> None:
        now = class_values(kind)
        shared = [name for name, before in self._class_values.items() if now.get(name, before) != before]
        lost, shared = ([name for name in names if name not in self._named] for names in (lost, shared))
        self._named |= {*lost, *shared}
        if lost:
            _log.warning(
                "local fits change attributes of %s that are not kept for the client's next fit: %s. Each local fit "
                "and evaluation begins with their initial values. Kept are numbers, strings, tensors, lists and "
                "dictionaries of these, up to 10,000 values; a larger tensor belongs in register_buffer, and an "
                "average of the weights in a layer (a copy of the network) or Lightning's WeightAveraging",
                kind.__name__,
                ", ".join(lost),
            )
        if shared:
            _log.warning(
                "a local fit has changed %s, a class attribute that all clients share: the next client finds the "
                "changed value, and each worker process has its own. Set it in __init__ (self.%s = ...) to give each "
                "client its own",
                ", ".join(shared),
                shared[0].rpartition(".")[2],
            )


def warn_of_forms(kind: str, names: list[str]) -> None:
    """Warn of buffers that have changed their form: of a module's class, what :meth:`Transient.restore_forms` found."""
    _log.warning(
        "buffers of %s changed their shapes in a local fit or an evaluation: %s. A buffer has one shape for all "
        "clients and the server: these values are neither sent nor saved, and every local fit and evaluation begins "
        "with the first shape. To have them averaged and saved, give register_buffer the final shape in __init__",
        kind,
        ", ".join(names),
    )


def keeps_attributes(layer: nn.Module) -> bool:
    """Whether a layer may have Python attributes that a step changes."""
    return isinstance(layer, Metric | MetricTracker) or not type(layer).__module__.startswith(_NOT_THE_AUTHORS)


def own_attributes(layer: nn.Module) -> dict[str, Any]:
    """The Python attributes of a layer that are its author's, without data; of a metric, what ``reset`` leaves."""
    if isinstance(layer, Metric):
        kept = layer._defaults.keys() | _WRAPPED
        return {n: v for n, v in vars(layer).items() if n not in kept and not n.startswith("_")}
    return {
        name: value for name, value in vars(layer).items() if name not in _LIGHTNINGS and not isinstance(value, DATA)
    }


def _tensors_and_layers(module: nn.Module) -> dict[int, Any]:
    """What stands for itself in copies of attributes; data in lists and dictionaries do, too."""
    found: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
    found += [one for layer in module.modules() for value in vars(layer).values() for one in data_in(value)]
    return {id(one): one for one in found}


def _copies(values: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:  # whatever an object's own copying may raise
            found[name] = _Uncopied
    return found
