"""Names of a user's module in the state of its client, and which of them are frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import lightning as L
from torch import nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.client.frozen import chosen_names
from pfl_lightning.drop_in.client.plain_state import EXTRA_STATE, plain_states
from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.phases import Phase
from pfl_lightning.state.tensors import matching, norm_names

__all__ = ["NETWORKS", "HeadNeeded", "NetworkParts", "bare_name", "without_extra_state"]

NETWORKS = ("module.", "global_model.")
"""What names of the user's parameters have in front, in the client's state."""


def without_extra_state(module: nn.Module, incompatible: Any) -> None:
    """Miss nothing of what :meth:`NetworkParts.state_dict` leaves out."""
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.endswith(EXTRA_STATE)]


def bare_name(name: str) -> str:
    """The name in the user's module."""
    return next((name.removeprefix(prefix) for prefix in NETWORKS if name.startswith(prefix)), name)


class HeadNeeded(ConfigurationError):
    """A method sets the head apart, and it is not known which layers are the head."""


class NetworkParts(FederatedClient):
    """The networks of a client that trains a user's module, and what of them never changes."""

    _roles: Roles
    _frozen_patterns: Sequence[str] | None
    _kept_in_evaluation: Sequence[str]
    _never_trained: set[str]
    module: L.LightningModule

    chosen: tuple[frozenset[str], frozenset[str]]
    """Names in the module of what its user keeps on the clients, and of what the user shares."""

    uninitialized_buffers: frozenset[str]
    """Names of buffers that are not finite at the start."""

    def networks(self) -> list[L.LightningModule]:
        """The module, and the second one of a method that has two."""
        found = (self._modules.get(prefix[:-1]) for prefix in NETWORKS)
        return [cast(L.LightningModule, network) for network in found if network is not None]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All parameters and persistent buffers; a ``state_dict`` of the author's shapes checkpoints alone.

        What layers add by ``get_extra_state`` is an attribute as others are, which clients do not keep.
        """
        with plain_states(self, without=self):
            found = super().state_dict(*args, **kwargs)
        for name in [n for n in found if n.startswith(kwargs.get("prefix", "")) and n.endswith(EXTRA_STATE)]:
            del found[name]
        return found

    def part_of(self, name: str) -> str:
        """What a name of the state belongs to: encoder or head of one of the networks, or the method's own."""
        prefix = next((prefix for prefix in NETWORKS if name.startswith(prefix)), "")
        part = self._roles.of(name.removeprefix(prefix)) if prefix else name
        return prefix + part.partition(".")[0]

    def find_frozen(self, network: nn.Module) -> frozenset[str]:
        """Names of what is frozen, as far as it stays as it is."""
        found = super().find_frozen(network)
        chosen = chosen_names(network, {bare_name(name) for name in found}, self._frozen_patterns)
        return frozenset(name for name in found if bare_name(name) in chosen)

    def frozen_in_module(self) -> set[str]:
        """Names in the module of what is frozen."""
        return {bare_name(name) for name in self.frozen}

    def constant_layers(self) -> Iterator[nn.Module]:
        """Layers that the author has frozen and put into evaluation mode, and normalization that never trains."""
        yield from self.frozen_norms()
        for network in self.networks():
            for name in self._kept_in_evaluation:
                layer = network.get_submodule(name)
                parameters = list(layer.parameters())
                if parameters and not any(parameter.requires_grad for parameter in parameters):
                    yield layer

    # ------------------------------------------------------------------ names and roles

    def match(self, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """The names whose roles fit; without a head the encoder is everything."""
        known = list(names)
        roles = [self._role(name) for name in known]
        if not self._roles:
            if ("encoder.*" in patterns) != ("head.*" in patterns):
                raise HeadNeeded(
                    f"{type(self).__name__} sets the head of {type(self.module).__name__} apart, and it has none: name "
                    "the last layers by head="
                )
            patterns = [pattern for pattern in patterns if pattern != "head.*"]
        fitting = set(matching(tuple(roles), tuple(patterns)))
        return [name for name, role in zip(known, roles, strict=True) if role in fitting]

    def _role(self, name: str) -> str:
        return self._roles.of(name.removeprefix("module.")) if name.startswith("module.") else name

    def trained_names(self, phase: Phase) -> set[str]:
        """Names of the parameters that train in a phase; not those that the module's author has frozen."""
        found = super().trained_names(phase)
        return {name for name in found if bare_name(name) not in self._never_trained}

    def shared_names(self) -> list[str]:
        """Names of what travels: of whole numbers (a table, a counter) only the counters of batch normalization.

        These are averaged and rounded; a mean of other whole numbers has no meaning, and they stay on the client. So do
        buffers that are not finite at the start, such as a threshold that is yet to be set. What the user has chosen
        goes before all this.
        """
        counters, state = norm_names(self, affine=False), self.state_dict()
        usual = {name for name in super().shared_names() if name not in self.uninitialized_buffers}
        usual = {name for name in usual if state[name].is_floating_point() or name in counters}
        personal, shared = self.chosen
        usual |= {name for name in state if _names(shared, name)} - self.frozen
        return [name for name in state if name in usual and not _names(personal, name)]

    def fixed_names(self) -> list[str]:
        """Names of what keeps its first value; not what the user keeps on the clients or shares."""
        return [name for name in super().fixed_names() if not any(_names(own, name) for own in self.chosen)]


def _names(chosen: frozenset[str], name: str) -> bool:
    """Whether a name of the client's state is that of a chosen part of the module."""
    return bool(chosen) and name.startswith(NETWORKS) and bare_name(name) in chosen
