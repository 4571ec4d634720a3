"""All clients of a federation: a module for each architecture, and the stored state of every client."""

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
    """Architecture and stored state of every client.

    Args:
        models: A module for each architecture, which its clients use in turn; they hold the first weights.
        labels: Name of each architecture, for tables.
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
        """Summary of each architecture, with its number of clients."""
        return summarize_architectures(self.models, self.labels, self.architecture_of)

    def first_state(self, architecture: int) -> dict[str, Tensor]:
        """Stored state of an architecture's clients before their first local fit, with the fixed tensors."""
        return {**self._fixed[architecture], **self.personal.stores[architecture].initial}

    def model_of(self, client: int) -> FederatedClient:
        """Module of the client's architecture, which all its clients use in turn."""
        return self.models[self.architecture_of[client]]

    def stored(self, client: int) -> dict[str, Tensor]:
        """Stored state of the client, with the fixed tensors; views into the store."""
        return {**self._fixed[self.architecture_of[client]], **self.personal.get(client)}

    def keeps_trained(self, client: int) -> bool:
        """Whether the store holds the client's whole model after its last local fit."""
        return self.model_of(client).eval_model == "trained" and self.personal.written(client)

    def state_dict(self) -> dict[str, Any]:
        """Content for a checkpoint: the stored states and the fixed tensors."""
        return {
            "personal": self.personal.state_dict(),
            "encoders": list(self.labels),
            "fixed": [dict(fixed) for fixed in self._fixed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: Other clients, other architectures or another assignment of them.
        """
        self.personal.load_state_dict(state["personal"])
        self._fixed = [{name: tensor.clone() for name, tensor in fixed.items()} for fixed in state["fixed"]]
