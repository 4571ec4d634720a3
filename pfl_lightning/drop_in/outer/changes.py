"""What the author of a module has changed in it since a federation had it in hand: it reaches no client."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import lightning as L
from torch import Tensor, nn

from pfl_lightning.drop_in.client.transient import own_attributes
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.lightning_private import HYPERPARAMETERS
from pfl_lightning.state.checkpoints.module import plain
from pfl_lightning.state.equality import same

__all__ = ["Changes", "Look"]

_NAMED = 4
"""How many names of each kind a message has."""


class Look:
    """What a module is like, beside the values of its tensors.

    Args:
        module: The module.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._layers = {name: ref(layer) for name, layer in module.named_modules() if name}
        self._trains = {name: p.requires_grad for name, p in module.named_parameters()}
        self._hyperparameters = _kept(module.hparams)
        self._attributes = _kept(_own(module))

    def attributes_changed_in(self, module: L.LightningModule) -> set[str]:
        """Names of those Python attributes of a module that are new or others; what cannot be told is left out."""
        return _changed(self._attributes, _own(module))

    def changes_in(self, module: L.LightningModule) -> dict[str, set[str]]:
        """Names of what is new or another one in a module, by what it is."""
        now = {name: layer for name, layer in module.named_modules() if name}
        layers = _outermost({*_changed(self._layers, now), *(self._layers.keys() - now.keys())})
        trains = {n: p.requires_grad for n, p in module.named_parameters()}
        apart = tuple(f"{name}." for name in layers)
        other = {n for n in trains.keys() & self._trains.keys() if trains[n] != self._trains[n]}
        return {
            "layers": layers | {n for n in trains.keys() ^ self._trains.keys() if not n.startswith(apart)},
            "requires_grad of": {name for name in other if not name.startswith(apart)},
            "hyper-parameters": _changed(self._hyperparameters, module.hparams),
            # A Trainer has called configure_callbacks before.
            "attributes": {n for n in self.attributes_changed_in(module) if not lightning_kinds(vars(module)[n])},
        }


class Changes:
    """Keeps an eye on the module that was given to a federation, from call to call of a Trainer."""

    def __init__(self) -> None:
        self._look: Look | None = None
        self._found: dict[str, set[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State of one that has seen nothing: copies of a federation have no author who changes their module."""
        return {"_look": None, "_found": {}}

    def end(self, module: L.LightningModule) -> None:
        """A call is over, and the module holds the global model."""
        self._look = Look(module)

    def begin(self, module: L.LightningModule, state: Callable[[], Mapping[str, Any]] | None = None) -> bool:
        """A call begins: from here to its end, what changes in the module is not its author's doing.

        Args:
            module: The module.
            state: Gives what its tensors would hold had nobody changed them; ``None`` where that is not asked.

        Returns:
            Whether it was looked at when an earlier call was over.
        """
        look, self._look = self._look, None
        if look is None:  # of the first call, or after one that ended in an error
            return False
        found = look.changes_in(module)
        if state is not None:
            apart = tuple(f"{name}." for name in found["layers"])
            others = {n for n in _other_values(module, state()) if not n.startswith(apart)}
            found["values of"] = others - found["layers"]
        for kind, names in found.items():
            self._found[kind] = self._found.get(kind, set()) | names
        return True

    def warn(self, name: str, fits: bool) -> None:
        """Warn of what was found, once.

        Args:
            name: Name of the module.
            fits: Whether clients train in this call; if not, it makes no difference what would.
        """
        later = {} if fits else {"requires_grad of": self._found.pop("requires_grad of", set())}
        found, self._found = {kind: names for kind, names in self._found.items() if names}, later
        if not found:
            return
        what = "; ".join(f"{kind} {_listed(names)}" for kind, names in found.items())
        best = "" if fits else ", and for the clients of the best round give ckpt_path='best'"
        warnings.warn(
            f"changes made to {name} between calls of the Trainer do not reach the clients, which go on from the last "
            f"one: {what}. For them to count, give a new FederatedLoop (with federate: call it again), whose clients "
            f"begin with the module as it is now{best}",
            stacklevel=2,
        )


def _own(module: L.LightningModule) -> dict[str, Any]:
    return {name: value for name, value in own_attributes(module).items() if name not in HYPERPARAMETERS}


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what is made of numbers and words; of other objects the identity, where it can be kept."""
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = copy.deepcopy(value) if plain(value) else ref(value)
        except TypeError:  # a set, a list of tensors, ...
            found[str(name)] = _UNKNOWN
    return found


_UNKNOWN = object()


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {str(name) for name, value in now.items() if name not in before or _differs(before[name], value)}


def _differs(before: Any, now: Any) -> bool:
    if before is _UNKNOWN:
        return plain(now)
    if isinstance(before, ref):
        return before() is not now
    return before is not now and not (plain(now) and same(before, now))


def _outermost(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in sorted(names):
        if not name.startswith(tuple(f"{other}." for other in found)):
            found.add(name)
    return found


def _other_values(module: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Names of tensors of a module that do not hold what was loaded into them."""
    for name, now in (*module.named_parameters(), *module.named_buffers()):
        value = state.get(name)
        if not isinstance(value, Tensor) or value.is_meta or now.is_meta:
            continue
        if not same(now.detach(), value.to(now), nan=True):  # a model that has diverged holds NaN
            yield name


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    rest = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + rest
