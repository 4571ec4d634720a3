"""What a project of another package is, and its runs: plain, as a federation, and as one client with all data."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from pfl_lightning import TrainerEngine, federate
from pfl_lightning.datamodules import FromSilos
from pfl_lightning.methods import FedAvg

SEED = 7
Made = tuple[Any, dict[str, Any]]


@dataclass(frozen=True)
class Project:
    """A LightningModule that an installed package brings, or whose network it brings, with small made data.

    Attributes:
        kind: What it learns.
        package: The distribution it is of.
        module: Name of its LightningModule, or of the network in a thin one.
        data: In a word, what it is trained on.
        make: The module and the data under the names of ``trainer.fit``, each time afresh.
        imports: Modules without which it is skipped.
        monitor: A value that callbacks watch; ``None`` where the module has no validation step.
        options: What ``federate`` is given beside the method and the number of clients.
        head: Its last layer, which stays on the client under FedPer; empty where it has none that is a linear layer.
        changes: Further lines that the project needs, in words.
        fails: Why the federation fails today; empty where it runs.
        differs: Why one client with all data is not the plain run today; empty where it is.
        slow: Whether its import or its training takes long.
    """

    kind: str
    package: str
    module: str
    data: str
    make: Callable[[], Made]
    imports: tuple[str, ...]
    monitor: str | None = "val_loss"
    options: dict[str, Any] = field(default_factory=dict)
    head: str = ""
    changes: str = ""
    fails: str = ""
    differs: str = ""
    slow: bool = False

    @property
    def id(self) -> str:
        """The name of its tests."""
        return f"{self.package}-{self.module}"

    def skip_without(self) -> None:
        """Skip the current test where the package is not installed."""
        for name in self.imports:
            pytest.importorskip(name, reason=f'{self.package} is not installed: pip install -e ".[foreign]"')

    def is_installed(self) -> bool:
        """Whether its package can be imported."""
        try:
            for name in self.imports:
                importlib.import_module(name)
        except ImportError:
            return False
        return True

    def made(self) -> Made:
        """Module and data, with the same first weights each time."""
        L.seed_everything(SEED, verbose=False)
        return self.make()


class Reseeded(L.Callback):
    """Random draws of a batch depend on the batch alone: a plain run's loaders draw, too, before it."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(SEED + self.batches)
        self.batches += 1


def package_of(module: Any) -> Any:
    """The package ``lightning.pytorch``, or ``pytorch_lightning`` where the module is of that."""
    older = any(base.__module__.startswith("pytorch_lightning.") for base in type(module).__mro__)
    return importlib.import_module("pytorch_lightning" if older else "lightning.pytorch")


def trainer_of(module: Any, epochs: int, *callbacks: Any, **options: Any) -> Any:
    """A silent Trainer of the package that the module is of."""
    package = package_of(module)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    return package.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**quiet, **options})


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing that the package says about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def plain_run(project: Project, epochs: int = 1, *callbacks: L.Callback) -> Any:
    """The module after ``trainer.fit(module, data)``, as its author would train it, with the items in their order."""
    module, data = project.made()
    trainer_of(module, epochs, *callbacks).fit(module, **in_order(data))
    return module


def in_order(data: dict[str, Any]) -> dict[str, Any]:
    """The same data without shuffling: plain and federated runs draw orders from different generators."""
    data = dict(data)
    if "train_dataloaders" in data:
        data["train_dataloaders"] = unshuffled(data["train_dataloaders"])
    if "datamodule" in data:
        own = data["datamodule"].train_dataloader
        data["datamodule"].train_dataloader = lambda: unshuffled(own())
    return data


def unshuffled(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader with the items of another in their own order."""
    sampler: Any = loader.sampler
    if loader.batch_size is None and isinstance(sampler, BatchSampler):  # which gives the data set lists of places
        ordered = BatchSampler(SequentialSampler(loader.dataset), sampler.batch_size, sampler.drop_last)
        return DataLoader(loader.dataset, batch_size=None, sampler=ordered, collate_fn=loader.collate_fn)
    if not isinstance(sampler, RandomSampler):
        return loader
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn, drop_last=loader.drop_last
    )


def federated_run(project: Project, folder: Path, method: Any = FedAvg, rounds: int = 2, clients: int = 3) -> Any:
    """The federation after two rounds, with the callbacks that a project brings."""
    module, data = project.made()
    federation, divided = federate(module, **data, method=method, num_clients=clients, seed=SEED, **project.options)
    callbacks: list[L.Callback] = []
    if project.monitor is not None:
        own = package_of(federation).callbacks
        callbacks = [
            own.EarlyStopping(project.monitor, patience=5),
            own.ModelCheckpoint(folder, monitor=project.monitor, save_top_k=1),
        ]
    trainer = trainer_of(federation, rounds, *callbacks, enable_checkpointing=bool(callbacks))
    trainer.fit(federation, datamodule=divided)
    return federation, trainer


def one_client_run(project: Project, epochs: int) -> tuple[Any, Any]:
    """One round of so many epochs at one client with all data: the global model and the client's own."""
    module, data = project.made()
    data = in_order(data)
    if not data:  # the module has loaders of its own
        data = {"num_clients": 1}
    elif len(data) == 1:  # no validation loader, perhaps: nothing is to be set aside for one
        data = {"datamodule": FromSilos(list(data.values()), validation_share=0.0)}
    else:
        data = {name: [given] for name, given in data.items()}
    federation, divided = federate(
        module,
        **data,
        method=FedAvg,
        epochs=epochs,
        engine=TrainerEngine(callbacks=[Reseeded()]),
        seed=SEED,
        **project.options,
    )
    trainer_of(federation, 1, limit_val_batches=0).fit(federation, datamodule=divided)
    return federation.global_model(), federation.client_model(0)


def differing(expected: Any, found: Any) -> list[str]:
    """Names of the tensors in which two modules differ in any bit."""
    one, other = (dict(module.state_dict()) for module in (expected, found))
    names = sorted(one.keys() ^ other.keys())
    return names + [n for n in one if n in other and isinstance(one[n], Tensor) and not _same(one[n], other[n])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one.cpu()), torch.nan_to_num(other.cpu()))
