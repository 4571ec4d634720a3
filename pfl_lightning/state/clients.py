"""All clients of a federation: a module for each architecture, and every client's state at rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.state.architectures import ArchitectureSummary, summarize_architectures
from pfl_lightning.state.grouped_states import GroupedStates
from pfl_lightning.state.tensors import select_state

__all__ = ["Clients"]


class Clients:
    """Which client has which architecture, and what each has stored.

    Args:
        models: A module for each architecture, which its clients use in turn; they hold the first weights.
        labels: What tables call each architecture.
        architecture_of: The architecture of each client, as an index into ``models``.
    """

    def __init__(
        self, models: Sequence[FederatedClient], labels: Sequence[str], architecture_of: Sequence[int]
    ) -> None:
        self.models, self.labels, self.architecture_of = list(models), list(labels), list(architecture_of)
        self.personal = GroupedStates([select_state(model, model.kept_names()) for model in models], architecture_of)
        self._fixed = [select_state(model, model.fixed_names()) for model in models]

    @property
    def summaries(self) -> list[ArchitectureSummary]:
        """What the architectures are and how many clients have each."""
        return summarize_architectures(self.models, self.labels, self.architecture_of)

    def first_state(self, architecture: int) -> dict[str, Tensor]:
        """What clients of an architecture have stored before their first local fit, and what never changes."""
        return {**self._fixed[architecture], **self.personal.stores[architecture].initial}

    def model_of(self, client: int) -> FederatedClient:
        """The module that the client shares with all clients of its architecture; it holds any of their states."""
        return self.models[self.architecture_of[client]]

    def stored(self, client: int) -> dict[str, Tensor]:
        """The client's stored state and what never changes; views into the store."""
        return {**self._fixed[self.architecture_of[client]], **self.personal.get(client)}

    def keeps_trained(self, client: int) -> bool:
        """Whether what is stored for the client is its whole model as its last local fit left it."""
        return self.model_of(client).eval_model == "trained" and self.personal.written(client)

    def state_dict(self) -> dict[str, Any]:
        """Every client's stored state, and what never changes, for the checkpoint."""
        return {
            "personal": self.personal.state_dict(),
            "encoders": list(self.labels),
            "fixed": [dict(fixed) for fixed in self._fixed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: Other clients, other architectures or another dealing of them.
        """
        self.personal.load_state_dict(state["personal"])
        self._fixed = [{name: tensor.clone() for name, tensor in fixed.items()} for fixed in state["fixed"]]
