"""The loaders of a project by stage, from its data module or as they are given to a Trainer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.datamodules.adapters.sources import check_sampler
from pfl_lightning.lightning_private import attached, combining_mode

DATA = (Dataset, DataLoader, LightningDataModule)
"""What of a module is data."""

EVALUATED: Literal["sequential"] = "sequential"

TRAINED: Literal["max_size_cycle"] = "max_size_cycle"
"""How a Trainer combines loaders, where it is not said."""


@dataclass(frozen=True)
class StageLoaders:
    """Loaders of one stage.

    Attributes:
        loaders: The loaders, in the order of ``dataloader_idx``.
        shape: How they are combined, with something at the place of each; ``None`` for a single loader as it is.
    """

    loaders: tuple[Any, ...]
    shape: CombinedLoader | None = None

    @classmethod
    def of(cls, given: Any, training: bool) -> StageLoaders:
        """Loaders as a hook of a data module gives them.

        Example:
            >>> found = StageLoaders.of({"a": DataLoader([1]), "b": DataLoader([2])}, training=True)
            >>> len(found.loaders), combining_mode(found.shape)
            (2, 'max_size_cycle')
        """
        while not training and isinstance(given, list | tuple) and len(given) == 1:
            given = given[0]
        if not isinstance(given, list | tuple | dict | CombinedLoader):
            return cls((given,))
        if not isinstance(given, CombinedLoader):
            given = CombinedLoader(given, TRAINED if training else EVALUATED)
        places = CombinedLoader(given.iterables, combining_mode(given))
        places.flattened = [object() for _ in given.flattened]
        return cls(tuple(given.flattened), places)


class GivenLoaders(LightningDataModule):
    """Loaders that are given to a Trainer as they are, without a data module.

    Args:
        train: Loader of training batches.
        validation: Loader of validation batches; ``None`` for none.
        test: Loader of test batches; ``None`` for none.
        module: The LightningModule, whose own hooks give the loaders that are ``None``; ``None`` for no such module.

    Example:
        >>> own = GivenLoaders(DataLoader([1.0, 2.0, 3.0], batch_size=2))
        >>> [(name, loaders.loaders[0].batch_size) for name, loaders in loaders_of(own).items()]
        [('train', 2)]
    """

    has_hooks = False  # of its own, which an inner Trainer would call

    def __init__(
        self, train: Any = None, validation: Any = None, test: Any = None, *, module: L.LightningModule | None = None
    ) -> None:
        super().__init__()
        self._given = {"train_dataloader": train, "val_dataloader": validation, "test_dataloader": test}
        self._module = [] if module is None else [module]  # no attribute of its own: it is the federation's

    def setup(self, stage: str) -> None:
        """Set up the module, whose loaders are asked for next."""
        for module in self._module:
            with attached(module, self.trainer):
                module.setup(stage)

    def train_dataloader(self) -> Any:
        """The loader of training batches."""
        return self._loader("train_dataloader")

    def val_dataloader(self) -> Any:
        """The loader of validation batches, if there is one."""
        return self._loader("val_dataloader")

    def test_dataloader(self) -> Any:
        """The loader of test batches, if there is one."""
        return self._loader("test_dataloader")

    def predict_dataloader(self) -> Any:
        """The module's own loader for predictions, if there is one."""
        return self._loader("predict_dataloader")

    def gives(self, name: str) -> bool:
        """Whether there is a loader, by the name of its hook, such as ``"val_dataloader"``."""
        return self._given.get(name) is not None or any(brings(module, name) for module in self._module)

    def _loader(self, name: str) -> Any:
        given = self._given.get(name)
        for module in self._module if given is None else ():
            if brings(module, name):
                with attached(module, self.trainer):
                    return getattr(module, name)()
        return given


def brings(module: Any, name: str) -> bool:
    """Whether a LightningModule, of either package, has a hook of its own: its name, such as ``"train_dataloader"``."""
    hook = getattr(module, name)
    return not str(getattr(hook, "__module__", "")).startswith(("lightning.pytorch.core.", "pytorch_lightning.core."))


def gives(datamodule: Any, name: str) -> bool:
    """Whether a data module may have a loader, by the name of its hook, such as ``"val_dataloader"``."""
    if isinstance(datamodule, GivenLoaders):
        return datamodule.gives(name)
    return is_overridden(name, datamodule, LightningDataModule)


def for_another_process(datamodule: LightningDataModule, is_read: bool) -> LightningDataModule:
    """A copy of a data module without its Trainer.

    Args:
        datamodule: The data module.
        is_read: Whether its loaders are known, so that loaders that were given, and a module, stay here.
    """
    if is_read and isinstance(datamodule, GivenLoaders):
        return GivenLoaders()
    own = copy.copy(datamodule)
    own.trainer = None
    return own


def data_in(value: Any) -> Iterator[Any]:
    """Data sets, loaders and data modules in a value, a list or a dictionary."""
    if isinstance(value, DATA):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from data_in(part)


