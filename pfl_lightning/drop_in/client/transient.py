"""What a module has beside its state_dict, and the form of its buffers, which one client must not leave to the next."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker

from pfl_lightning.datamodules.adapters.stages import DATA, data_in
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.remembered import MISSING, Changes, Found, class_values, set_at

__all__ = ["Transient", "keeps_attributes", "own_attributes", "say_what_is_left_out"]

_log = logging.getLogger(__name__)

_NOT_THE_AUTHORS = ("torch.", "torchvision.", "torchmetrics.")
_LIGHTNINGS = frozenset({*vars(L.LightningModule()), *vars(nn.Module()), "_compiled_call_impl"})
# Methods that a metric wraps when it is made: they cannot be pickled, and its own __setstate__ makes them again.
_WRAPPED = frozenset({"update", "compute"})


class _Uncopied:
    """Stands, as a class, for a value that could not be copied and is left alone."""


class Transient:
    """The Python attributes and non-persistent buffers of a module and its layers, and the form of all buffers.

    Attributes are kept as copies, in which modules, parameters and buffers stand for themselves, and an object that
    several layers have is one; dictionaries and lists are brought back in place, since functions may hold them, too.
    Data sets and what cannot be copied are left alone. Layers of torch have none that a step changes. Metric objects
    are reset beside this. Of buffers the tensors themselves are held: who sets a buffer to another tensor leaves the
    former one as it was.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, L.LightningModule):
            _ = module.hparams  # Lightning asks for them in a fit, which adds them where there are none
        memo, kept = _tensors_and_layers(module), set(plain_state(module))
        self._hold_buffers(module)
        self._scratch = {n: b.detach().clone() for n, b in module.named_buffers() if n not in kept}
        trackers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, MetricTracker))
        self._trackers = {name: (set(layer._modules), layer._increment_called) for name, layer in trackers}
        owners = {name: layer for name, layer in module.named_modules() if keeps_attributes(layer)}
        self._attributes = {name: _copies(own_attributes(layer), memo) for name, layer in owners.items()}
        self._named: set[str] = set()
        self._class_values = class_values(type(module))

    @property
    def attributes(self) -> list[dict[str, Any]]:
        """Those of each layer, as they were."""
        return list(self._attributes.values())

    def _hold_buffers(self, module: nn.Module) -> None:
        self._parameters = {name: set(layer._parameters.keys()) for name, layer in module.named_modules()}
        self._held: dict[str, dict[str, tuple[Tensor | None, torch.Size | None]]] = {
            name: {key: (buffer, None if buffer is None else buffer.shape) for key, buffer in layer._buffers.items()}
            for name, layer in module.named_modules()
        }

    def restore_forms(self, module: nn.Module) -> list[str]:
        """Bring back buffers that were added, taken away, or set to tensors of other shapes.

        Returns:
            Names of those that are part of the ``state_dict``.
        """
        found = []
        for name, layer in module.named_modules():
            held, now = self._held.get(name, {}), dict(layer._buffers.items())
            # Parameters may have become buffers, as in a target network; layers may have been added.
            added = now.keys() - held.keys() - self._parameters.get(name, now.keys())
            for key in (*held, *added):
                before, shape = held.get(key, (None, None))
                own = now.get(key)
                became = own is None and (key in vars(layer) or key in layer._parameters)
                if key in held and (became or (None if own is None else own.shape) == shape):
                    continue
                if key not in layer._non_persistent_buffers_set:
                    found.append(f"{name}.{key}".removeprefix("."))
                if key in added:
                    delattr(layer, key)
                    continue
                if before is not None and before.shape != shape:  # it was resized in place
                    before = before.new_zeros(cast(torch.Size, shape))
                layer._buffers[key] = before if before is None or own is None else before.to(own.device)
        return found

    def restore(self, module: nn.Module) -> None:
        """Bring the module back to that."""
        self.restore_forms(module)
        self._hold_buffers(module)
        memo = _tensors_and_layers(module)
        for name, first in self._attributes.items():
            layer = module.get_submodule(name)
            for added in own_attributes(layer).keys() - first.keys():
                delattr(layer, added)
            for attribute, value in _copies(first, memo).items():
                if value is not _Uncopied:
                    vars(layer)[attribute] = _in_place(vars(layer).get(attribute), value)
        for name, (kept_steps, begun) in self._trackers.items():
            tracker = cast(MetricTracker, module.get_submodule(name))
            for step in tracker._modules.keys() - kept_steps:
                del tracker._modules[step]
            tracker._increment_called = begun
        buffers = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._scratch.items():
                if name in buffers:
                    buffers[name].copy_(value)

    def changes(self, module: nn.Module) -> dict[str, Found]:
        """Plain values that a local fit has changed in attributes, by the names of the layers; the rest is named once.

        Metric objects are left out.
        """
        known, found, lost = _tensors_and_layers(module).keys(), dict[str, Found](), dict[str, str]()
        for name, first in self._attributes.items():
            layer, changes = module.get_submodule(name), Changes(known)
            for attribute, value in own_attributes(layer).items() if not isinstance(layer, Metric) else ():
                if first.get(attribute) is not _Uncopied:
                    changes.compare(value, first.get(attribute, MISSING), (attribute,))
            if changes.found:
                found[name] = changes.found
            lost |= {f"{name}.{place}".removeprefix("."): reason for place, reason in changes.lost.items()}
        self._say_what_is_lost(type(module), lost)
        return found

    def recall(self, module: nn.Module, found: dict[str, Found]) -> None:
        """Set the values that :meth:`changes` returned, on attributes as :meth:`restore` leaves them."""
        for name, values in found.items():
            owner = vars(module.get_submodule(name))
            for path, value in values.items():
                set_at(owner, path, value)

    def _say_what_is_lost(self, kind: type, lost: dict[str, str]) -> None:
        new = {name: reason for name, reason in lost.items() if name not in self._named}
        now = class_values(kind)
        shared = [name for name, before in self._class_values.items() if now.get(name, before) != before]
        shared = [name for name in shared if name not in self._named]
        self._named |= {*new, *shared}
        if new:
            _log.warning(
                "local fits change attributes of %s that are not kept for the client's next: %s. Each local fit and "
                "evaluation begins with their first values. Numbers, strings, small tensors, and lists and "
                "dictionaries of these are kept; a larger tensor belongs into register_buffer, and an average of the "
                "weights into a layer (a copy of the network), or use Lightning's WeightAveraging",
                kind.__name__,
                "; ".join(f"{name} ({reason})" for name, reason in new.items()),
            )
        if shared:
            _log.warning(
                "a local fit has changed %s, which the class holds for all clients: what one puts there, the next one "
                "finds, and worker processes have each their own. Set it in __init__ (self.%s = ...) for each client "
                "to have its own",
                ", ".join(shared),
                shared[0].rpartition(".")[2],
            )


def say_what_is_left_out(kind: str, names: Sequence[str]) -> None:
    """Warn of buffers that have changed their form.

    Args:
        kind: Class of the module.
        names: What :meth:`Transient.restore_forms` returned.
    """
    _log.warning(
        "buffers of %s changed their shapes in a local fit or an evaluation: %s. One shape holds for all clients "
        "and the server, so that these values are neither sent nor saved, and every local fit and evaluation begins "
        "with the first shape. To have them averaged and saved, give register_buffer the final shape in __init__",
        kind,
        ", ".join(names),
    )


def keeps_attributes(layer: nn.Module) -> bool:
    """Whether a layer may have Python attributes that a step changes."""
    return isinstance(layer, Metric) or not type(layer).__module__.startswith(_NOT_THE_AUTHORS)


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


def _in_place(now: Any, before: Any) -> Any:
    """What an attribute was; the dictionary or list that it is, with the former content."""
    if now is not before and type(now) is type(before):
        if isinstance(now, dict):
            content = dict(before)
            now.clear()
            now.update(content)
            return now
        if isinstance(now, list):
            now[:] = list(before)
            return now
    return before


def _copies(values: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:  # whatever an object's own copying may raise: a lock, a file, an open connection
            found[name] = _Uncopied
    return found
