"""Personalized federated learning on PyTorch Lightning.

=======================================  ==========================================================================
What one uses
``methods``, ``encoders``                a class for each method; networks to features
``callbacks``, ``datamodules``           the loop over rounds and what is seen of it; clients' data and partitions
``drop_in``                              ``federate``: projects of your own
``engines``                              how local fits run, on one process or many
``cli``, ``study``, ``report``           the command ``pfl``; studies; tables of finished runs
``runs``                                 the folder of a run: its config, results and lock
``jobs``                                 the processes of studies and searches
What a method is made of
``client``, ``server``, ``messages``     bases of clients and aggregators; what travels between them
``server_optimizers``                    optimizers by which an averaging server steps
``privacy``                              client-level differential privacy of what the server sends
``robust``                               rules against lying clients
``phases``, ``options``, ``learner``     phases of a local fit; types of methods' options; networks that a server trains
``functional``, ``self_supervised``      losses, statistics and solvers; self-supervised objectives
What a run is made of
``federation``, ``round``                the LightningModule; one round
``data``, ``fit``                        what clients have; what a local fit knows, is given and gives
``devices``, ``simulation``              how fast clients are and when they are there; simulated time
``state``, ``seeding``                   states and checkpoints; seeds by purpose
``metrics``, ``class_metrics``           accuracies of clients and their summary; further metrics, of torchmetrics
Throughout
``errors``, ``checks``, ``names``        errors with client and round; checks of arguments; what names stand for
``notices``                              warnings that are shown once, with their client
``older_package``                        projects that import ``pytorch_lightning``
``lightning_private``                    private names of Lightning that are used
=======================================  ==========================================================================
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported by __getattr__ when they are asked for: `pfl --help` needs no torch
    from pfl_lightning import callbacks as callbacks
    from pfl_lightning import datamodules as datamodules
    from pfl_lightning import encoders as encoders
    from pfl_lightning import functional as functional
    from pfl_lightning import methods as methods
    from pfl_lightning import self_supervised as self_supervised
    from pfl_lightning.callbacks.loop import FederatedLoop
    from pfl_lightning.callbacks.results import ResultsWriter
    from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
    from pfl_lightning.drop_in.adapters import export_adapters
    from pfl_lightning.drop_in.federate import federate
    from pfl_lightning.drop_in.predictions import predict_clients
    from pfl_lightning.engines import (
        Engine,
        ProcessEngine,
        RayEngine,
        SequentialEngine,
        TrainerEngine,
        VectorizedEngine,
    )
    from pfl_lightning.federation import Federation
    from pfl_lightning.federation.exported import export_clients, exported_inputs, load_exported
    from pfl_lightning.federation.predictions import predict_exported
    from pfl_lightning.messages import Broadcast, ClientUpdate
    from pfl_lightning.phases import Personalization
    from pfl_lightning.server import AggregationWeights, Aggregator, AveragingAggregator

__version__ = "0.4.0"

__all__ = ["Engine", "ProcessEngine", "RayEngine", "SequentialEngine", "TrainerEngine", "VectorizedEngine"]
__all__ += ["AggregationWeights", "Aggregator", "AveragingAggregator", "Broadcast", "ClientUpdate"]
__all__ += ["Citation", "FederatedClient", "FitContext", "Personalization", "Phase"]
__all__ += ["FederatedLoop", "Federation", "ResultsWriter"]
__all__ += ["export_adapters", "export_clients", "exported_inputs", "federate", "load_exported", "predict_clients"]
__all__ += ["predict_exported"]

_HOMES = {
    "callbacks.loop": ("FederatedLoop",),
    "callbacks.results": ("ResultsWriter",),
    "client": ("Citation", "FederatedClient", "FitContext", "Phase"),
    "drop_in.adapters": ("export_adapters",),
    "drop_in.federate": ("federate",),
    "drop_in.predictions": ("predict_clients",),
    "engines": ("Engine", "ProcessEngine", "RayEngine", "SequentialEngine", "TrainerEngine", "VectorizedEngine"),
    "federation": ("Federation",),
    "federation.exported": ("export_clients", "exported_inputs", "load_exported"),
    "federation.predictions": ("predict_exported",),
    "messages": ("Broadcast", "ClientUpdate"),
    "phases": ("Personalization",),
    "server": ("AggregationWeights", "Aggregator", "AveragingAggregator"),
}
"""Modules that define the public names."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

_MODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))
"""Modules that need no import statement of their own."""


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
