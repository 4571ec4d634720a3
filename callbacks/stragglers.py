"""Clients that are slow, late or gone: rounds in simulated time."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import lightning as L

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.devices import Devices, Fleet
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.simulation import LateUpdate, Simulation

Late = Literal["drop", "partial", "next"]


class Stragglers(L.Callback):
    """Callback that simulates time: clients may be absent, be slow, or drop out.

    The loop's sample is of clients that are there: further ones are asked in the places of others. A client's update
    is there after the seconds of its messages and of the local steps that it takes. It is left out as one that fails
    is, without a warning, and keeps its personal state. A round that no update reaches leaves the server as it is.

    Args:
        devices: How fast clients are, when they are there, and how often they drop out; ``None`` for equal ones.
        deadline: Simulated seconds after which a round ends in any case; ``None`` waits for all that report.
        over_selection: Clients that are asked for each one that is wanted: under 1.3 a cohort of 10 asks 13, and the
            round ends with the tenth update (Bonawitz et al., MLSys 2019).
        late: What becomes of a client that does not meet the deadline: ``"drop"`` leaves its update out; under
            ``"partial"`` it takes as many local steps as it has time for (Li et al., MLSys 2020; Wang et al., NeurIPS
            2020); under ``"next"`` it goes on, and its update is taken in the round in which it arrives. The
            first of these rounds in which it may take part again is the one after that.
        discount: With ``late="next"``: what the change in a late update is multiplied by for each round that it is
            late.

    Attributes:
        simulation: The simulated time of the fit, and who takes part in its rounds; ``None`` before it.

    Raises:
        ConfigurationError: An argument is out of bounds.

    Example:
        >>> from pfl_lightning.callbacks import Devices, Stragglers
        >>> L.Trainer(callbacks=[Stragglers(Devices(spread=1.0), deadline=30, late="partial")])  # doctest: +SKIP
    """

    def __init__(
        self,
        devices: Devices | None = None,
        deadline: float | None = None,
        over_selection: float = 1.0,
        late: Late = "drop",
        discount: float = 0.5,
    ) -> None:
        check_number("deadline", deadline, strict=True, optional=True)
        check_number("over_selection", over_selection, 1.0)
        check_choice("late", late, get_args(Late))
        check_between("discount", discount, 0, 1)
        if late != "drop" and deadline is None and over_selection == 1:
            raise ConfigurationError(f"late={late!r} needs a deadline: without one no client is late")
        self.devices, self._rule = devices or Devices(), (deadline, over_selection, late, discount)
        self.late, self._fits, self.simulation = late, False, cast(Simulation | None, None)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the trace; a new fit begins at 0 seconds.

        Raises:
            ConfigurationError: The module is no federation, or the trace does not fit its clients.
        """
        federation: Any = pl_module
        self._fits = stage == "fit"
        if self._fits and not hasattr(federation, "begin_round"):
            raise ConfigurationError(f"Stragglers is for a federation, got {type(federation).__name__}: use federate")
        if self._fits and (self.simulation is None or not trainer.fit_loop.epoch_progress.current.ready):
            self.simulation = Simulation(Fleet(self.devices, federation.data, federation.seed), *self._rule)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse options that cannot be combined.

        Raises:
            ConfigurationError: Late updates of a method whose server does not average models; privacy.
        """
        federation: Any = pl_module
        if self.late == "next" and not federation.server.averages_models:
            raise ConfigurationError(
                f"late='next' needs a server that averages models, and that of {federation.method_name} does not: use "
                "late='drop' or late='partial'"
            )
        if federation.privacy is not None:
            raise ConfigurationError("Stragglers and privacy both decide who counts in a round: use one of them")

    def state_dict(self) -> dict[str, Any]:
        """The clock, and the updates on their way."""
        if self.simulation is None:
            return {}
        return {"clock": self.simulation.clock, "pending": [dict(vars(late)) for late in self.simulation.pending]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; an evaluation needs none of it."""
        if self._fits and self.simulation is not None:
            self.simulation.clock = state_dict["clock"]
            self.simulation.pending = [LateUpdate(**late) for late in state_dict["pending"]]
