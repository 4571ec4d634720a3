"""What a checkpoint of a federation holds beside tensors, and what it must fit to be loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.data import FederatedData
from pfl_lightning.errors import CheckpointError, FederationError
from pfl_lightning.state.checkpoints.file import as_federation_wrote, content_fault, damaged, goes_on
from pfl_lightning.state.checkpoints.writing import check_fits

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

__all__ = ["SavedState", "check_checkpoint", "saying_what_does_not_fit"]


class SavedState:
    """Gives a checkpoint what identifies a federation and its clients' states, and restores it."""

    def __init__(self) -> None:
        self._fingerprint = ""
        self._data_fingerprint: str | None = None

    def know(self, data: FederatedData) -> None:
        """Note what identifies the data and their partition."""
        self._fingerprint, self._data_fingerprint = data.fingerprint, getattr(data, "data_fingerprint", None)

    def content(self, federation: Federation) -> dict[str, Any]:
        """What identifies the federation, every client's personal state, and what never changes."""
        return {
            "method": federation.method_name,
            "seed": federation.seed,
            "partition": self._fingerprint,
            "data": self._data_fingerprint,
            "round": federation.round,
            "has_trained": federation.has_trained,
            "schedule": _schedule(federation),
            **federation.clients.state_dict(),
        }

    def restore(self, federation: Federation, state: dict[str, Any]) -> None:
        """Restore what :meth:`content` gave; warn where what follows will differ from the uninterrupted run."""
        fits = federation.trainer.state.fn == TrainerFn.FITTING
        for warning in _differences(federation, state) if fits else ():
            warnings.warn(warning, stacklevel=2)
        before, now = state["data"], self._data_fingerprint
        federation.data_before = before if None not in (before, now) and before != now else None
        if federation.data_before is not None:
            warnings.warn(
                f"the checkpoint was trained on other data (fingerprint {before}) than those on which it "
                f"{'goes on' if fits else 'is evaluated'} ({now}), though they are divided in the same way: see "
                "that the folder or the arrays are the right ones",
                stacklevel=2,
            )
        federation.clients.load_state_dict(state)
        federation.round, federation.has_trained = state["round"], state["has_trained"]


def _schedule(federation: Federation) -> str | None:
    first = federation.clients.models[0]
    return first.schedule if first.has_schedule else None


def _differences(federation: Federation, state: dict[str, Any]) -> Iterator[str]:
    """In what a fit that goes on from a checkpoint differs from the checkpoint's run."""
    if state["seed"] != federation.seed:
        yield (
            f"the checkpoint was made with seed {state['seed']}, this run has {federation.seed}: what follows will "
            "differ from the uninterrupted run"
        )
    if federation.clients.resume_states is not None and "carried" not in state:
        yield (
            "the checkpoint holds no schedules and no states of optimizers: those of all clients start again; "
            "schedule='restart' (and optimizer_state='reset' of federate) lets every local fit start again"
        )
    before, now = state["schedule"], _schedule(federation)
    if None not in (before, now) and before != now:
        yield (
            f"the checkpoint was trained with schedule={before!r} of the learning rate, this run has {now!r}: what "
            "follows will differ from the uninterrupted run"
        )


def check_checkpoint(federation: Federation, checkpoint: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else before anything is overwritten.

    Raises:
        CheckpointError: The checkpoint is incomplete, or of another method, another encoder or another number of
            clients.
    """
    as_federation_wrote(checkpoint)
    if not federation.is_set_up:
        raise CheckpointError(
            "a federation takes its shape from the data: load the checkpoint by ckpt_path of the Trainer's fit, "
            "validate or test, not by load_from_checkpoint"
        )
    fault = content_fault(checkpoint)
    if fault is None and federation.trainer.state.fn == TrainerFn.FITTING and not goes_on(checkpoint):
        fault = "holds the models alone (save_weights_only): it can be evaluated, but no fit can go on from it"
    if fault is not None:
        raise damaged(str(federation.trainer.ckpt_path), fault)
    check_fits(
        checkpoint["state_dict"],
        federation.method_name,
        federation.num_clients,
        federation.data.fingerprint,
        federation.clients.labels,
        {f"models.{name}": tensor for name, tensor in federation.models.state_dict().items()},
    )


@contextmanager
def saying_what_does_not_fit() -> Iterator[None]:
    """Inside, a federation's state is loaded; what does not fit is said in a sentence.

    Raises:
        CheckpointError: The names or shapes of the server's state are others, or parts are missing.
    """
    try:
        yield
    except FederationError:
        raise
    except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
        what = "; ".join(line.strip() for line in str(error).splitlines()[:3])
        raise CheckpointError(
            f"the checkpoint does not fit this federation ({type(error).__name__}: {what}); use the method, its "
            "options and the version that it was made with"
        ) from error
