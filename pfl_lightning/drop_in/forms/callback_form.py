"""``FederatedLoop(method=...)``: the federation of a project is made by a callback, in the Trainer's own call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.datamodules.adapters.loading.stages import brings
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.drop_in.forms.checks import check_labels, split_method
from pfl_lightning.drop_in.forms.given_data import with_loaders
from pfl_lightning.drop_in.forms.loaded_module import GlobalWeights, checkpoint_of, restore, warn_of_other_weights
from pfl_lightning.drop_in.forms.trainer_data import GivenData, data_given_to, put_in_place
from pfl_lightning.drop_in.outer.federation import ModuleFederation
from pfl_lightning.drop_in.predictions import first_values
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.names import did_you_mean, method_named
from pfl_lightning.older_package import written_class
from pfl_lightning.state.checkpoints.file import use_atomic_files

__all__ = ["CallbackForm"]

_OWN_DATA = ("datamodule", "train_dataloaders")
_DIVIDE = {*_OWN_DATA, "val_dataloaders", "test_dataloaders", "partition", "num_clients", "shared_evaluation"}


class CallbackForm:
    """Puts the federation of a module in the module's place when a Trainer begins to fit, validate, test or predict.

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
        self.method = find_method(method)
        self.options = options
        check_labels(options.get("labels"))
        _check_options(self.method, options)
        # A LightningCLI gives all that it knows of; None is not a data module.
        defaults = {name: parameter.default for name, parameter in inspect.signature(federate).parameters.items()}
        self.options = {n: v for n, v in options.items() if n not in defaults or v is not defaults[n]}
        self.federation: ModuleFederation | None = None
        self.data: FederatedDataModule | None = None
        self._module: L.LightningModule | None = None
        self._loaded: tuple[Any, Any] = (None, None)  # another module that is evaluated, and its federation
        self._unfitted: L.LightningModule | None = None  # what is evaluated with the weights that it has
        self._given = GivenData()
        self._predicting: GlobalWeights | None = None

    def take_over(self, trainer: L.Trainer) -> bool:
        """Let the Trainer's call go on with the federation of the module that it was given.

        Returns:
            Whether the federation is a new one.

        Raises:
            ConfigurationError: Says what of the project cannot be federated, and what to do.
        """
        found: Any = trainer.lightning_module
        module = self._module if found is self.federation else found
        if found is not None and found is self._loaded[1]:
            module = self._loaded[0]
        if isinstance(module, Federation):
            raise ConfigurationError(
                "FederatedLoop(method=...) makes the federation of a LightningModule itself, and was given a "
                f"{type(module).__name__}: give the Trainer the module and data as they are, or leave method out"
            )
        given, is_new = data_given_to(trainer, found), module is not self._module
        use_atomic_files(trainer)
        if trainer.state.fn == TrainerFn.PREDICTING:
            self._predict(trainer, module, given)
            return False
        federation, data = self._federation_of(trainer, module, given)
        put_in_place(trainer, federation, data)
        return is_new and federation is self.federation

    def begin_evaluation(self, trainer: L.Trainer, federation: Any) -> None:
        """Warn of clients that have no weights of their own: now it is known whether there is a ``ckpt_path``."""
        module, self._unfitted = self._unfitted, None
        if module is not None and trainer.ckpt_path is None:
            warn_of_other_weights(module, module is not self._module, federation)

    def leave(self) -> None:
        """The Trainer's call is over."""
        self._unfitted = None
        if self._predicting is not None:
            self._predicting.leave()
            self._predicting = None

    def _predict(self, trainer: L.Trainer, module: Any, given: GivenData) -> None:
        """Leave the module where it is: it has the global model after a fit, and gets that of a checkpoint."""
        if trainer.lightning_module is not module:
            put_in_place(trainer, module, given.datamodule, **given.loaders)
        changes = self.federation.owner.changes if self.federation is not None and module is self._module else None
        made = partial(self._federation_of, trainer, module, given)
        self._predicting = GlobalWeights(module, made, given, trainer, changes)
        before = None if self._module is None else written_class(self._module)
        if self.federation is not None and written_class(module) is before:
            self._predicting.warn(first_values(self.federation))

    def _federation_of(self, trainer: L.Trainer, module: Any, given: GivenData) -> tuple[ModuleFederation, Any]:
        if module is not self._module:
            if self._module is not None and self._is_evaluated_alike(trainer, module):
                data = self._data_of(given)
                if data is None:  # another instance of the fit's data module, or other data: divided by the same rule
                    _check_divisible(module, given, self.options)
                    data = self._made(trainer, self._module, given, holds=self._module._trainer)
                return self._of_another(trainer, module, data), data
            self.federation = self.data = None
        data = self._data_of(given) if self.data is not None else None
        if data is None:
            _check_divisible(module, given, self.options)
            data = self._made(trainer, module, given, holds=trainer)
        assert self.federation is not None
        return self.federation, data

    def _is_evaluated_alike(self, trainer: L.Trainer, module: Any) -> bool:
        """Whether a module of the fitted one's class is to be validated or tested."""
        if self._module is None or self.data is None:
            return False
        evaluates = trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        return evaluates and written_class(module) is written_class(self._module)

    def _of_another(self, trainer: L.Trainer, module: Any, data: Any) -> ModuleFederation:
        """A federation of another module over the same clients, for an evaluation; :attr:`federation` stays.

        Where the module has the weights of a checkpoint of the Trainer, it is the federation as it was when that was
        written, each client with its own parts; otherwise every client has the module's weights.
        """
        assert self.federation is not None
        known = _DIVIDE if self.federation.reads_classes else {*_DIVIDE, "labels"}
        options = {name: value for name, value in self.options.items() if name not in known}
        checkpoint = checkpoint_of(module, trainer)
        module.trainer = None
        try:
            federation, _ = federate(module, self.data, method=self.method, **options)
        finally:
            module.trainer = trainer
        if checkpoint is None:
            self._unfitted = module
        else:
            restore(federation, data, trainer, checkpoint, TrainerFn(trainer.state.fn).value)
        self._loaded = module, federation
        return federation

    def _data_of(self, given: GivenData) -> Any:
        """Data of the federation that there is, for what is given now; ``None`` where they are to be divided first."""
        predicts = "predict_dataloaders" in given.loaders
        if predicts or given.is_part_of(self._given) or (self._has_own_data and not given.is_for_evaluation):
            return self.data
        if not given.is_for_evaluation:
            return None
        return with_loaders(self.data, given.loaders)

    @property
    def _has_own_data(self) -> bool:
        return any(name in self.options for name in _OWN_DATA)

    def _made(self, trainer: L.Trainer, module: Any, given: GivenData, *, holds: L.Trainer | None) -> Any:
        """Make the federation and its data, or the data alone where a federation of the module goes on.

        Afterwards the module belongs to the Trainer ``holds``.
        """
        own = {} if self._has_own_data else {"datamodule": given.datamodule, **given.loaders}
        own = {name: value for name, value in own.items() if name not in self.options}
        # A module that a Trainer holds would be copied with it.
        for attached in (module, given.datamodule):
            if attached is not None:
                attached.trainer = None
        try:
            # In one call with the options, where jsonargparse finds their names and types.
            federation, data = federate(module, method=self.method, **own, **self.options)
        finally:
            module.trainer = holds
        if self.federation is None:
            self.federation, self._module = federation, module
            evaluates = trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
            self._unfitted = module if evaluates else None
        self.data, self._given = data, given
        return data


