"""A user's LightningModule as the model of a client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.data import SplitSource
from pfl_lightning.drop_in.client.copies import Factory, chosen_names, copied, held_tensors, make_leaves, shared_memory
from pfl_lightning.drop_in.client.module_steps import ModuleSteps
from pfl_lightning.drop_in.client.plain_state import EXTRA_STATE, plain_state, plain_states
from pfl_lightning.drop_in.client.remembered import packed, unpacked
from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.drop_in.client.transient import Transient, warn_of_forms
from pfl_lightning.drop_in.fits.inner_trainer import LocalHooks
from pfl_lightning.drop_in.fits.local_evaluation import score_module
from pfl_lightning.drop_in.fits.local_fit import fit_module
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.drop_in.fits.own_data import OwnData, own_values
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import MakeTrainer, ScoringTask
from pfl_lightning.messages import Broadcast
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.names import parameters_of
from pfl_lightning.older_package import as_written
from pfl_lightning.state.clients import with_attributes
from pfl_lightning.state.closures import bind_functions
from pfl_lightning.state.tensors import matching, norm_names

NETWORKS = ("module.", "global_model.")
"""What names of the user's parameters have in front, in the client's state."""


def bare_name(name: str) -> str:
    """The name in the user's module."""
    return next((name.removeprefix(prefix) for prefix in NETWORKS if name.startswith(prefix)), name)


class HeadNeeded(ConfigurationError):
    """A method sets the head apart, and it is not known which layers are the head."""


