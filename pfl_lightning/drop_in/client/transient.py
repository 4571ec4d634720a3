"""What a module has beside its state_dict, and the form of its buffers, which one client must not leave to the next."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricTracker

from pfl_lightning.datamodules.adapters.loading.stages import DATA, data_in
from pfl_lightning.drop_in.client.buffers import BufferForms
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.remembered import MISSING, Changes, Found, class_values, set_at
from pfl_lightning.state.equality import same

__all__ = ["Transient", "own_attributes"]

_log = logging.getLogger(__name__)

_NOT_THE_AUTHORS = ("torch.", "torchvision.", "torchmetrics.")
_LIGHTNINGS = frozenset({*vars(L.LightningModule()), *vars(nn.Module()), "_compiled_call_impl"})
# Methods that a metric wraps when it is made: they cannot be pickled, and its own __setstate__ makes them again.
_WRAPPED = frozenset({"update", "compute"})
_OF_LAYERS = (nn.Module, Optimizer, LRScheduler, L.Trainer, *DATA)


class Transient:
    """The Python attributes and non-persistent buffers of a module and its layers, and the form of all buffers.

    Attributes are kept as copies, in which modules, parameters and buffers stand for themselves, and an object that
    several layers have is one; dictionaries and lists are brought back in place, since functions may hold them, too.
    Data sets and what cannot be copied are left alone. Layers of torch have none that a step changes. Metric objects
    are reset beside this.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, L.LightningModule):
            _ = module.hparams  # Lightning asks for them in a fit, which adds them where there are none
        memo, kept = _tensors_and_layers(module), set(plain_state(module))
        self._attributes: dict[str, dict[str, Any]] = {}
        self._names: dict[str, set[str]] = {}
        self._forms = BufferForms(module)
        self._buffers = {n: b.detach().clone() for n, b in module.named_buffers() if n not in kept}
        trackers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, MetricTracker))
        self._trackers = {name: (set(layer._modules), layer._increment_called) for name, layer in trackers}
        for name, layer in module.named_modules():
            if _keeps_attributes(layer):
                self._attributes[name], self._names[name] = (
                    _copies(own_attributes(layer), memo),
                    set(own_attributes(layer)),
                )
        self._warned = False
        self._named: set[str] = set()
        self._class_values = class_values(type(module))

    @property
    def attributes(self) -> list[dict[str, Any]]:
        """Those of each layer, as they were."""
        return list(self._attributes.values())

    def restore_forms(self, module: nn.Module) -> dict[str, str]:
        """Bring buffers back to their names and shapes.

        Returns:
            What has changed, of those that are part of the ``state_dict``, by name.
        """
        return self._forms.restore(module)

    def restore(self, module: nn.Module) -> None:
        """Bring the module back to that."""
        self.restore_forms(module)
        self._forms.hold(module)
        known = _tensors_and_layers(module)
        if not self._warned:
            self._say_which_weights_are_lost(module, known)
        memo = dict(known)
        for name, first in self._attributes.items():
            layer = module.get_submodule(name)
            for added in own_attributes(layer).keys() - self._names[name]:
                delattr(layer, added)
            for attribute, value in _copies(first, memo).items():
                vars(layer)[attribute] = _in_place(vars(layer).get(attribute), value)
        for name, (kept_steps, begun) in self._trackers.items():
            tracker = cast(MetricTracker, module.get_submodule(name))
            for step in tracker._modules.keys() - kept_steps:
                del tracker._modules[step]
            tracker._increment_called = begun
        buffers = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._buffers.items():
                if name in buffers:
                    buffers[name].copy_(value)

    def changes(self, module: nn.Module) -> dict[str, Found]:
        """Plain values that a local fit has changed in attributes, by the names of the layers; the rest is named once.

        Weights that an object follows are left out, as :meth:`restore` says, and so are metric objects.
        """
        known, forms, found, lost = _tensors_and_layers(module), _forms(module), dict[str, Found](), dict[str, str]()
        for name, first in self._attributes.items():
            layer, changes = module.get_submodule(name), Changes(known.keys())
            for attribute, value in own_attributes(layer).items() if not isinstance(layer, Metric) else ():
                copied_or_new = attribute in first or attribute not in self._names[name]
                if copied_or_new and not _follows_weights(value, first.get(attribute), forms, known):
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
                "dictionaries of these are kept; a larger tensor belongs into register_buffer",
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

    def _say_which_weights_are_lost(self, module: nn.Module, known: dict[int, Any]) -> None:
        """Warn once of an object that has followed the weights in a local fit, such as an average of them."""
        forms = _forms(module)
        for name, first in self._attributes.items():
            for attribute, value in own_attributes(module.get_submodule(name)).items():
                if _follows_weights(value, first.get(attribute), forms, known):
                    self._warned = True
                    _log.warning(
                        "%s.%s (a %s) holds weights that a local fit has changed. It is no part of the state_dict: "
                        "every local fit and evaluation begins with those that it held at the start, so that an "
                        "average of the weights does not go on from round to round, and evaluations with it are of "
                        "the first weights. Make it a layer (a copy of the network that is a submodule, or buffers), "
                        "or use Lightning's WeightAveraging",
                        type(module).__name__,
                        f"{name}.{attribute}".removeprefix("."),
                        type(value).__name__,
                    )


def _forms(module: nn.Module) -> Counter[torch.Size]:
    return Counter(p.shape for p in module.parameters() if p.requires_grad)


def _follows_weights(value: Any, first: Any, forms: Counter[torch.Size], known: dict[int, Any]) -> bool:
    """Whether an object has tensors of the shapes of all weights, and a local fit has changed them."""
    now = [t for t in _tensors(value) if id(t) not in known]
    if len(now) < max(2, forms.total()) or forms - Counter(t.shape for t in now):
        return False
    before = list(_tensors(first))
    return len(before) != len(now) or not all(map(same, before, now))


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Tensors of floating-point numbers in an object, its attributes, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif depth and not isinstance(value, _OF_LAYERS):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        for part in vars(value).values() if parts is None and hasattr(value, "__dict__") else parts or ():
            yield from _tensors(part, depth - 1)


def _keeps_attributes(layer: nn.Module) -> bool:
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
            continue
    return found
