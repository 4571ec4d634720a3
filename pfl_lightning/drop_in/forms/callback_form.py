"""``FederatedLoop(method=...)``: the federation of a project is made by a callback, in the Trainer's own call."""

from __future__ import annotations

import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.datamodules.adapters.stages import brings
from pfl_lightning.drop_in.federate import check_options, federate
from pfl_lightning.drop_in.forms.checks import check_labels
from pfl_lightning.drop_in.forms.given_data import with_loaders
from pfl_lightning.drop_in.outer.federation import ModuleFederation
from pfl_lightning.drop_in.predictions import warn_of_unshared_parts
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.lightning_private import GivenData, attached, data_given_to, put_in_place
from pfl_lightning.names import method_named
from pfl_lightning.older_package import written_class
from pfl_lightning.state.checkpoints import FEDERATION, read_checkpoint, use_atomic_files
from pfl_lightning.state.equality import same

_log = logging.getLogger(__name__)

_OWN_DATA = ("datamodule", "train_dataloaders")
_DIVIDE = {*_OWN_DATA, "val_dataloaders", "test_dataloaders", "partition", "num_clients", "shared_evaluation"}


class CallbackForm:
    """Puts the federation of a module in the module's place when a Trainer begins to fit, validate, test or predict.

    The ``log`` setter of :class:`~pfl_lightning.callbacks.FederatedLoop` calls it, the first that a Trainer does.

    The federation is made once for a module, and goes on in later calls with it: what is tested after a fit is what
    was fitted. Another module of its class, such as one that ``load_from_checkpoint`` read, is validated or tested on
    the same clients, and the federation of the fit stays.

    Args:
        method: A class of :mod:`pfl_lightning.methods` or a partial of one, or its name or import path.
        options: Of :func:`~pfl_lightning.drop_in.federate.federate`, hyper-parameters of the method among them.

    Attributes:
        federation: The federation; ``None`` before the first call of the Trainer.
        data: Its data.

    Raises:
        ConfigurationError: There is no such method, or no such option.
    """

    def __init__(self, method: Any, **options: Any) -> None:
        self.method = method_named(method) if isinstance(method, str) else method
        self.options = options
        check_labels(options.get("labels"))
        check_options(self.method, options)
        # A LightningCLI gives all that it knows of; None is not a data module.
        defaults = {name: parameter.default for name, parameter in inspect.signature(federate).parameters.items()}
        self.options = {n: v for n, v in options.items() if n not in defaults or v is not defaults[n]}
        self._has_own_data = any(name in self.options for name in _OWN_DATA)
        self.federation: ModuleFederation | None = None
        self.data: FederatedDataModule | None = None
        self._module: L.LightningModule | None = None
        self._loaded: tuple[Any, Any] = (None, None)  # another module that is evaluated, and its federation
        self._unfitted: L.LightningModule | None = None  # what is evaluated with the weights that it has
        self._given = GivenData()
        self._values: Any = None  # of the fitted module, while it predicts

    def take_over(self, trainer: L.Trainer) -> bool:
        """Let the Trainer's call continue with the federation of the module that it was given.

        To predict, the module stays where it is: it has the global model after a fit, and gets that of a checkpoint.

        Returns:
            Whether the federation is a new one.

        Raises:
            ConfigurationError: Says what of the project cannot be federated, and what to do.
        """
        found: Any = trainer.lightning_module
        module: Any = self._module if found is self.federation else found
        if found is not None and found is self._loaded[1]:
            module = self._loaded[0]
        given, is_new = data_given_to(trainer, found), module is not self._module
        use_atomic_files(trainer)
        if trainer.state.fn == TrainerFn.PREDICTING:
            if found is not module:
                put_in_place(trainer, module, given.datamodule, **given.loaders)
            if self.federation is not None and not is_new:
                self._values = self.federation.owner.look()
            return False
        evaluates = trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        is_other = is_new and evaluates and self._is_alike(module)
        if is_new and not is_other:
            self.federation = self.data = None
        data: Any = None
        if given.is_part_of(self._given) or (self._has_own_data and not given.is_for_evaluation):
            data = self.data
        elif self.data is not None and given.is_for_evaluation:
            data = with_loaders(self.data, given.loaders)
        if data is None:
            # Another instance of the fit's data module, or other data, are divided by the same rule.
            made, data = self._made(self._module if is_other else module, given)
            self.data, self._given = data, given
            if self.federation is None:
                self.federation, self._module = made, module
                self._unfitted = module if evaluates else None
        assert self.federation is not None
        federation = self._of_another(trainer, module, data) if is_other else self.federation
        put_in_place(trainer, federation, data)
        return is_new and federation is self.federation

    def begin_evaluation(self, trainer: L.Trainer, federation: Any) -> None:
        """Warn of clients that have no weights of their own: now it is known whether there is a ``ckpt_path``."""
        module, self._unfitted = self._unfitted, None
        if module is None or trainer.ckpt_path is not None:
            return
        personal = federation.clients.personal.get(0).values()
        if module is not self._module or any(value.is_floating_point() for value in personal):
            warnings.warn(
                f"every client is evaluated with the weights that this {type(module).__name__} holds, which are from "
                "no checkpoint of this Trainer. Pass ckpt_path= (of a federation), or the module that was fitted, "
                "to evaluate each with its own model",
                stacklevel=2,
            )

    def begin_predictions(self, trainer: L.Trainer, module: Any) -> None:
        """Warn of parts of the global model that no client has trained."""
        warn_of_unshared_parts(module, self.federation if self._is_alike(module) else None, trainer.ckpt_path)

    def leave(self) -> None:
        """The Trainer's call is over."""
        self._unfitted = None
        if self.federation is not None and self._values is not None:  # hooks of predictions may have changed the module
            self.federation.owner.end_call(self._values)
        self._values = None

    def _is_alike(self, module: Any) -> bool:
        return self._module is not None and written_class(module) is written_class(self._module)

    def _of_another(self, trainer: L.Trainer, module: Any, data: Any) -> ModuleFederation:
        """A federation of another module over the same clients, for an evaluation; :attr:`federation` stays.

        Where the module has the weights of a checkpoint of the Trainer, it is the federation as it was when that was
        written, each client with its own parts; otherwise every client has the module's weights.
        """
        assert self.federation is not None
        known = _DIVIDE if self.federation.reads_classes else {*_DIVIDE, "labels"}
        options = {name: value for name, value in self.options.items() if name not in known}
        checkpoint = _checkpoint_of(module, trainer)
        with attached(module, None):
            federation, _ = federate(module, data, method=self.method, **options)
        self._loaded = module, federation
        if checkpoint is None:
            self._unfitted = module
            return federation
        # Set up before it is the Trainer's turn, whose data module is another one until then.
        before, trainer.datamodule, federation.trainer = trainer.datamodule, data, trainer  # type: ignore[attr-defined]
        stage = TrainerFn(trainer.state.fn).value
        try:
            data.prepare_data()
            data.setup(stage)
            federation.setup(stage)
            federation.on_load_checkpoint(checkpoint)
            federation.load_state_dict(checkpoint["state_dict"])
        finally:
            trainer.datamodule = before  # type: ignore[attr-defined]
        return federation

    def _made(self, module: Any, given: GivenData) -> tuple[ModuleFederation, Any]:
        """A federation of a module and of the data that the Trainer was given, or the callback."""
        if given.is_for_evaluation and not self._has_own_data and not brings(module, "train_dataloader"):
            raise ConfigurationError(
                f"the Trainer was given only {', '.join(given.loaders)}, but clients are known by their training "
                "items: call trainer.fit first, pass a LightningDataModule, or pass the training loader to "
                "FederatedLoop(..., train_dataloaders=...)"
            )
        own = {} if self._has_own_data else {"datamodule": given.datamodule, **given.loaders}
        own = {name: value for name, value in own.items() if name not in self.options}
        if given.datamodule is not None:
            given.datamodule.trainer = None
        with attached(module, None):  # one that a Trainer holds would be copied with it
            # In one call with the options, where jsonargparse finds their names and types.
            return federate(module, method=self.method, **own, **self.options)


def _checkpoint_of(module: L.LightningModule, trainer: Any) -> dict[str, Any] | None:
    """The checkpoint that the Trainer has written of a federation with the module's weights; ``None`` for none."""
    state = module.state_dict()
    for callback in trainer.checkpoint_callbacks:
        paths = [getattr(callback, name, "") for name in ("best_model_path", "last_model_path")]
        paths += sorted(Path(callback.dirpath).glob("*.ckpt")) if getattr(callback, "dirpath", None) else []
        for path in paths:
            try:
                found = read_checkpoint(path, weights_only=True) if path and Path(path).is_file() else {}
            except CheckpointError:  # damaged, or of something else that lies there
                continue
            # It may leave out some values.
            tensors = {name: v for name, v in found.get("state_dict", {}).items() if isinstance(v, torch.Tensor)}
            if FEDERATION in found and tensors and all(same(state.get(name), v) for name, v in tensors.items()):
                name = type(module).__name__
                _log.info("%s has the weights of %s: clients are evaluated as they were then", name, path)
                return found
    return None
