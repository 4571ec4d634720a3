"""What callbacks of a user's project see of a federation: the global model, and the module's hyper-parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any
from weakref import ref

import lightning as L
import torch
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn

from pfl_lightning.drop_in.client.plain_state import load_plain_state
from pfl_lightning.drop_in.client.user_module import NETWORKS
from pfl_lightning.drop_in.outer.user_module_owner import UserModuleOwner
from pfl_lightning.errors import FederationError
from pfl_lightning.federation import Federation
from pfl_lightning.lightning_private import (
    HYPERPARAMETERS,
    hyperparameters_of,
    name_of_hyperparameters,
    trainer_or_none,
)
from pfl_lightning.state.checkpoints.file import plain, python_numbers

__all__ = ["ShowsGlobalModel", "logged_hparams"]

_NEVER_SHOWN = {
    *(name for kind in Federation.__mro__ for name in vars(kind).get("__annotations__", ())),
    "_orig_mod",  # of compiled modules
    *HYPERPARAMETERS,
    "training_epoch_end",  # hooks of Lightning 1, for which Lightning looks
    "validation_epoch_end",
    "test_epoch_end",
}
"""Names that are the federation's own, though it may not have them yet, and those that Lightning asks for."""


@dataclass
class _Shown:
    """A copy of the module that holds the global model; apart, so that it is no part of the federation's own state.

    Attributes:
        module: The copy.
        holds: Which values it holds; ``None`` for old ones.
    """

    module: L.LightningModule
    holds: _Values | None = None


