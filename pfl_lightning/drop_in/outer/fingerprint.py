"""What a user's module is like, and how it differs later: attributes, layers, what trains, and values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.datamodules.adapters.stages import data_in
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.transient import own_attributes
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.lightning_private import HYPERPARAMETERS
from pfl_lightning.state.checkpoints import plain
from pfl_lightning.state.equality import same
from pfl_lightning.state.image import content_hash

__all__ = ["Changes", "ModuleFingerprint", "data_sets"]

_NAMED = 4
"""How many names of each kind a message has."""

_Parts = dict[str, Mapping[str, Any]]


class ModuleFingerprint:
    """What a module is like: copies of values that are plain, hashes of tensors, and other objects themselves.

    Args:
        module: The module.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.kept: dict[str, dict[str, Any]] = {
            kind: {str(n): copy.deepcopy(value) if plain(value) else value for n, value in own.items()}
            for kind, own in _parts(module).items()
        }

    def attributes_changed_in(self, module: L.LightningModule) -> set[str]:
        """Names of those Python attributes of a module that are new or others."""
        return self._changed("attributes", _attributes(module))

    def changes_in(self, module: L.LightningModule) -> dict[str, set[str]]:
        """Names of what is new, another one or, of layers, gone in a module, by what it is."""
        now = _parts(module)
        found = {kind: self._changed(kind, own) for kind, own in now.items()}
        found["layers"] |= self.kept["layers"].keys() - now["layers"].keys()
        # A Trainer has called configure_callbacks before.
        found["attributes"] = {name for name in found["attributes"] if not lightning_kinds(vars(module)[name])}
        return found

    def _changed(self, kind: str, now: Mapping[str, Any]) -> set[str]:
        kept = self.kept[kind]
        alike = {str(n) for n, value in now.items() if n in kept and (_same(kept[n], value))}
        return {*map(str, now)} - alike


class Changes:
    """Keeps an eye on the module that was given to a federation, from call to call of a Trainer.

    What its author changes in between reaches no client.
    """

    def __init__(self) -> None:
        self._last: ModuleFingerprint | None = None
        self._found: dict[str, set[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State without history: copies of a federation have no author who changes their module."""
        return {"_last": None, "_found": {}}

    def end(self, module: L.LightningModule, values: Mapping[str, Any] | None = None) -> None:
        """A call is over.

        Args:
            module: The module, which holds the global model unless ``values`` are given.
            values: Those of the fingerprint before, where the call has loaded others.
        """
        self._last = ModuleFingerprint(module)
        if values is not None:
            self._last.kept["values of"] = dict(values)

    def begin(self, module: L.LightningModule) -> Mapping[str, Any] | None:
        """A call begins: from here to its end, what changes in the module is not its author's doing.

        Returns:
            Its values when an earlier call was over; ``None`` of the first call, or after one that ended in an error.
        """
        last, self._last = self._last, None
        if last is None:
            return None
        for kind, names in last.changes_in(module).items():
            self._found[kind] = self._found.get(kind, set()) | names
        return last.kept["values of"]

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


def _parts(module: L.LightningModule) -> _Parts:
    """What is compared, by what it is."""
    return {
        "layers": {name: layer for name, layer in module.named_modules() if name},
        "requires_grad of": {name: p.requires_grad for name, p in module.named_parameters()},
        "hyper-parameters": module.hparams,
        "attributes": _attributes(module),
        "values of": {name: content_hash(value) for name, value in plain_state(module).items() if not value.is_meta},
    }


def _attributes(module: L.LightningModule) -> dict[str, Any]:
    """Attributes that are the author's, with data sets and loaders."""
    own = {name: value for name, value in own_attributes(module).items() if name not in HYPERPARAMETERS}
    return own | data_sets(module)


def data_sets(module: L.LightningModule) -> dict[str, Any]:
    """Data sets and loaders that all copies may share, also in lists and dictionaries: a stream is each copy's own."""
    found = ((name, value, list(data_in(value))) for name, value in vars(module).items())
    return {name: value for name, value, data in found if data and all(map(_is_shared, data))}


def _is_shared(data: Any) -> bool:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)


def _same(kept: Any, now: Any) -> bool:
    return same(kept, now) if plain(kept) and plain(now) else kept is now


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    rest = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + rest
