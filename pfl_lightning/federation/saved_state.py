"""What a checkpoint of a federation holds beside tensors, and what it must fit to be loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.data import FederatedData
from pfl_lightning.errors import CheckpointError, FederationError
from pfl_lightning.federation.rounds import FederationRounds
from pfl_lightning.state.checkpoints.file import content_fault, damaged, goes_on
from pfl_lightning.state.checkpoints.module import as_federation_wrote
from pfl_lightning.state.checkpoints.writing import check_fits

__all__ = ["SavedState"]


class SavedState(FederationRounds):
    """Saves and restores the clients' states, and refuses checkpoints of something else."""

    _fingerprint: str
    _data_fingerprint: str | None = None

    data_before: str | None = None
    """Fingerprint of the data on which the loaded checkpoint was trained; ``None`` if they are these, or not known."""

    def _know(self, data: FederatedData) -> None:
        """Note what identifies the data and their partition."""
        self._fingerprint, self._data_fingerprint = data.fingerprint, getattr(data, "data_fingerprint", None)

    def get_extra_state(self) -> dict[str, Any]:
        """What identifies the federation, every client's personal state, and what never changes."""
        return {
            "method": self.method_name,
            "seed": self.seed,
            "partition": self._fingerprint,
            "data": self._data_fingerprint,
            "round": self.round,
            "has_trained": self.has_trained,
            "schedule": self._schedule,
            **self.clients.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore every client's personal state, and what never changes."""
        if state["seed"] != self.seed and self.trainer.state.fn == TrainerFn.FITTING:
            warnings.warn(
                f"the checkpoint was made with seed {state['seed']}, this run has {self.seed}: "
                "what follows will differ from the uninterrupted run",
                stacklevel=2,
            )
        if self.clients.carried is not None and "carried" not in state and self.trainer.state.fn == TrainerFn.FITTING:
            warnings.warn(
                "the checkpoint holds no schedules and no states of optimizers: those of all clients start again; "
                "schedule='restart' (and optimizer_state='reset' of federate) lets every local fit start again",
                stacklevel=2,
            )
        self._compare_schedule(state["schedule"])
        self._compare_data(state["data"])
        self.clients.load_state_dict(state)
        self.round, self.has_trained = state["round"], state["has_trained"]

    @property
    def _schedule(self) -> str | None:
        first = self.clients.models[0]
        return first.schedule if first.has_schedule else None

    def _compare_schedule(self, before: str | None) -> None:
        now = self._schedule
        if None not in (before, now) and before != now and self.trainer.state.fn == TrainerFn.FITTING:
            warnings.warn(
                f"the checkpoint was trained with schedule={before!r} of the learning rate, this run has {now!r}: what "
                "follows will differ from the uninterrupted run",
                stacklevel=2,
            )

    def _compare_data(self, before: str | None) -> None:
        known = None not in (before, self._data_fingerprint)
        self.data_before = before if known and before != self._data_fingerprint else None
        if self.data_before is not None:
            what = "goes on" if self.trainer.state.fn == TrainerFn.FITTING else "is evaluated"
            warnings.warn(
                f"the checkpoint was trained on other data (fingerprint {before}) than those on which it {what} "
                f"({self._data_fingerprint}), though they are divided in the same way: see that the folder or the "
                "arrays are the right ones",
                stacklevel=2,
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of something else before anything is overwritten.

        Raises:
            CheckpointError: The checkpoint is incomplete, or of another method, another encoder or another number of
                clients.
        """
        as_federation_wrote(checkpoint)
        if not self.is_set_up:
            raise CheckpointError(
                "a federation takes its shape from the data: load the checkpoint by ckpt_path of the Trainer's fit, "
                "validate or test, not by load_from_checkpoint"
            )
        path, fault = str(self.trainer.ckpt_path), content_fault(checkpoint)
        if fault is None and self.trainer.state.fn == TrainerFn.FITTING and not goes_on(checkpoint):
            fault = "holds the models alone (save_weights_only): it can be evaluated, but no fit can go on from it"
        if fault is not None:
            raise damaged(path, fault)
        own = {f"models.{name}": tensor for name, tensor in self.models.state_dict().items()}
        check_fits(
            checkpoint["state_dict"],
            self.method_name,
            self.num_clients,
            self.data.fingerprint,
            self.clients.labels,
            own,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, and say in a sentence what does not fit.

        Raises:
            CheckpointError: The names or shapes of the server's state are others, or parts are missing.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, FederationError):
                raise
            what = "; ".join(line.strip() for line in str(error).splitlines()[:3])
            raise CheckpointError(
                f"the checkpoint does not fit this federation ({type(error).__name__}: {what}); use the method, its "
                "options and the version that it was made with"
            ) from error
