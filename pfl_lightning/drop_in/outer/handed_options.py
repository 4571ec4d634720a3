"""Options of the outer Trainer that a Lightning user means for batches and steps, handed on to local fits."""

from __future__ import annotations

from typing import Any

from pfl_lightning.lightning_private import SECONDS_BETWEEN_VALIDATIONS

__all__ = ["HandedOptions"]

_NONE_OUTSIDE: dict[str, Any] = {
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "accumulate_grad_batches": 1,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "limit_test_batches": 1.0,
}
"""Options by name, and the values with which the outer Trainer does nothing of the kind with clients."""

_NONE_INSIDE: dict[str, Any] = dict.fromkeys(_NONE_OUTSIDE) | {
    "gradient_clip_algorithm": "norm",
    "accumulate_grad_batches": 1,
}
"""Values of an engine that was not given the option."""


class HandedOptions:
    """Gives an engine what its Trainers are to do with batches, in place of the outer Trainer, until the run ends."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def hand_in(self, trainer: Any, engine: Any) -> None:
        """Hand on what the engine has options for and was not given itself; the rest stays where it is.

        Args:
            trainer: The outer Trainer.
            engine: The engine of the local fits.
        """
        self.give_back()
        if trainer.overfit_batches:  # which has set limits, and means more than these
            return
        for name, nothing in _NONE_OUTSIDE.items():
            value = getattr(trainer, name)
            value = getattr(value, "value", value)  # of an enumeration
            means_all = value == nothing and type(value) is type(nothing)
            # Without clients there are no batches either: 0 means the same outside.
            if means_all or value == 0 or getattr(engine, name, self) != _NONE_INSIDE[name]:
                continue
            self.keep(trainer, name, nothing)
            self.keep(engine, name, value)
        if trainer.fast_dev_run and getattr(engine, "limit_train_batches", None) == trainer.fast_dev_run:
            self.keep(trainer.fit_loop.epoch_loop, "max_steps", -1)  # which fast_dev_run has set: clients

    def leave_out_validation(self, trainer: Any) -> None:
        """Let the outer Trainer know of no validation within an epoch, which a plain run has not without validation."""
        self.keep(trainer, "val_check_interval", 1.0)
        if hasattr(trainer, SECONDS_BETWEEN_VALIDATIONS):
            self.keep(trainer, SECONDS_BETWEEN_VALIDATIONS, None)
        if trainer.check_val_every_n_epoch is None:
            self.keep(trainer, "check_val_every_n_epoch", 1)

    def keep(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute have another value until the run ends."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def give_back(self) -> None:
        """Let both have their own options again."""
        while self._before:
            setattr(*self._before.pop())