def _check_divisible(module: Any, given: GivenData, options: Mapping[str, Any]) -> None:
    has_own = any(name in options for name in _OWN_DATA) or brings(module, "train_dataloader")
    if given.is_for_evaluation and not has_own:
        raise ConfigurationError(
            f"the Trainer was given {', '.join(given.loaders)} alone, and clients are known by their training items: "
            "call trainer.fit first, give a LightningDataModule, or give the training loader to FederatedLoop(..., "
            "train_dataloaders=...)"
        )


def find_method(given: Any) -> Any:
    """A method by its class or a partial of it, its name (``"FedPer"``) or its import path.

    Raises:
        ConfigurationError: There is none.
    """
    if not isinstance(given, str):
        if hasattr(given, "class_path") or isinstance(given, Mapping):
            raise ConfigurationError(
                "FederatedLoop's method is a name or an import path in a config, such as 'FedProx', and its hyper-"
                "parameters stand beside it: in a LightningCLI's config as dict_kwargs, such as dict_kwargs: {mu: 0.1}"
            )
        split_method(given)
        return given
    found = method_named(given)
    split_method(found)
    return found


def _check_options(method: Any, options: Iterable[str]) -> None:
    client, _ = split_method(method)
    own = inspect.signature(federate).parameters.keys() - {"module", "method", "cohort", "hyperparameters"}
    known = own | set(_hyperparameters(client))
    for name in options:
        if name not in known:
            meant = did_you_mean(name, sorted(known)) or f", which has {', '.join(sorted(known))}"
            raise ConfigurationError(f"FederatedLoop(method={client.__name__}) has no option {name!r}{meant}")


def _hyperparameters(client: type) -> Iterable[str]:
    """Names that a method's ``__init__`` takes, with those that it passes on."""
    for base in client.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        yield from (p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
