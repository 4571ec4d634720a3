"""``FederatedLoop(method=...)``: the federation of a project is made by a callback, in the Trainer's own call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import lightning as L

from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.drop_in.checks import split_method
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.drop_in.federation import ModuleFederation
from pfl_lightning.drop_in.later_loaders import with_loaders
from pfl_lightning.drop_in.trainer_data import GivenData, attach_logging, data_given_to, put_in_place, trainer_of
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation

__all__ = ["CallbackForm", "ProjectCallback"]

_OWN_DATA = ("datamodule", "train_dataloaders")


class CallbackForm:
    """Puts the federation of a module in the module's place when a Trainer begins to fit, validate, test or predict.

    The federation is made once for a module, and goes on in later calls with it: what is tested after a fit is what
    was fitted.

    Args:
        method: A class of :mod:`pfl_lightning.methods` or a partial of one, its name or import path, or a dictionary
            with ``class_path`` and ``init_args``.
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
        _check_options(self.method, options)
        self.federation: ModuleFederation | None = None
        self.data: FederatedDataModule | None = None
        self._module: L.LightningModule | None = None
        self._given = GivenData()

    def take_over(self, trainer: L.Trainer) -> bool:
        """Let the Trainer's call go on with the federation of the module that it was given.

        Returns:
            Whether the federation is a new one.

        Raises:
            ConfigurationError: Says what of the project cannot be federated, and what to do.
        """
        found: Any = trainer.lightning_module
        module = self._module if found is self.federation else found
        if isinstance(module, Federation):
            raise ConfigurationError(
                "FederatedLoop(method=...) makes the federation of a LightningModule itself, and was given a "
                f"{type(module).__name__}: give the Trainer the module and data as they are, or leave method away"
            )
        given, is_new = data_given_to(trainer, found), module is not self._module
        if is_new:
            self.federation = self.data = None
        data = self._data_of(given) if self.data is not None else None
        if data is None:
            _check_divisible(given, self.options)
            data = self._made(trainer, module, given)
        assert self.federation is not None
        put_in_place(trainer, self.federation, data)
        return is_new

    def _data_of(self, given: GivenData) -> Any:
        """Data of the federation that there is, for what is given now; ``None`` where they are to be divided first."""
        if given.is_part_of(self._given) or (self._has_own_data and not given.is_for_evaluation):
            return self.data
        return with_loaders(self.data, given.loaders) if given.is_for_evaluation else None

    @property
    def _has_own_data(self) -> bool:
        return any(name in self.options for name in _OWN_DATA)

    def _made(self, trainer: L.Trainer, module: Any, given: GivenData) -> Any:
        """Make the federation and its data, or the data alone where a federation of the module goes on."""
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
            module.trainer = trainer
        if self.federation is None:
            self.federation, self._module = federation, module
        self.data, self._given = data, given
        return data


class ProjectCallback(L.Callback):
    """A callback that makes the federation of a project, if it is given a method.

    Args:
        method: See :class:`CallbackForm`; ``None`` for a Trainer that is given a Federation.
        options: See :class:`CallbackForm`.

    Raises:
        ConfigurationError: There is no such method, or no such option.
    """

    def __init__(self, method: Any = None, **options: Any) -> None:
        if method is None and options:
            raise ConfigurationError(
                f"FederatedLoop has no option {', '.join(sorted(options))} without a method, such as "
                "FederatedLoop(method=FedPer, num_clients=10)"
            )
        self._form = None if method is None else CallbackForm(method, **options)
        self._is_in_place = False
        self._log: Any = None

    @property
    def federation(self) -> ModuleFederation | None:
        """The federation that was made of the Trainer's module; ``None`` before, and without a method."""
        return None if self._form is None else self._form.federation

    @property
    def data(self) -> FederatedDataModule | None:
        """The data of :attr:`federation`."""
        return None if self._form is None else self._form.data

    # A Trainer assigns it to every callback in a call of fit, validate, test or predict, as soon as it knows its module
    # and before anything is set up: every hook of module, data and callbacks is then called once, and in the usual
    # order. In `setup` the data would have been prepared already, and would be once more.
    @property
    def log(self) -> Any:
        """The ``log`` of the Trainer's module."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        if self._form is not None and not self._is_in_place:
            self._is_in_place = True
            if self._form.take_over(trainer_of(log)):
                self.begin()

    def begin(self) -> None:
        """Forget the rounds of another federation."""

    def follow(self, trainer: L.Trainer) -> None:
        """In ``setup``: let all callbacks log where this one has put a federation in place."""
        if self._is_in_place:
            attach_logging(trainer)

    def leave(self) -> None:
        """The Trainer's call is over."""
        self._is_in_place = False


def _check_divisible(given: GivenData, options: Mapping[str, Any]) -> None:
    if given.is_for_evaluation and not any(name in options for name in _OWN_DATA):
        raise ConfigurationError(
            f"the Trainer was given {', '.join(given.loaders)} alone, and clients are known by their training items: "
            "call trainer.fit first, give a LightningDataModule, or give the training loader to FederatedLoop(..., "
            "train_dataloaders=...)"
        )


def find_method(given: Any) -> Any:
    """A method by its class, its name (``"FedPer"``), its import path, or a dictionary of a config.

    Raises:
        ConfigurationError: There is none.
    """
    if isinstance(given, Mapping):
        unknown = given.keys() - {"class_path", "init_args", "dict_kwargs"}
        if "class_path" not in given or unknown:
            raise ConfigurationError(f"method as a dictionary has class_path and init_args, got {dict(given)}")
        arguments = {**(given.get("init_args") or {}), **(given.get("dict_kwargs") or {})}
        return partial(find_method(given["class_path"]), **arguments)
    if not isinstance(given, str):
        split_method(given)
        return given
    path, _, name = given.rpartition(".")
    try:
        found = getattr(import_module(path or "pfl_lightning.methods"), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"method {given!r} cannot be found ({error}): give a name of pfl_lightning.methods, such as 'FedPer', or "
            "an import path, such as 'pfl_lightning.methods.FedPer'"
        ) from error
    split_method(found)
    return found


def _check_options(method: Any, options: Iterable[str]) -> None:
    client, _ = split_method(method)
    own = inspect.signature(federate).parameters.keys() - {"module", "method", "cohort", "hyperparameters"}
    known = own | set(_hyperparameters(client))
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else f", which has {', '.join(sorted(known))}"
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
