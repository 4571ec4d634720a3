"""The module that a federation was made of: its hooks of a run, what its author changes, and the global model in it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

import lightning as L
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import Metric

from pfl_lightning.data import FederatedData
from pfl_lightning.datamodules.adapters.stages import brings, data_in, made_again
from pfl_lightning.drop_in.client.copies import held_tensors, take_cli_optimizers
from pfl_lightning.drop_in.client.plain_state import load_plain_state, plain_state
from pfl_lightning.drop_in.client.transient import keeps_attributes, own_attributes
from pfl_lightning.drop_in.fits.module_calls import names_in_code, patched
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.lightning_private import HYPERPARAMETERS, attached
from pfl_lightning.notices import few_of
from pfl_lightning.state.checkpoints import plain
from pfl_lightning.state.closures import bind_functions
from pfl_lightning.state.equality import same
from pfl_lightning.state.image import content_hash

Fingerprint = dict[str, dict[str, Any]]
"""What a module is like, by kind and name: copies of plain values, hashes of tensors, and other objects themselves."""


class UserModuleOwner:
    """Owns the author's module, which holds the global model in the end, and sees what its author changes in it.

    Clients train copies, which are made when ``prepare_data``, the hooks that make loaders, ``setup`` and
    ``configure_model`` have been called on the module, as in a plain run. What its author changes between calls of a
    Trainer reaches no client.

    Args:
        module: The author's module.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self._start: Fingerprint | None = fingerprint(module)
        self._last: Fingerprint | None = None  # when the last call was over
        self._changed: dict[str, set[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State without history: a copy of a federation has no author who changes the module."""
        return {**vars(self), "_start": None, "_last": None, "_changed": {}}

    def begin_call(self, fits: bool) -> None:
        """A call of the Trainer begins: warn of what its author has changed in the module, once.

        Args:
            fits: Whether clients train in this call; if not, it makes no difference what would.
        """
        name = type(self.module).__name__
        if self._start is not None and changed_since(self._start, self.module)["values of"]:
            warnings.warn(
                f"values of {name} have changed since the federation was made of it: clients begin with its present "
                "values. Give each federation its own module",
                stacklevel=2,
            )
        self.look()
        later = {} if fits else {"requires_grad of": self._changed.pop("requires_grad of", set())}
        found = [f"{kind} {few_of(sorted(names), 4)}" for kind, names in self._changed.items() if names]
        self._changed = later
        if found:
            best = "" if fits else ", and for the clients of the best round pass ckpt_path='best'"
            warnings.warn(
                f"changes made to {name} between calls of the Trainer do not reach the clients: {'; '.join(found)}. "
                "To use them, pass a new FederatedLoop (with federate: call it again), which begins with the "
                f"module as it is now{best}",
                stacklevel=2,
            )

    def look(self) -> dict[str, Any] | None:
        """Note what the author has changed; from here to the end of the call, nothing is the author's doing.

        Returns:
            The module's values when an earlier call was over; ``None`` where none was, or it ended in an error.
        """
        last, self._last = self._last, None
        for kind, names in ({} if last is None else changed_since(last, self.module)).items():
            # A Trainer has called configure_callbacks before.
            own = {n for n in names if kind != "attributes" or not lightning_kinds(vars(self.module)[n])}
            self._changed[kind] = self._changed.get(kind, set()) | own
        return None if last is None else last["values of"]

    def end_call(self, values: dict[str, Any] | None = None) -> None:
        """A call is over; the module holds the global model, or what a call has loaded in the place of ``values``."""
        self._last = fingerprint(self.module)
        self._last["values of"] = self._last["values of"] if values is None else values

    def begin(self, stage: str, trainer: Any, data: Any) -> None:
        """Set the module up for the first time, before clients' copies are made.

        Args:
            stage: The stage.
            trainer: The outer Trainer; ``None`` for none.
            data: The clients' data.
        """
        start, self._start = self._start, None
        self.set_up([stage], trainer)
        if brings(self.module, "configure_model"):
            with _set_up_by(self.module, trainer):
                self.module.configure_model()
        if start is not None:
            changed = changed_since(start, self.module)["attributes"]
            _warn_of_pooled_numbers(self.module, changed, data, None if trainer is None else trainer.max_epochs)

    def set_up(self, stages: Iterable[str], trainer: Any, networks: Sequence[nn.Module] = ()) -> None:
        """Call the module's ``setup`` for stages.

        Args:
            stages: The stages.
            trainer: The outer Trainer.
            networks: Copies that clients train, which get the attributes that it has set.
        """
        if not brings(self.module, "setup"):
            return
        data, before = _data_sets(self.module), fingerprint(self.module) if networks else None
        with _set_up_by(self.module, trainer):
            for stage in stages:
                self.module.setup(stage)
        # Where it has made data once more: clients have parts of the first.
        vars(self.module).update({name: data[name] for name in made_again(data, vars(self.module))})
        changed = set() if before is None else changed_since(before, self.module)["attributes"]
        for network in networks:
            self._give_attributes(network, changed)

    def _give_attributes(self, network: Any, changed: set[str]) -> None:
        layers: dict[str, Any] = dict(network.named_modules())
        others = _parts(network)
        memo = held_tensors(self.module)
        memo |= {id(part): others[name] for name, part in _parts(self.module).items() if name in others}
        for name, layer in self.module.named_modules():
            own = own_attributes(layer) if name in layers and keeps_attributes(layer) else {}
            own = own if name else {attribute: own[attribute] for attribute in changed & own.keys()}
            for attribute, value in own.items() if not isinstance(layer, Metric) else ():
                with suppress(Exception):  # what cannot be copied
                    vars(layers[name])[attribute] = copy.deepcopy(value, memo)
        vars(network).update(_data_sets(self.module))
        bind_functions(self.module, network)
        take_cli_optimizers(self.module, network)

    def take(self, model: L.LightningModule) -> None:
        """Let the author's module hold a model.

        Args:
            model: The model, of a copy of the module; it is used up.
        """
        own, state = plain_state(self.module), plain_state(model)
        others = {name for name, value in state.items() if name not in own or own[name].shape != value.shape}
        for name, layer in model.named_children():  # where its author has replaced layers since
            if any(other.startswith(f"{name}.") for other in others):
                setattr(self.module, name, layer)
        load_plain_state(self.module, state)


def fingerprint(module: L.LightningModule) -> Fingerprint:
    """What a module is like now."""
    found = _kinds(module)
    return {k: {n: copy.deepcopy(v) if plain(v) else v for n, v in own.items()} for k, own in found.items()}


def changed_since(before: Fingerprint, module: L.LightningModule) -> dict[str, set[str]]:
    """Names of what is new, another one or, of layers, gone in a module, by kind."""
    now, found = _kinds(module), {}
    for kind, own in now.items():
        found[kind] = {n for n, value in own.items() if n not in before[kind] or not _alike(before[kind][n], value)}
    found["layers"] |= before["layers"].keys() - now["layers"].keys()
    return found


def _kinds(module: L.LightningModule) -> Fingerprint:
    own = {name: value for name, value in own_attributes(module).items() if name not in HYPERPARAMETERS}
    return {
        "layers": {name: layer for name, layer in module.named_modules() if name},
        "requires_grad of": {name: p.requires_grad for name, p in module.named_parameters()},
        "hyper-parameters": {str(name): value for name, value in module.hparams.items()},
        "attributes": own | _data_sets(module),
        "values of": {name: content_hash(value) for name, value in plain_state(module).items() if not value.is_meta},
    }


def _data_sets(module: L.LightningModule) -> dict[str, Any]:
    """Data sets and loaders that all copies may share, also in lists and dictionaries: a stream is each copy's own."""
    found = ((name, value, list(data_in(value))) for name, value in vars(module).items())
    return {name: value for name, value, data in found if data and all(map(_is_shared, data))}


def _is_shared(data: Any) -> bool:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)


def _alike(kept: Any, now: Any) -> bool:
    return same(kept, now) if plain(kept) and plain(now) else kept is now


def _parts(module: nn.Module) -> dict[str, Any]:
    """Layers and tensors of a module, by name."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict([*module.named_modules(), *tensors])


@contextmanager
def _set_up_by(module: L.LightningModule, trainer: Any) -> Iterator[None]:
    """Inside, the module has the outer Trainer, and a warning says what its training batches are.

    A module is set up once for all clients, and a schedule laid out by ``estimated_stepping_batches`` there would count
    clients in place of batches.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    own: Any = getattr(datamodule, "train_dataloader", None)

    def train_dataloader() -> Any:
        warnings.warn(
            f"setup or configure_model of {type(module).__name__} asks its Trainer for training batches "
            "(trainer.datamodule.train_dataloader(), trainer.estimated_stepping_batches), but there each batch stands "
            "for one client of a round. Ask in configure_optimizers for a client's own batches, or "
            "self.trainer.datamodule.datamodule, your data module, for those of all clients",
            stacklevel=2,
        )
        return own()

    with ExitStack() as stack:
        stack.enter_context(attached(module, trainer))
        if hasattr(datamodule, "client_data"):  # no data of predictions
            stack.enter_context(patched(datamodule, train_dataloader=wraps(own)(train_dataloader)))
        yield


def _warn_of_pooled_numbers(
    module: L.LightningModule, changed: Iterable[str], data: FederatedData, epochs: int | None
) -> None:
    """Warn of numbers that a module keeps, or reads from its data module, and that count the items of all clients.

    A schedule that is laid out by ``self.steps = len(loader)`` in ``train_dataloader``, or by a number of items that
    the data module has counted, would be that of a plain run, and a client has fewer batches.

    Args:
        module: The module, set up.
        changed: Names of the attributes that its hooks have set.
        data: The data.
        epochs: ``max_epochs`` of the outer Trainer.
    """
    counts: Mapping[int, str] = getattr(data, "pooled_numbers", {})
    own, read = getattr(data, "datamodule", None), names_in_code(module) if counts else ()
    looked_at = [(module, name) for name in sorted(changed)]
    looked_at += [] if own is None else [(own, name) for name in vars(own) if name in read]
    known = {number * times for number in counts for times in (1, epochs or 1)}
    found = [
        f"{type(owner).__name__}.{name} = {value:g}"
        for owner, name in looked_at
        for value in _numbers(vars(owner).get(name))
        if value in known or any(n > 1 and math.isclose(value, 1 / n) for n in known)
    ]
    if found:
        sizes, first = "; ".join(f"{number} {what}" for number, what in counts.items()), data.participating[0]
        warnings.warn(
            f"{'; '.join(dict.fromkeys(found))}: computed from the data of all clients ({sizes}), but client {first} "
            f"has only {len(data.client_data(first).train)} training items: a schedule of that length is too slow. "
            "Compute it in configure_optimizers or later, where len(self.trainer.train_dataloader), "
            "self.trainer.num_training_batches and self.trainer.estimated_stepping_batches are the client's own",
            stacklevel=2,
        )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
