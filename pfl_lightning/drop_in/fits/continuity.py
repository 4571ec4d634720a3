"""What goes on from a client's local fit to its next: counts, schedules and the state of optimizers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pfl_lightning.checks import check_choice
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules.adapters.loading.plain_values import Values
from pfl_lightning.drop_in.fits.counters import Counts
from pfl_lightning.drop_in.fits.module_calls import flat_objects
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.carried import split_attributes, with_attributes

__all__ = ["Continuity", "Course", "GoesOn"]


@dataclass(frozen=True)
class Continuity:
    """What of a local fit the same client's next one goes on with.

    Attributes:
        schedule: ``"continue"``: schedulers, ``current_epoch``, ``global_step`` and learning rates go on, over the
            rounds that the client took part in; ``"restart"``: every local fit begins at epoch 0.
        optimizer_state: ``"keep"``: momenta and the like stay with the client; ``"reset"``: every local fit begins
            without them.
    """

    schedule: str = "continue"
    optimizer_state: str = "reset"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.schedule == "rounds":
            raise ConfigurationError(
                "schedule='rounds' is for built-in methods: a LightningModule's schedules may also follow metrics and "
                "thawed layers, which a client does not have of rounds without it; use 'continue', which is the same "
                "where every client takes part in every round"
            )
        check_choice("schedule", self.schedule, ("continue", "restart"))
        check_choice("optimizer_state", self.optimizer_state, ("keep", "reset"))

    @property
    def continues(self) -> bool:
        """Whether counts and schedules go on."""
        return self.schedule == "continue"

    @property
    def keeps(self) -> bool:
        """Whether the state of optimizers stays with the client."""
        return self.optimizer_state == "keep"

    @property
    def carries(self) -> bool:
        """Whether anything goes on."""
        return self.continues or self.keeps


class Course:
    """What the phases of a local fit take over from the client's last one, and hand on to its next.

    Each phase goes on with what the phase at its place in the last fit has handed on.

    Args:
        settings: What goes on.
        content: What the client's last fit has handed on; empty before its first.
        name: Of the module, for messages.
    """

    def __init__(self, settings: Continuity, content: bytes, name: str) -> None:
        self.settings, self._name = settings, name
        self._before: list[dict[str, Any]] = _decoded(content, name) if content else []
        self._after: list[dict[str, Any]] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Any] = []
        self._has_taken_over, self._trained = False, dict[str, bool]()

    @property
    def _earlier(self) -> dict[str, Any]:
        """What the current phase goes on with."""
        index = len(self._after)
        return self._before[index] if index < len(self._before) else {}

    @property
    def counts(self) -> Counts:
        """How far the current phase had come before this fit."""
        return Counts(*self._earlier.get("counts", ()))

    @property
    def changed(self) -> dict[str, bool]:
        """What the current phase has frozen, thawed or set into a mode before this fit."""
        return dict(self._earlier.get("changed", {}))

    @property
    def datasets(self) -> Values:
        """Plain attributes of divided data sets as the phase has left them before; empty where they are the first."""
        return list(self._earlier.get("datasets", ())) if self.settings.continues else []

    def keep_datasets(self, values: Values) -> None:
        """Note what the phase that has just finished has left in attributes of divided data sets."""
        if self.settings.continues and self._after:
            self._after[-1]["datasets"] = values

    @contextmanager
    def as_last_made(self, module: nn.Module) -> Iterator[None]:
        """While a phase makes its first optimizers, let train what did when the last fit made its last ones.

        They differ where a module thaws a part and sets its optimizers up once more.
        """
        wanted: dict[str, bool] = {} if self._has_taken_over else self._earlier.get("trained", {})
        before = {p: p.requires_grad for name, p in module.named_parameters() if name in wanted}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(wanted.get(name, parameter.requires_grad))
        try:
            yield
        finally:
            for parameter, value in before.items():
                parameter.requires_grad_(value)

    def take_over(self, configured: Any, module: nn.Module) -> None:
        """Let what ``configure_optimizers`` returned go on.

        Only what it returns first in a phase does. A module that sets its optimizers up once more, after it has thawed
        a part, gets new ones; the client's next fit goes on with these, unless it starts at epoch 0 again.

        Raises:
            ConfigurationError: It has other optimizers, groups or schedulers than in the client's last fit.
        """
        again, self._has_taken_over = self._has_taken_over, True
        if again and not self.settings.continues:
            return
        found = list(flat_objects(configured))
        self._optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._schedulers = [each for each in found if not isinstance(each, Optimizer) and hasattr(each, "state_dict")]
        if again:
            self._trained = {name: p.requires_grad for name, p in module.named_parameters()}
        if again or not self._earlier:
            return
        optimizers, schedulers = self._earlier["optimizers"], self._earlier["schedulers"]
        try:
            if len(optimizers) != len(self._optimizers):
                raise ValueError(f"{len(optimizers)} optimizers then, {len(self._optimizers)} now")
            if self.settings.continues and self._earlier["counts"]:
                for scheduler, state in zip(self._schedulers, schedulers, strict=True):
                    scheduler.load_state_dict(state)
            for optimizer, state in zip(self._optimizers, optimizers, strict=True):
                taken = state if self.settings.continues else {"state": state["state"]}
                optimizer.load_state_dict({**optimizer.state_dict(), **taken})
        except (ValueError, KeyError) as error:
            raise ConfigurationError(
                f"what {self._name}.configure_optimizers returns differs from the client's last local fit ({error}), "
                "so that it cannot go on: let it return the same optimizers, groups and schedulers at every call, or "
                "use federate(..., schedule='restart', optimizer_state='reset')"
            ) from error

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """What the Trainer of the current phase's last fit had of logged values, where the module reads them."""
        return dict(self._earlier.get("metrics", {}))

    def finish_phase(
        self,
        counts: Counts,
        changed: dict[str, bool] | None = None,
        metrics: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Note how far the current phase has come, what its module has changed and reads; the next one begins."""
        continues, keeps = self.settings.continues, self.settings.keeps
        optimizers = []
        for optimizer in self._optimizers:
            state = optimizer.state_dict()
            state = {"state": state["state"] if keeps else {}, "param_groups": state["param_groups"]}
            optimizers.append(state if continues else {"state": state["state"]})
        self._after.append(
            {
                "counts": astuple(counts) if continues else (),
                "optimizers": optimizers,
                "schedulers": [each.state_dict() for each in self._schedulers] if continues else [],
                "changed": changed or {} if continues else {},
                "metrics": metrics or {} if continues else {},
                "trained": self._trained or self._earlier.get("trained", {}),
            }
        )
        self._optimizers, self._schedulers = [], []
        self._has_taken_over, self._trained = False, {}

    def encoded(self) -> bytes:
        """What the fit hands on."""
        file = io.BytesIO()
        torch.save(_plain(self._after), file)
        return file.getvalue()


class GoesOn(FederatedClient):
    """A client whose local fits go on where its last one ended, as far as :attr:`continuity` says."""

    continuity = Continuity("restart", "reset")

    @property
    def hands_on(self) -> bool:
        """Whether anything goes on."""
        return self.continuity.carries

    course: Course | None = None
    """Of the fit under way; ``None`` where nothing goes on, as in a fine-tuning before an evaluation."""

    @property
    def carried(self) -> bytes | None:  # type: ignore[override]  # where it is set, it is unpacked
        """What the fit hands on to the client's next."""
        return None if self.course is None else with_attributes(self.course.encoded(), self.kept_attributes())

    @carried.setter
    def carried(self, content: bytes | None) -> None:
        name = type(self.step_module).__name__
        self.course = None if content is None else Course(self.continuity, split_attributes(content)[0], name)

    def kept_attributes(self) -> bytes:
        """What the fit has made of the module's plain attributes."""
        return b""


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which are read without running code."""
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items()) if type(value) is dict else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def _decoded(content: bytes, name: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever class: an object that is no tensor, number, list or dictionary
        reason = str(error).strip().splitlines()
        raise ConfigurationError(
            f"a scheduler or an optimizer of {name} keeps objects in its state_dict that are not stored for clients "
            f"({reason[-1] if reason else type(error).__name__}): let it keep tensors, numbers, strings, lists and "
            "dictionaries, or use federate(..., schedule='restart', optimizer_state='reset')"
        ) from error
    return found
