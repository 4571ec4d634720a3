"""What a checkpoint of a federation holds beside tensors, and what it must fit to be loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.data import FederatedData
from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.checkpoints import as_federation_wrote, content_fault, damaged, goes_on

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation


def fingerprints(data: FederatedData) -> dict[str, str | None]:
    """What identifies the partition, and the data where they say so."""
    return {"partition": data.fingerprint, "data": getattr(data, "data_fingerprint", None)}


def saved_content(federation: Federation) -> dict[str, Any]:
    """What identifies the federation, every client's personal state, and what never changes."""
    return {
        "method": federation.method_name,
        "server_optimizer": _server_optimizer(federation),
        "seed": federation.seed,
        **({} if federation.mechanism is None else {"privacy": federation.mechanism.state_dict()}),
        "robust": repr(federation.robust),
        **federation.fingerprints,
        "engine_choices": dict(federation.engine.choices),
        "round": federation.round,
        "has_trained": federation.has_trained,
        **_continuity(federation),
        **federation.clients.state_dict(),
    }


def restore(federation: Federation, state: dict[str, Any]) -> None:
    """Restore what ``get_extra_state`` gave; warn where what follows will differ from the uninterrupted run."""
    fits = federation.trainer.state.fn == TrainerFn.FITTING
    for warning in _differences(federation, state) if fits else ():
        warnings.warn(warning, stacklevel=1)
    before, now = state["data"], federation.fingerprints["data"]
    federation.data_before = before if None not in (before, now) and before != now else None
    if federation.data_before is not None:
        warnings.warn(
            f"the checkpoint was trained on other data (fingerprint {before}) than those on which it "
            f"{'continues' if fits else 'is evaluated'} ({now}), though they are divided in the same way: check "
            "that the folder or the arrays are the right ones",
            stacklevel=1,
        )
    federation.clients.load_state_dict(state)
    federation.engine.choices = dict(state.get("engine_choices", {}))
    if federation.mechanism is not None and "privacy" in state:
        federation.mechanism.load_state_dict(state["privacy"])
    federation.round, federation.has_trained = state["round"], state["has_trained"]


def _continuity(federation: Federation) -> dict[str, str | None]:
    """Options of what goes on from fit to fit; ``None`` where a built-in method has no schedule."""
    first = federation.clients.models[0]
    if first.user_module is not None:
        return vars(first.user_module.continuity)
    return {"schedule": None if first._make_scheduler is None else first.schedule}


def _server_optimizer(federation: Federation) -> str | None:
    learner = getattr(federation.server, "server_optimizer", None)
    return None if learner is None else type(learner.optimizer).__name__


def _differences(federation: Federation, state: dict[str, Any]) -> Iterator[str]:
    """In what a fit that goes on from a checkpoint differs from the checkpoint's run."""
    for name, now in {"seed": federation.seed, "robust": repr(federation.robust), **_continuity(federation)}.items():
        if None not in (before := state.get(name), now) and before != now:
            yield (
                f"the checkpoint was made with {name} {before!r}, this run has {now!r}: what follows will differ "
                "from the uninterrupted run"
            )
    if federation.clients.resume_states is not None and "carried" not in state:
        yield (
            "the checkpoint has no states of optimizers and schedules, so those of all clients start again, once; "
            "to start them again in every local fit, set schedule='restart' (and optimizer_state='reset' of federate)"
        )


def check_checkpoint(federation: Federation, checkpoint: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else before anything is overwritten.

    Raises:
        CheckpointError: The checkpoint is incomplete, or of another method, encoder, number of clients or partition.
    """
    as_federation_wrote(checkpoint)
    if not federation.is_set_up:
        raise CheckpointError(
            "a federation takes its shape from the data: load the checkpoint by ckpt_path of the Trainer's fit, "
            "validate or test, not by load_from_checkpoint"
        )
    fault = content_fault(checkpoint)
    if fault is None and federation.trainer.state.fn == TrainerFn.FITTING and not goes_on(checkpoint):
        fault = "holds the models alone (save_weights_only): it can be evaluated, but no fit can resume from it"
    if fault is not None:
        raise damaged(str(federation.trainer.ckpt_path), fault)
    extra = checkpoint["state_dict"]["_extra_state"]
    clients = extra["personal"]["num_clients"], federation.num_clients
    optimizers = extra.get("server_optimizer"), _server_optimizer(federation)
    methods = extra["method"], federation.method_name
    kinds: Any = [("method", *methods), ("number of clients", *clients), ("server optimizer", *optimizers)]
    if federation.trainer.state.fn == TrainerFn.FITTING:
        private = ("on" if one else "off" for one in ("privacy" in extra, federation.mechanism is not None))
        kinds.append(("setting of privacy", *private))
    for what, there, here in kinds:
        if there != here:
            raise CheckpointError(
                f"the checkpoint is of another {what}, {there}; this run has {here}: use the config of the "
                "checkpoint's run (its config.yaml), or leave out ckpt_path to begin from round 1"
            )
    if extra["partition"] != federation.data.fingerprint:
        raise CheckpointError(
            "the checkpoint was made with another partition: a client's test samples may be among those it was trained "
            "on. Use the same data and partition arguments, or FromFile with the partition.npz of its run"
        )
    saved, own = checkpoint["state_dict"], federation.models.state_dict(prefix="models.")
    shapes, now = ({n: tuple(t.shape) for n, t in one.items() if n.startswith("models.")} for one in (saved, own))
    name = next((name for name in {**shapes, **now} if shapes.get(name) != now.get(name)), None)
    if name is not None:
        raise CheckpointError(
            f"the checkpoint is of another encoder, or of other options of the method: the shape of {name} is "
            f"{shapes.get(name)} there, and {now.get(name)} here"
        )
    labels = federation.clients.labels
    if list(extra["encoders"]) != list(labels):
        # One encoder may go by several names (registered, import path, class), so that this is no proof.
        warnings.warn(
            f"the checkpoint's encoders are called {list(extra['encoders'])}, this run's {list(labels)}; "
            "their shapes agree, but check that they are the same",
            stacklevel=1,
        )


def misfit(error: Exception) -> CheckpointError:
    """What an error of loading a federation's state says of the checkpoint, in a sentence."""
    what = "; ".join(line.strip() for line in str(error).splitlines()[:3])
    return CheckpointError(
        f"the checkpoint does not fit this federation ({type(error).__name__}: {what}); use the method, its "
        "options and the version that it was made with"
    )
