"""One batch through a copy of a user's module, to see which layers its loss depends on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pfl_lightning.data import FederatedData
from pfl_lightning.drop_in.features.capture import first_tensor
from pfl_lightning.drop_in.fits.module_calls import lent_to_trainer
from pfl_lightning.drop_in.fits.own_data import OwnData, standing_in
from pfl_lightning.engines.base import naming_clients
from pfl_lightning.fit.context import FitContext
from pfl_lightning.fit.data import FitData
from pfl_lightning.lightning_private import silent_trainer
from pfl_lightning.notices import silence
from pfl_lightning.state.tensors import tensors_in

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that may stand behind the last layer with weights and are no head by themselves."""

_ONE_BATCH: dict[str, Any] = {"max_steps": 1, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
_ONE_BATCH |= {"accelerator": "cpu", "devices": 1, "default_root_dir": os.devnull, "use_distributed_sampler": False}


@dataclass
class Trace:
    """What a batch has shown.

    Attributes:
        last: Names of the layers with trained weights from which the loss follows without another such layer between,
            and of parameters of the module itself. Under manual optimization, of all losses of the step.
        norms: Names of the normalization layers behind them.
        called: Names of all layers with trained weights that the step has called, in this order.
        inputs: Shape of what enters each layer that was called, without weights included.
        outputs: Shape of what each of them gives.
        problem: Why nothing is known of ``last``; ``None`` where all went well.
        error: What ended the step, if anything did.
    """

    last: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str | None = "no batch was seen"
    error: Exception | None = None


def trace_batch(module: L.LightningModule, data: FederatedData) -> Trace:
    """Run a module's training step on the first batch of the first client, and walk the graph back from its loss.

    Neither the random numbers of the run nor its log are touched. Whatever goes wrong is kept, for who asks for the
    last layer.

    Args:
        module: A copy of the module, set up, which is changed.
        data: Every client's data.
    """
    watch = _Watch(module)
    client = data.participating[0]
    try:
        with (
            isolate_rng(),
            silence(),
            naming_clients(FitContext(client, 0, FitData(data.client_data(client).train, 1))),
            torch.enable_grad(),
            torch.inference_mode(False),
        ):
            own = data.client_data(client)
            size = min((getattr(own, "batches", None) or data).batch_size, max(len(own.train), 1))
            loader = own.train.loader(size, device=torch.device("cpu"))
            items = OwnData(FitData(own.train, size, validation=own.validation))
            source: Any = {"train_dataloaders": loader}
            if own.train.datamodule is not None:
                source = {"datamodule": standing_in(own.train.datamodule, {"train_dataloader": loader}, items)}
            trainer = silent_trainer(**_ONE_BATCH, logger=DummyLogger(), callbacks=[watch])
            with lent_to_trainer(module, **items.attributes(module), **items.hooks(module)):
                trainer.fit(module, **source)
    except Exception as error:  # whatever a step may raise that runs outside of its Trainer's usual surroundings
        if watch.trace.problem is not None:
            watch.trace.problem = f"the step failed with {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            watch.trace.error = error
    return watch.trace


class _Watch(L.Callback):
    """Remembers which layer has made which node of the graph, and looks at the graph of every loss of the step."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module, self.trace = module, Trace()
        self._made: dict[Any, str] = {}
        self._layers = {name: layer for name, layer in module.named_modules() if name and not in_parametrization(name)}
        for name, layer in self._layers.items():  # of a copy that is used up
            layer.register_forward_hook(partial(self._see, name))

    def _see(self, name: str, layer: nn.Module, arguments: Any, output: Any) -> None:
        for shapes, value in ((self.trace.inputs, arguments), (self.trace.outputs, output)):
            tensor = first_tensor(value)
            if tensor is not None:
                shapes[name] = tuple(tensor.shape)
        if any(p.requires_grad for p in _own_parameters(layer)):
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    self._made.setdefault(tensor.grad_fn, name)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Look at the loss: walk back from it, not beyond the layers that are the last ones."""
        trace, called = self.trace, tuple(dict.fromkeys(self._made.values()))
        inner = {name for name in called if any(other.startswith(f"{name}.") for other in called)}  # no last layers
        layers = {"": self._module, **self._layers}
        owners = {id(p): name for name, layer in layers.items() for p in _own_parameters(layer)}
        itself = {id(p): name for name, p in self._module.named_parameters(recurse=False)}
        last, norms = dict.fromkeys(trace.last), dict.fromkeys(trace.norms)
        seen, waiting = set[Any]([None]), [loss.grad_fn]
        while waiting:
            node: Any = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            name = self._made.get(node)
            if name is not None and name not in inner:
                is_norm = isinstance(self._layers[name], NORMS)
                (norms if is_norm else last)[name] = None
                if not is_norm:
                    continue
            own: Any = getattr(node, "variable", None)
            owner = owners.get(id(own))
            if owner is not None and own.numel() > 1 and owner not in called:  # as in a regularizer
                last[owner or itself[id(own)]] = None  # used outside of its layer's call
            waiting += [following for following, _ in node.next_functions]
        trace.last, trace.norms, trace.called = tuple(last), tuple(norms), called
        trace.problem = None if last else "the loss depends on no layer with weights that train"


def in_parametrization(name: str) -> bool:
    """Whether a layer's name is that of a part of another layer's parametrized weight."""
    return "parametrizations" in name.split(".")


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Parameters of a layer without those of layers in it, and what its parametrized ones are made of."""
    made = layer.parametrizations.parameters() if is_parametrized(layer) else ()  # type: ignore[operator,union-attr]
    return [*layer.parameters(recurse=False), *made]
