"""The module that a federation was made of: its hooks of a run, its attributes, and the global model in it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric

from pfl_lightning.datamodules.adapters.stages import brings, made_again
from pfl_lightning.drop_in.client.copies import held_tensors, take_cli_optimizers
from pfl_lightning.drop_in.client.plain_state import load_plain_state, plain_state
from pfl_lightning.drop_in.client.transient import keeps_attributes, own_attributes
from pfl_lightning.drop_in.outer.fingerprint import Changes, ModuleFingerprint, data_sets
from pfl_lightning.drop_in.outer.set_up import set_up_by, warn_of_pooled_numbers
from pfl_lightning.state.closures import bind_functions

__all__ = ["UserModuleOwner"]


class UserModuleOwner:
    """Owns the author's module, which holds the global model in the end.

    Clients train copies, which are made when ``prepare_data``, the hooks that make loaders, ``setup`` and
    ``configure_model`` have been called on the module, as in a plain run.

    Args:
        module: The author's module.

    Attributes:
        changes: What the author changes in the module between calls of a Trainer.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module, self.changes = module, Changes()
        self._start: ModuleFingerprint | None = ModuleFingerprint(module)

    def __getstate__(self) -> dict[str, Any]:
        """State without what is known of the module's objects, which are others in another process."""
        return {**vars(self), "_start": None}

    def begin_call(self, fits: bool) -> None:
        """A call of the Trainer begins: warn of what its author has changed in the module.

        Args:
            fits: Whether clients train in this call.
        """
        name = type(self.module).__name__
        if self._start is not None and self._start.changes_in(self.module)["values of"]:
            warnings.warn(
                f"values of {name} have changed since the federation was made of it: clients begin with it as it is "
                "now. Give each federation a module of its own",
                stacklevel=2,
            )
        self.changes.begin(self.module)
        self.changes.warn(name, fits)

    def begin(self, stage: str, trainer: Any, data: Any) -> None:
        """Set the module up for the first time, before clients' copies are made.

        Args:
            stage: The stage.
            trainer: The outer Trainer; ``None`` for none.
            data: The clients' data.
        """
        start, self._start = self._start, None
        self.set_up([stage], trainer)
        if brings(self.module, "configure_model"):
            with set_up_by(self.module, trainer):
                self.module.configure_model()
        if start is not None:
            changed = start.attributes_changed_in(self.module)
            warn_of_pooled_numbers(self.module, changed, data, None if trainer is None else trainer.max_epochs)

    def set_up(self, stages: Iterable[str], trainer: Any, networks: Sequence[nn.Module] = ()) -> None:
        """Call the module's ``setup`` for stages.

        Args:
            stages: The stages.
            trainer: The outer Trainer.
            networks: Copies that clients train, which get the attributes that it has set.
        """
        if not brings(self.module, "setup"):
            return
        data, before = data_sets(self.module), ModuleFingerprint(self.module) if networks else None
        with set_up_by(self.module, trainer):
            for stage in stages:
                self.module.setup(stage)
        # Where it has made data once more: clients have parts of the first.
        vars(self.module).update({name: data[name] for name in made_again(data, vars(self.module))})
        changed = set() if before is None else before.attributes_changed_in(self.module)
        for network in networks:
            self._give_attributes(network, changed)

    def _give_attributes(self, network: Any, changed: set[str]) -> None:
        layers: dict[str, Any] = dict(network.named_modules())
        memo = _memo(self.module, network)
        for name, layer in self.module.named_modules():
            own = own_attributes(layer) if name in layers and keeps_attributes(layer) else {}
            own = own if name else {attribute: own[attribute] for attribute in changed & own.keys()}
            for attribute, value in own.items() if not isinstance(layer, Metric) else ():
                with suppress(Exception):  # what cannot be copied
                    vars(layers[name])[attribute] = copy.deepcopy(value, memo)
        vars(network).update(data_sets(self.module))
        bind_functions(self.module, network)
        take_cli_optimizers(self.module, network)

    def take(self, model: L.LightningModule) -> None:
        """Let the author's module hold a model.

        Args:
            model: The model, of a copy of the module; it is used up.
        """
        own, state = plain_state(self.module), plain_state(model)
        others = {name for name, value in state.items() if name not in own or own[name].shape != value.shape}
        for name, layer in model.named_children():  # where its author has replaced layers since
            if any(other.startswith(f"{name}.") for other in others):
                setattr(self.module, name, layer)
        load_plain_state(self.module, state)


def _memo(one: nn.Module, other: nn.Module) -> dict[int, Any]:
    """A memo of ``copy.deepcopy`` in which layers and tensors of a module are those of another one."""
    found: dict[int, Any] = held_tensors(one)
    others: Mapping[str, Any] = dict(other.named_modules()) | _tensors(other)
    for name, part in (dict(one.named_modules()) | _tensors(one)).items():
        if name in others:
            found[id(part)] = others[name]
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
