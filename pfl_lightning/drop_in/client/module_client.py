"""A client that trains a user's LightningModule, under the methods that need no more of it than its step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, cast

import lightning as L
import torch
from torch import nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.data import SplitSource
from pfl_lightning.drop_in.client.buffers import say_what_is_left_out
from pfl_lightning.drop_in.client.chosen import ChosenParts
from pfl_lightning.drop_in.client.copies import Factory, copied, held_tensors, make_leaves
from pfl_lightning.drop_in.client.frozen import shared_memory
from pfl_lightning.drop_in.client.module_options import refuse_options
from pfl_lightning.drop_in.client.module_steps import ModuleSteps
from pfl_lightning.drop_in.client.network_parts import NETWORKS, NetworkParts, without_extra_state
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.remembered import packed, unpacked
from pfl_lightning.drop_in.client.roles import Roles, find_roles
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.drop_in.fits.inner_trainer import LocalHooks
from pfl_lightning.drop_in.fits.local_evaluation import score_module
from pfl_lightning.drop_in.fits.local_fit import fit_module
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.drop_in.fits.own_data import OwnData, own_values
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment, MakeTrainer
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.older_package import as_written
from pfl_lightning.options import BatchNorm
from pfl_lightning.state.closures import bind_functions

__all__ = ["ModuleClient"]


class ModuleClient(NetworkParts, ModuleSteps):
    """The base of clients whose model is a LightningModule as its author wrote it: the attribute ``module``.

    Its names are given the roles ``encoder.*`` and ``head.*`` where a method's patterns are matched, so that a method
    declares what it shares and trains once. Loss, optimizers, schedulers and metrics are the module's own; a method's
    further terms are added to its loss.

    Args:
        encoder: The module, which is not copied.
        num_classes: Number of classes, C; 0 where there are none.
        head: See :func:`~pfl_lightning.drop_in.client.roles.find_roles`.
        epochs: Local epochs a round, E.
        fine_tune: See :class:`~pfl_lightning.client.FederatedClient`.
        fine_tune_epochs: Epochs of that fine-tuning.
        fine_tune_lr: Its learning rate; ``None`` keeps the module's.
        eval_model: See :class:`~pfl_lightning.client.FederatedClient`.
        batch_norm: See :class:`~pfl_lightning.client.FederatedClient`.
        factory: Makes the module once more where it is to be copied; see
            :func:`~pfl_lightning.drop_in.client.copies.copied`.
        frozen: See :func:`~pfl_lightning.drop_in.client.frozen.frozen_parameters`.
        chosen: What its user keeps on the clients, or shares.
        options: None: learning rates, optimizers and schedulers are those of the module.
    """

    buffers_change = True

    method: ClassVar[type[FederatedClient]]
    """The method's own class."""

    local = LocalHooks()  # none, until the federation has set them

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        head: str | Sequence[str] | Roles = (),
        epochs: int = 1,
        fine_tune: str | None = None,
        fine_tune_epochs: int = 1,
        fine_tune_lr: float | None = None,
        eval_model: str | None = None,
        batch_norm: BatchNorm | None = None,
        factory: Factory | None = None,
        frozen: Sequence[str] | None = None,
        chosen: ChosenParts | None = None,
        **options: Any,
    ) -> None:
        refuse_options(type(self), options)
        self._roles = head if isinstance(head, Roles) else find_roles(encoder, head)
        self._factory, self._frozen_patterns = factory, frozen
        self.chosen = (chosen or ChosenParts()).names_in(encoder)
        super().__init__(
            encoder,
            num_classes,
            epochs=epochs,
            fine_tune=fine_tune,
            fine_tune_epochs=fine_tune_epochs,
            fine_tune_lr=fine_tune_lr,
            eval_model=eval_model,
            batch_norm=batch_norm,
            schedule="restart",  # of the base, which counts epochs by themselves: ResumableClient counts here
        )
        self._record = self._own_loss = None
        self._transients: list[Transient] = []  # made before the first fit
        self._said_of_buffers: set[str] = set()

    def assemble(self, encoder: nn.Module) -> None:
        """The model is the module."""
        self.module = cast(L.LightningModule, encoder)
        self.automatic_optimization = self.module.automatic_optimization
        buffers = self.module.named_buffers()
        found = [name for name, b in buffers if b.is_floating_point() and not bool(b.isfinite().all())]
        self.uninitialized_buffers = frozenset(f"{prefix}{name}" for prefix in NETWORKS for name in found)
        self._never_trained = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        kept = [name for name, layer in self.module.named_modules() if name and not layer.training]
        self._kept_in_evaluation = kept if self.module.training else []
        self.register_load_state_dict_post_hook(without_extra_state)

    def __reduce__(self) -> Any:
        """The class is made where it is needed, so that it cannot be found by its name."""
        from pfl_lightning.drop_in.client.made_class import blank_client

        return blank_client, (type(self).method,), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleClient:
        """A copy, in which a module that cannot be copied is made once more."""
        memo |= held_tensors(self) | shared_memory(self, self.frozen)
        if self._factory is not None:
            for network in self.networks():
                memo[id(network)] = copied(network, self._factory, self.frozen_in_module())
        make, arguments, state = self.__reduce__()
        memo[id(self)] = other = make(*arguments)
        other.__setstate__(copy.deepcopy(state, memo))
        if self._factory is None:
            make_leaves(other)
            bind_functions(self, other, [values for first in other._transients for values in first.attributes])
        return cast(ModuleClient, other)

    # ------------------------------------------------------------------ modes

    def train(self, mode: bool = True) -> ModuleClient:
        """Set the mode of all layers but those that the module's author has put into evaluation mode."""
        super().train(mode)
        if mode and self._kept_in_evaluation:
            for network in self.networks():
                for name in self._kept_in_evaluation:
                    network.get_submodule(name).eval()
        return self

    def frozen_norms(self) -> Iterator[nn.Module]:
        """As in the base, by roles: the normalization layers of those of which nothing trains in the current phase."""
        trained = {self.part_of(n) for n, p in self.named_parameters() if p.requires_grad}
        for name, layer in self.named_modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                names = [f"{name}.{part}" for part in layer.state_dict()]
                goes_on = self.phase.batch_statistics and not self.frozen.issuperset(names)
                if names and not goes_on and not trained & {self.part_of(name) for name in names}:
                    yield layer

    # ------------------------------------------------------------------ the module

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]  # it is not set, and no part of its own
        """The module: what has to train for features, if there were any, to change."""
        return self.module

    def exported_module(self) -> L.LightningModule:
        """The module, of its author's class; what the author has frozen is frozen."""
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name not in self._never_trained)
        as_written(self.module)
        return self.module

    def exported_names(self) -> list[str]:
        """Names in the module."""
        return list(plain_state(self.module))

    def copy_network(self) -> nn.Module:
        """The module once more; what is frozen is the same, not a copy."""
        other = copied(self.module, self._factory, self.frozen_in_module())
        for name in self.frozen_in_module() & {name for name, _ in other.named_parameters()}:
            layer, _, last = name.rpartition(".")
            setattr(other.get_submodule(layer), last, self.module.get_parameter(name))  # also on another device
        return other

    def network_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the module; not those that are frozen."""
        return {name: p for name, p in self.module.named_parameters() if f"module.{name}" not in self.frozen}

    def check_watched(self, outside: Iterable[Any], inside: Iterable[Any], monitor: str | None) -> None:
        """Refuse callbacks of the outer Trainer or of local fits that watch what is never logged: here none is known.

        Args:
            outside: Callbacks of the outer Trainer.
            inside: Callbacks of local fits.
            monitor: The value of which mean and deviation over the clients are asked for.

        Raises:
            ConfigurationError: One does.
        """

    # ------------------------------------------------------------------ a fit and what is logged in it

    def kept_attributes(self) -> bytes:
        """Plain attributes that the fit has changed, where the client's next fit begins with them."""
        if not self.continuity.continues:
            return b""
        return packed([t.changes(network) for t, network in zip(self._transients, self.networks(), strict=True)])

    def recall(self, attributes: bytes) -> None:
        """Let nothing stay that another client has left behind; set what the client's last local fit has left."""
        networks = self.networks_as_given()
        if not self._transients:
            self._transients = [Transient(network) for network in networks]
        self.reset_metrics()
        found = unpacked(attributes) if self.continuity.continues else []
        for transient, network, own in zip(self._transients, networks, found, strict=False):
            transient.recall(network, own)

    def networks_as_given(self) -> list[L.LightningModule]:
        """The module, and what a method trains beside it, without what clients have left in their attributes."""
        self.restore_buffers()
        networks = self.networks()
        for transient, network in zip(self._transients, networks, strict=False):  # none before the first fit
            transient.restore(network)
        return networks

    def restore_buffers(self) -> None:
        """Bring buffers back to the names and shapes that all clients begin with; what has changed is said once."""
        found = dict[str, str]()
        for transient, network in zip(self._transients, self.networks(), strict=False):
            found |= transient.restore_forms(network)
        new = {name: change for name, change in found.items() if name not in self._said_of_buffers}
        if new:
            self._said_of_buffers |= new.keys()
            say_what_is_left_out(type(self.module).__name__, new)

    def forget_given(self) -> None:
        """From now on the attributes are those that all clients begin with."""
        self._transients = []

    def evaluate(
        self, part: SplitSource, stage: str, data: FitData, environment: FitEnvironment, make_trainer: MakeTrainer
    ) -> EvalMetrics:
        """Return what the module's own validation or test step logs, and its accuracy where that is known."""
        with self.on_own_data(data, stage, part):
            return score_module(self, part, stage, data, environment, make_trainer)

    @contextmanager
    def on_own_data(self, data: FitData, stage: str | None = None, part: SplitSource | None = None) -> Iterator[None]:
        """Let the module's attributes and loader hooks give the client's own items in the place of all clients'."""
        own = OwnData(data, stage, part)
        with ExitStack() as stack:
            for network in self.networks():
                stack.enter_context(patched(network, **own.attributes(network), **own.hooks(network)))
            yield

    def lent_data(self, data: FitData) -> AbstractContextManager[None]:
        """Inside, divided data sets have the plain attributes that the client's own fits have left."""
        return own_values(data.part, self.progress)

    def fit_under_trainer(
        self, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
    ) -> dict[str, float]:
        """Train the module, which is the inner Trainer's, as it would be without a federation.

        What it logged becomes :attr:`logged_metrics`; it is not part of the loss terms.
        """
        self.logged_metrics |= fit_module(self, make_trainer, context, generator)
        self.to(context.data.device)
        return {}