class _Values:
    """The values of some tensors, without the tensors: a new one may lie where an old one was.

    Args:
        tensors: The tensors.
        device: Where they are wanted.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self._held = [(ref(tensor), tensor._version) for tensor in tensors]
        self._device = device

    def are_those_of(self, tensors: Iterable[Tensor], device: torch.device) -> bool:
        """Whether nothing has changed since."""
        now = list(tensors)
        return (
            device == self._device
            and len(now) == len(self._held)
            and all(old() is new and version == new._version for (old, version), new in zip(self._held, now))
        )


class ShowsGlobalModel(Federation):
    """Gives callbacks the global model where they ask the federation for what only the user's module has.

    ``pl_module(x)``, ``pl_module.layer``, ``pl_module.method()`` are those of :attr:`shown`. Names that the federation
    itself has (``models``, ``clients``, ``server``, ``data``, ``round``, ...) stay its own, and so do all hooks.
    """

    _shown: _Shown | None = None

    owner: UserModuleOwner
    """The module that the federation was made of, and its copies."""

    @property
    def user_module(self) -> L.LightningModule:
        """The module that the federation was made of; when a call of the Trainer is over, it has the global model."""
        return self.owner.module

    def global_model(self) -> L.LightningModule:
        """The model that the server would send, of the class that was given; it is the caller's.

        What never travels under the method has the values that it had before the first round.
        """
        if not self.is_set_up:
            raise FederationError("there is no global model before trainer.fit, validate or test has set it up")
        client: Any = copy.deepcopy(self.clients.models[0])
        client.user_module.networks_as_given()
        module: L.LightningModule = client.exported_module()
        self.load_global(module)
        return module

    def load_global(self, module: nn.Module) -> None:
        """Load the model that the server would send into a copy of the module."""
        state = {**self.clients.first_state(0), **self.server.broadcast(0, self.round).weights}
        for prefix in NETWORKS:
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            load_plain_state(module, own)

    @property
    def shown(self) -> L.LightningModule:
        """The global model after the last aggregation, in evaluation mode, on the federation's device.

        It is one copy, loaded again when it is asked for after the server has changed. What is written to it reaches
        neither server nor clients. Before the federation is set up, it is the module that was given.
        """
        if not self.is_set_up:
            return self.user_module
        values = [*self.server.parameters(), *self.server.buffers()]
        known = self._shown
        if known is not None and known.holds is not None and known.holds.are_those_of(values, self.device):
            if trainer_or_none(known.module) is not trainer_or_none(self):
                known.module.trainer = trainer_or_none(self)
            return known.module
        with torch.inference_mode(False), torch.no_grad():  # callbacks may ask for gradients later
            if self._shown is None:
                self._shown = _Shown(self.global_model())
                vars(self._shown.module)["log"] = self.log  # a method of the module may log
            else:
                self.load_global(self._shown.module)
            module = self._shown.module.to(self.device).eval()
        module.trainer = trainer_or_none(self)
        self._shown.holds = _Values(values, self.device)
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the global model gives, in evaluation mode; see :attr:`shown`."""
        try:
            return self.shown.eval()(*args, **kwargs)
        except Exception as error:  # whatever the module raises for a number
            if args and isinstance(args[0], Tensor) and args[0].numel() == 1 and not args[0].is_floating_point():
                error.add_note(
                    "loaders of the Trainer of a federation give numbers of clients: trainer.datamodule.datamodule has "
                    "the project's own, and callbacks of federate(..., local_callbacks=[...]) see the clients' batches"
                )
            raise

    def __getattr__(self, name: str) -> Any:
        """An attribute of the global model, where the federation has none of this name; see :attr:`shown`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self._shows(name):
                raise
        return getattr(self.shown, name)

    def _shows(self, name: str) -> bool:
        if name.startswith("__") or name in _NEVER_SHOWN or hasattr(type(self), name) or "owner" not in vars(self):
            return False
        own: Any = self.clients.models[0] if self.is_set_up else None
        module = self.user_module if own is None else own.module
        if any(name in vars(module).get(where, ()) for where in ("_parameters", "_buffers", "_modules")):
            return True
        searches = type(module).__getattr__ is not nn.Module.__getattr__
        return name in vars(module) or hasattr(type(module), name) or (searches and hasattr(module, name))

    def log_hparams(self, method: str, datamodule: Any) -> None:
        """Let loggers get what is plain of the project's hyper-parameters, before the Trainer asks for them.

        Args:
            method: Name of the method.
            datamodule: The project's data module; ``None`` for none.
        """
        self._hparams_initial = AttributeDict(logged_hparams(method, self.user_module, datamodule))
        self._log_hyperparams = bool(self._hparams_initial)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what can be read without the project's classes, where ``load_from_checkpoint`` looks for it.

        The method's name is left out: ``load_from_checkpoint`` takes these for arguments of the module.
        """
        own: Any = self.user_module
        kept = {n: v for n, v in python_numbers(dict(own.hparams)).items() if plain(n) and plain(v)}
        for key in (self.CHECKPOINT_HYPER_PARAMS_KEY, self.CHECKPOINT_HYPER_PARAMS_NAME):
            checkpoint.pop(key, None)
        if kept:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = kept
        if own.hparams and (name := name_of_hyperparameters(own)) is not None:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_NAME] = name
        super().on_save_checkpoint(checkpoint)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the clients' states; the global model is then another, and is loaded when it is asked for."""
        super().set_extra_state(state)
        if self._shown is not None:
            self._shown.holds = None

    def __getstate__(self) -> dict[str, Any]:
        """State without the copy that is shown, which is made when it is asked for."""
        return {**super().__getstate__(), "_shown": None}


def logged_hparams(method: str, module: L.LightningModule, datamodule: Any = None) -> dict[str, Any]:
    """The module's hyper-parameters and its data module's, as a plain run logs them, and the name of the method.

    Args:
        method: Name of the method, which joins what the module logs.
        module: The module.
        datamodule: The project's data module, if it has one.

    Returns:
        What is made of numbers and words, in lists and dictionaries, too; nothing where neither has any to log.
    """
    own = hyperparameters_of(module)
    found = {} if own is None else {"method": method, **own}
    return dict(_plain_entries({**found, **(hyperparameters_of(datamodule) or {})}))


def _plain_entries(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        made = _made_plain(value)
        if plain(made):
            yield str(name), made


def _made_plain(value: Any) -> Any:
    """Containers of other kinds, such as OmegaConf's, as dictionaries and lists; what cannot be made plain as it is."""
    value = python_numbers(value)
    if plain(value):
        return value
    if isinstance(value, Mapping):
        return dict(_plain_entries(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_made_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, PurePath) else value
