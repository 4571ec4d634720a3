"""What callbacks of a user's project see of a federation: the global model, and the module's hyper-parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import lightning as L
import torch
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn

from pfl_lightning.drop_in.outer.logged_hparams import logged_hparams
from pfl_lightning.federation import Federation
from pfl_lightning.lightning_private import HYPERPARAMETERS, name_of_hyperparameters, trainer_or_none
from pfl_lightning.state.checkpoints.module import plain, python_numbers

__all__ = ["ShowsGlobalModel"]

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

    @property
    @abstractmethod
    def given_module(self) -> L.LightningModule:
        """The module that the federation was made of."""

    @abstractmethod
    def global_model(self) -> L.LightningModule:
        """A new copy of the global model."""

    @abstractmethod
    def load_global(self, module: nn.Module) -> None:
        """Load the global model into a copy of the module."""

    @abstractmethod
    def fill_given_module(self) -> None:
        """Load the global model into the module that was given."""

    @property
    def shown(self) -> L.LightningModule:
        """The global model after the last aggregation, in evaluation mode, on the federation's device.

        It is one copy, loaded again when it is asked for after the server has changed. What is written to it reaches
        neither server nor clients. Before the federation is set up, it is the module that was given.
        """
        if not self.is_set_up:
            return self.given_module
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
        if name.startswith("__") or name in _NEVER_SHOWN or hasattr(type(self), name) or "_given" not in vars(self):
            return False
        own: Any = self.clients.models[0] if self.is_set_up else None
        module = self.given_module if own is None else own.module
        if any(name in vars(module).get(where, ()) for where in ("_parameters", "_buffers", "_modules")):
            return True
        searches = type(module).__getattr__ is not nn.Module.__getattr__
        return name in vars(module) or hasattr(type(module), name) or (searches and hasattr(module, name))

    def take_hparams(self, method: str) -> None:
        """Have the module's own hyper-parameters, and the name of the method.

        Args:
            method: Name of the method.
        """
        self._hparams = AttributeDict({"method": method, **self.given_module.hparams})

    def log_hparams(self, method: str, datamodule: Any) -> None:
        """Let loggers get what is plain of the project's hyper-parameters, before the Trainer asks for them.

        Args:
            method: Name of the method.
            datamodule: The project's data module; ``None`` for none.
        """
        self._hparams_initial = AttributeDict(logged_hparams(method, self.given_module, datamodule))
        self._log_hyperparams = bool(self._hparams_initial)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what can be read without the project's classes, where ``load_from_checkpoint`` looks for it.

        The method's name is left out: ``load_from_checkpoint`` takes these for arguments of the module.
        """
        own: Any = self.given_module
        kept = {n: v for n, v in python_numbers(dict(own.hparams)).items() if plain(n) and plain(v)}
        for key in (self.CHECKPOINT_HYPER_PARAMS_KEY, self.CHECKPOINT_HYPER_PARAMS_NAME):
            checkpoint.pop(key, None)
        if kept:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = kept
        if own.hparams and (name := name_of_hyperparameters(own)) is not None:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_NAME] = name
        super().on_save_checkpoint(checkpoint)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the clients' states; the global model is then another."""
        super().set_extra_state(state)
        self.forget_shown()

    def forget_shown(self) -> None:
        """Let the global model be loaded when it is asked for the next time."""
        if self._shown is not None:
            self._shown.holds = None

    def __getstate__(self) -> dict[str, Any]:
        """State without the copy that is shown, which is made when it is asked for."""
        return {**super().__getstate__(), "_shown": None}