class UserModule(ModuleSteps):
    """The model of one client: a LightningModule as its author wrote it, mounted on the client as ``module``.

    Its names are given the roles ``encoder.*`` and ``head.*`` where a method's patterns are matched, so that a method
    declares what it shares and trains once. Loss, optimizers, schedulers and metrics are the module's own; a method's
    further terms are added to its loss.

    Args:
        module: The module, which is not copied.
        roles: Which of its parameters are the head.
        factory: Makes the module once more where it is to be copied; see
            :func:`~pfl_lightning.drop_in.client.copies.copied`.
        frozen: See :func:`~pfl_lightning.drop_in.client.copies.frozen_parameters`.
        chosen: Names in the module of what its user keeps on the clients, and of what the user shares.
    """

    local = LocalHooks()  # none, until the federation has set them

    def __init__(
        self,
        module: L.LightningModule,
        roles: Roles,
        factory: Factory | None = None,
        frozen: Sequence[str] | None = None,
        chosen: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
    ) -> None:
        self.module, self.roles, self.factory, self.frozen_patterns = module, roles, factory, frozen
        self.chosen = chosen
        self._transients: list[Transient] = []  # made before the first fit
        self._said_of_buffers: set[str] = set()

    # ------------------------------------------------------------------ the client

    def new_client(self, method: type[FederatedClient], num_classes: int, settings: dict[str, Any]) -> FederatedClient:
        """A client of a method that has this model; the number of classes is 0 where there are none.

        It trains for one epoch, unless the method has a default of its own. Options for the head's rate and its layers
        are left to the module, unless one is given.
        """
        known = {name: owner for name, (_, owner) in parameters_of(method).items()}
        own: dict[str, Any] = {"epochs": 1} if known.get("epochs") is FederatedClient else {}
        if method.feature_based:
            own |= {name: value for name, value in (("head_lr", None), ("head_relu", False)) if name in known}
        client: Any = method.__new__(method)
        vars(client)["user_module"], self.client = self, client  # __init__ asks for it: the module is no encoder
        client.__init__(self.module, num_classes, **{**own, **settings})
        endings = tuple(f".{name}" for name in client.uninitialized_buffers)
        # Networks that the method has made of the module have such buffers, too.
        copies = [name for name, buffer in client.named_buffers(remove_duplicate=False) if _is_uninitialized(buffer)]
        client.uninitialized_buffers |= {name for name in copies if endings and name.endswith(endings)}
        return cast(FederatedClient, client)

    def mount(self) -> None:
        """Become a part of the client: the module is its layer, and its steps are the module's."""
        client, module = self.client, self.module
        self._frozen_by_author = {name for name, p in module.named_parameters() if not p.requires_grad}
        kept = [name for name, layer in module.named_modules() if name and not layer.training]
        self.kept_in_evaluation = kept if module.training else []
        client.module = module
        client.automatic_optimization, client.buffers_change = module.automatic_optimization, True
        unset = [name for name, buffer in module.named_buffers() if _is_uninitialized(buffer)]
        client.uninitialized_buffers = frozenset(f"{prefix}{name}" for prefix in NETWORKS for name in unset)
        client.never_trained = frozenset(f"{prefix}{name}" for prefix in NETWORKS for name in self._frozen_by_author)
        client.register_load_state_dict_post_hook(_without_extra_state)

    def prepare_copy(self, memo: dict[int, Any]) -> None:
        """The client is about to be copied by ``copy.deepcopy``: say what is not copied as other objects are."""
        memo |= held_tensors(self.client) | shared_memory(self.client, self.client.frozen)
        if self.factory is not None:
            for network in self.networks():
                memo[id(network)] = copied(network, self.factory, self.frozen_in_module())

    def conclude_copy(self, other: FederatedClient) -> None:
        """The client was copied: let functions in the copy hold its layers."""
        if self.factory is None:
            own = cast(UserModule, other.user_module)
            make_leaves(other)
            kept = [values for each in own._transients for values in each.attributes.values()]
            bind_functions(self.client, other, kept)

    # ------------------------------------------------------------------ networks

    @property
    def encoder(self) -> nn.Module:
        """The module: features change where its parameters train."""
        return self.module

    def networks(self) -> list[L.LightningModule]:
        """The module, and the second one of a method that has two."""
        found = (self.client._modules.get(prefix[:-1]) for prefix in NETWORKS)
        return [cast(L.LightningModule, network) for network in found if network is not None]

    def keep_evaluating(self) -> None:
        """Set layers that the module's author has put into evaluation mode into it again."""
        for network in self.networks() if self.kept_in_evaluation else ():
            for name in self.kept_in_evaluation:
                network.get_submodule(name).eval()

    def thaw(self, module: nn.Module) -> None:
        """Let all of a copy of the module train but what its author has frozen."""
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self._frozen_by_author)

    def exported_module(self) -> L.LightningModule:
        """The module, of its author's class; what the author has frozen is frozen."""
        self.thaw(self.module)
        as_written(self.module)
        return self.module

    def exported_names(self) -> list[str]:
        """Names in the module."""
        return list(plain_state(self.module))

    def copy_network(self) -> L.LightningModule:
        """The module once more; what is frozen is the same, not a copy."""
        other = copied(self.module, self.factory, self.frozen_in_module())
        for name in self.frozen_in_module() & {name for name, _ in other.named_parameters()}:
            layer, _, last = name.rpartition(".")
            setattr(other.get_submodule(layer), last, self.module.get_parameter(name))  # also on another device
        return other

    def network_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the module; not those that are frozen."""
        return {name: p for name, p in self.module.named_parameters() if f"module.{name}" not in self.client.frozen}

    def state_of_client(self, state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All parameters and persistent buffers; a ``state_dict`` of the author's shapes checkpoints alone.

        What layers add by ``get_extra_state`` is an attribute as others are, which clients do not keep.
        """
        with plain_states(self.client, without=self.client):
            found = state_dict(*args, **kwargs)
        for name in [n for n in found if n.startswith(kwargs.get("prefix", "")) and n.endswith(EXTRA_STATE)]:
            del found[name]
        return found

    # ------------------------------------------------------------------ names and roles

    def part_of(self, name: str) -> str:
        """What a name of the state belongs to: encoder or head of one of the networks, or the method's own."""
        prefix = next((prefix for prefix in NETWORKS if name.startswith(prefix)), "")
        part = self.roles.of(name.removeprefix(prefix)) if prefix else name
        return prefix + part.partition(".")[0]

    def match(self, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """The names whose roles fit; without a head the encoder is everything."""
        known = list(names)
        roles = [self.roles.of(n.removeprefix("module.")) if n.startswith("module.") else n for n in known]
        if not self.roles:
            if ("encoder.*" in patterns) != ("head.*" in patterns):
                raise HeadNeeded(
                    f"{type(self.client).__name__} needs the head of {type(self.module).__name__}, which has none: "
                    "set head= to its last layers"
                )
            patterns = [pattern for pattern in patterns if pattern != "head.*"]
        fitting = set(matching(tuple(roles), tuple(patterns)))
        return [name for name, role in zip(known, roles, strict=True) if role in fitting]

    def shared_names(self, usual: Iterable[str]) -> list[str]:
        """Names of what travels: of whole numbers (a table, a counter) only the counters of batch normalization.

        These are averaged and rounded; a mean of other whole numbers has no meaning, and they stay on the client. So do
        buffers that are not finite at the start, such as a threshold that is yet to be set. What the user has chosen
        goes before all this.

        Args:
            usual: Names of what the method shares.
        """
        counters, state = norm_names(self.client, affine=False), self.client.state_dict()
        found = {name for name in usual if name not in self.client.uninitialized_buffers}
        found = {name for name in found if state[name].is_floating_point() or name in counters}
        personal, shared = self.chosen
        found |= {name for name in state if _names(shared, name)} - self.client.frozen
        return [name for name in state if name in found and not _names(personal, name)]

    def fixed_names(self, usual: Iterable[str]) -> list[str]:
        """Names of what keeps its first value; not what the user keeps on the clients or shares."""
        return [name for name in usual if not any(_names(own, name) for own in self.chosen)]

    def chosen_frozen(self, network: nn.Module, found: Collection[str]) -> set[str]:
        """Names of what is frozen in a network, as far as it stays as it is."""
        chosen = chosen_names(network, {bare_name(name) for name in found}, self.frozen_patterns)
        return {name for name in found if bare_name(name) in chosen}

    def frozen_in_module(self) -> set[str]:
        """Names in the module of what is frozen."""
        return {bare_name(name) for name in self.client.frozen}

    def frozen_norms(self) -> Iterator[nn.Module]:
        """As in the base, by roles: the normalization layers of those of which nothing trains in the current phase."""
        client = self.client
        trained = {self.part_of(n) for n, p in client.named_parameters() if p.requires_grad}
        for name, layer in client.named_modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                names = [f"{name}.{part}" for part in layer.state_dict()]
                goes_on = client.phase.batch_statistics and not client.frozen.issuperset(names)
                if names and not goes_on and not trained & {self.part_of(name) for name in names}:
                    yield layer

    def constant_layers(self) -> Iterator[nn.Module]:
        """Layers that the author has frozen and put into evaluation mode, and normalization that never trains."""
        yield from self.frozen_norms()
        for network in self.networks():
            for name in self.kept_in_evaluation:
                layer = network.get_submodule(name)
                parameters = list(layer.parameters())
                if parameters and not any(parameter.requires_grad for parameter in parameters):
                    yield layer

    # ------------------------------------------------------------------ a fit and an evaluation

    def check_watched(self, outside: Iterable[Any], inside: Iterable[Any]) -> None:
        """Refuse callbacks (of the outer Trainer, of local fits) that watch what is never logged: none is known."""

    def receive(self, broadcast: Broadcast) -> None:
        """The client is about to take over what the server sends."""

    @property
    def resume_state(self) -> bytes | None:
        """What the fit hands on to the client's next; with plain attributes that it has changed, where these go on."""
        if self.progress is None:
            return None
        pairs = zip(self._transients, self.networks(), strict=True) if self.continuity.continues else ()
        return with_attributes(self.progress.encoded(), packed([t.changes(network) for t, network in pairs]))

    def recall(self, attributes: bytes) -> None:
        """Let nothing stay that another client has left behind; set what the client's last local fit has left."""
        networks = self.networks_as_given()
        if not self._transients:
            self._transients = [Transient(network) for network in networks]
        self.reset_metrics()
        found = unpacked(attributes) if self.continuity.continues else []
        for transient, network, own in zip(self._transients, networks, found, strict=False):
            transient.recall(network, own)

    def networks_as_given(self, *, for_all: bool = False) -> list[L.LightningModule]:
        """The module, and what a method trains beside it, without what clients have left in their attributes.

        Args:
            for_all: Whether the attributes that they are given now are those that all clients begin with.
        """
        self.restore_buffers()
        networks = self.networks()
        for transient, network in zip(self._transients, networks, strict=False):  # none before the first fit
            transient.restore(network)
        self._transients = [] if for_all else self._transients
        return networks

    def restore_buffers(self) -> None:
        """Bring buffers back to the names and shapes that all clients begin with; what has changed is said once."""
        pairs = zip(self._transients, self.networks(), strict=False)
        found = dict.fromkeys(name for transient, network in pairs for name in transient.restore_forms(network))
        new = [name for name in found if name not in self._said_of_buffers]
        self._said_of_buffers |= {*new}
        if new:
            warn_of_forms(type(self.module).__name__, new)

    def evaluate(self, task: ScoringTask) -> EvalMetrics:
        """What the module's own validation or test step logs, and its accuracy where that is known."""
        with self.on_own_data(task.data, task.stage, task.part):
            return score_module(self, task)

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
        """Let an inner Trainer train the module; what it logged is not part of the loss terms."""
        self.client.logged_metrics |= fit_module(self, make_trainer, context, generator)
        self.client.to(context.data.device)
        return {}


def _is_uninitialized(buffer: Tensor) -> bool:
    """Whether a buffer holds numbers that are not finite, such as a threshold that is yet to be set."""
    return buffer.is_floating_point() and not bool(buffer.isfinite().all())


def _names(chosen: frozenset[str], name: str) -> bool:
    """Whether a name of the client's state is that of a chosen part of the module."""
    return bool(chosen) and name.startswith(NETWORKS) and bare_name(name) in chosen


def _without_extra_state(module: nn.Module, incompatible: Any) -> None:
    """Miss nothing of what :meth:`UserModule.state_of_client` leaves out."""
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.endswith(EXTRA_STATE)]