def made_again(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Names of data that a further call of ``setup`` has made once more, by classes and numbers of items."""
    return {
        name
        for name, value in before.items()
        if next(data_in(value), None) is not None
        and now.get(name) is not value
        and _forms(value) == _forms(now.get(name))
    }


def _forms(value: Any) -> list[Any]:
    found: list[Any] = [type(value)]
    for one in data_in(value):
        data = one.dataset if isinstance(one, DataLoader) else one
        found += [type(one), type(data), 0 if isinstance(data, IterableDataset) else getattr(data, "__len__", int)()]
    return found


def loaders_of(
    datamodule: LightningDataModule, trainer: Any = None, *, streams: bool = False
) -> dict[str, StageLoaders]:
    """Set up a data module and ask for its loaders; those that it does not have are left out.

    Args:
        datamodule: The data module.
        trainer: What its ``setup`` sees as its Trainer.
        streams: Whether loaders are taken that can be used as they are alone: of an IterableDataset, say.

    Returns:
        The loaders of ``train``, ``validation`` and ``test``.

    Raises:
        TypeError: If a loader is no DataLoader over a map-style data set, or a stream where these are taken.
    """
    datamodule.trainer = trainer
    datamodule.setup("fit")
    loaders = {"train": checked(datamodule.train_dataloader(), "train_dataloader", streams)}
    for stage, name in (("validation", "val_dataloader"), ("test", "test_dataloader")):
        if not is_overridden(name, datamodule, LightningDataModule):
            continue
        loader = _test_loader(datamodule, trainer) if stage == "test" else getattr(datamodule, name)()
        if loader is not None and not (isinstance(loader, list | tuple | dict) and not loader):
            found = checked(loader, name, streams)
            # Without items there is nothing to evaluate; a stream may have some.
            if any(isinstance(own.dataset, IterableDataset) or len(own.dataset) > 0 for own in found.loaders):
                loaders[stage] = found
    datamodule.trainer = None
    return loaders


def _test_loader(datamodule: LightningDataModule, trainer: Any) -> Any:
    """The test loader; ``None`` where there is none yet, for which a plain fit would not have asked.

    Where ``setup`` makes the training data once more, the attributes stay those that the training loader is over.
    """
    owners = [datamodule, *getattr(datamodule, "_module", [])]
    before, given = [dict(vars(owner)) for owner in owners], None
    try:
        datamodule.setup("test")
        given = datamodule.test_dataloader()
        return given
    except Exception as error:  # whatever a project raises without its test data
        if trainer is not None and trainer.state.fn == "test":
            raise
        warnings.warn(
            f"{type(datamodule).__name__} cannot give its test loader yet ({type(error).__name__}: {error}): items are "
            "divided without it. To test clients on it, make its data available before the fit",
            stacklevel=2,
        )
        return None
    finally:
        tested = {id(one) for loader in data_in(given) for one in (loader, getattr(loader, "dataset", None))}
        for owner, own in zip(owners, before, strict=True):
            again = {name for name in made_again(own, vars(owner)) if id(vars(owner)[name]) not in tested}
            vars(owner).update({name: own[name] for name in again})


def checked(given: Any, name: str, streams: bool) -> StageLoaders:
    """Loaders as a hook gives them.

    Args:
        given: What it gives.
        name: The hook, such as ``"val_dataloader"``.
        streams: See :func:`loaders_of`.

    Raises:
        TypeError: See :func:`loaders_of`.
    """
    found = StageLoaders.of(given, name == "train_dataloader")
    for loader in found.loaders:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"{name} gives a {type(loader).__name__}, expected a DataLoader, or a list, a dictionary or a "
                "CombinedLoader of them"
            )
        is_stream = isinstance(loader.dataset, IterableDataset)
        if not streams if is_stream else not hasattr(loader.dataset, "__len__"):
            raise TypeError(
                f"{name} loads a {type(loader.dataset).__name__}, which cannot be indexed, but clients hold index "
                "lists: use a map-style Dataset with __len__ and __getitem__, or a list of data sets, one for each "
                "client (or make the stream in __init__ of a module without prepare_data and "
                "setup)"
            )
        if not streams:
            check_sampler(loader, name)
    return found


def warn_of_other_items(
    datamodule: LightningDataModule, divided: Sequence[Any], items: Sequence[int], trainer: Any
) -> None:
    """Warn if a further fit would have another number of training items in a plain run.

    Args:
        datamodule: The data module.
        divided: The training Datasets that were divided.
        items: Their numbers of items then.
        trainer: The Trainer of the fit.
    """
    found, given = [len(dataset) for dataset in divided], isinstance(datamodule, GivenLoaders)
    if found == list(items) and not given:
        own = copy.copy(datamodule)  # the data module keeps the Datasets that the clients have
        own.trainer = trainer
        with isolate_rng(), suppress(Exception):  # whatever the user's code raises
            own.setup("fit")
            loaders = checked(own.train_dataloader(), "train_dataloader", False).loaders
            found = [len(loader.dataset) for loader in loaders]
    if found != list(items):
        warnings.warn(
            f"{'the training loader' if given else type(datamodule).__name__} has {' and '.join(map(str, found))} "
            f"training items now, but clients keep the {' and '.join(map(str, items))} that were divided among them: "
            "to use the new items, pass a new instance (with federate: call it again)",
            stacklevel=2,
        )
