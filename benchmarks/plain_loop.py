"""Workloads on which methods are compared, FedAvg's steps as a plain loop, and what counts the operations of passes.

For ``method_costs.py`` and ``own_loops.py``, which say what the workloads are.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, FederatedDataModule, FromDatasets
from pfl_lightning.encoders import build_encoder

PUBLIC = 100
"""Public samples, and those of a round, of methods that train on such."""

SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.5, "weight_decay": 5e-4}
BATCH = 50
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class NoModules:
    """Takes the place of what tells a counter which module runs."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Watch nothing."""

    def __exit__(self, *error: object) -> None:
        """Stop nothing."""


@dataclass(frozen=True)
class Workload:
    """What a client trains on, and how long."""

    samples: int
    epochs: int
    clients: int


SHORT, LONG = Workload(200, 2, clients=3), Workload(600, 5, clients=2)


class Passes(FlopCounterMode):
    """Counts operations of forward and of backward passes."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = NoModules()  # its own hooks fail in modules that are called without gradients
        self.forward = self.backward = 0

    def _count_flops(self, function: Any, out: Any, args: Any, kwargs: Any) -> Any:
        before = self.get_total_flops()
        result = super()._count_flops(function, out, args, kwargs)
        operations = self.get_total_flops() - before
        if torch._C._current_graph_task_id() == -1:
            self.forward += operations
        else:
            self.backward += operations
        return result


class PlainLoop:
    """FedAvg's optimizer steps by hand."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        with Passes() as passes:
            self.run()
        self.operations = passes.forward, passes.backward

    def run(self) -> tuple[float, float]:
        """Seconds of the forward passes, and of the rest."""
        encoder = build_encoder("fedpac_cnn", (3, 32, 32))
        model = nn.Sequential(encoder, nn.Linear(encoder.out_features, 10))
        samples = self.workload.samples - int(0.1 * self.workload.samples)
        inputs, labels = torch.rand((samples, 3, 32, 32)), torch.randint(10, (samples,))
        forward, start = 0.0, time.process_time()
        for _ in range(self.workload.clients):
            optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
            for _ in range(self.workload.epochs):
                for batch in torch.randperm(samples).split(BATCH):
                    begin = time.process_time()
                    loss = F.cross_entropy(model(inputs[batch]), labels[batch])
                    forward += time.process_time() - begin
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        return forward, time.process_time() - start - forward

    def seconds(self, passes: Passes) -> tuple[float, float]:
        """What the loop takes now, and what so many passes would take in it."""
        forward, rest = self.run()
        own_forward, own_backward = self.operations
        return forward + rest, forward * passes.forward / own_forward + rest * passes.backward / own_backward


def fit(
    method: Callable[..., Any], encoder: Any, data: FederatedDataModule, rounds: int, *more: L.Callback
) -> Federation:
    """A federation after some rounds, without evaluations."""
    federation = Federation(method, encoder, seed=0)
    trainer = L.Trainer(max_epochs=rounds, limit_val_batches=0, callbacks=[FederatedLoop(), *more], **QUIET)
    trainer.fit(federation, datamodule=data)
    return federation


def made(method: type[FederatedClient], **options: Any) -> Callable[..., Any]:
    """The method with what it cannot do without, and with as many epochs in every round.

    KT-pFL takes one more in each of its first rounds, so that the passes of the round that are counted would be fewer
    than those of the rounds that are timed.
    """
    alike = {"growing": False} if "growing" in inspect.signature(method).parameters else {}
    return partial(method, **({"public_samples": PUBLIC} if method.needs_public else {}), **alike, **options)


def public_of(method: type[FederatedClient]) -> dict[str, Any]:
    """The data module's option of methods that train on public samples."""
    return {"public": PUBLIC} if method.needs_public else {}


def images(method: type[FederatedClient], workload: Workload) -> FromDatasets:
    """The clients' random images."""
    generator = torch.Generator().manual_seed(0)
    number = workload.clients * workload.samples + PUBLIC
    inputs = torch.rand((number, 3, 32, 32), generator=generator)
    dataset = TensorDataset(inputs, torch.randint(10, (number,), generator=generator))
    options = {"batch_size": BATCH, "validation_share": 0.1, **public_of(method)}
    partition = IID(workload.clients, workload.samples)
    return FromDatasets(train=dataset, test=dataset, partition=partition, **options)


def start(threads: int) -> str:
    """Silence what a run says, take so many threads, print date, machine and load; returns the machine."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    machine = f"{threads} thread of {os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}"
    print(f"{date.today()}, {machine}\nload of the machine before the start: {os.getloadavg()[0]:.1f}\n")
    return machine
