"""The callback that drives the rounds of a federation."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeGuard

import lightning as L
import numpy as np
import torch

from pfl_lightning.checks import check_at_least, check_choice, check_number_of_clients
from pfl_lightning.engines import FitResult
from pfl_lightning.errors import CheckpointError, ConfigurationError, FederationError
from pfl_lightning.federation import outer_trainer as outer
from pfl_lightning.federation import private_rounds
from pfl_lightning.federation.divergence import MAX_GROWTH, DivergenceGuard
from pfl_lightning.names import described
from pfl_lightning.round import Round, Traffic
from pfl_lightning.seeding import Purpose, derive_seed
from pfl_lightning.simulation import Simulation
from pfl_lightning.state.update_norms import UpdateGuard

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

MAX_ROLLBACKS = 3
"""Rounds in a row that may have to be undone; then the run fails."""


class RoundLoop(L.Callback):
    """Samples the cohort of every round, and begins and closes the :class:`~pfl_lightning.round.Round`.

    An epoch of the Trainer is a round. The server aggregates after the last client of the round, before the validation.

    Args:
        cohort: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        full_participation_in_last_round: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        min_clients: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        eval_cohort: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        stop_on_divergence: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        max_update_ratio: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
        on_client_error: See :class:`~pfl_lightning.callbacks.FederatedLoop`.
    """

    state_key = "FederatedLoop"  # type: ignore[assignment]  # whatever the class: by it checkpoints find the counters

    def __init__(
        self,
        cohort: int | float = 1.0,
        full_participation_in_last_round: bool = False,
        min_clients: int = 1,
        eval_cohort: int | float = 1.0,
        stop_on_divergence: bool = False,
        max_update_ratio: float | None = 1000.0,
        on_client_error: str = "skip",
    ) -> None:
        check_number_of_clients("cohort", cohort, "an empty cohort has nothing to aggregate")
        check_number_of_clients(
            "eval_cohort", eval_cohort, "to evaluate nobody, set the Trainer's limit_val_batches to 0"
        )
        check_at_least("min_clients", min_clients, 1)
        check_choice("full_participation_in_last_round", full_participation_in_last_round, (True, False))
        check_choice("stop_on_divergence", stop_on_divergence, (True, False))
        check_choice("on_client_error", on_client_error, ("skip", "raise"))
        self.cohort, self.eval_cohort, self.on_client_error = cohort, eval_cohort, on_client_error
        self.full_participation_in_last_round, self.min_clients = full_participation_in_last_round, min_clients
        self.stop_on_divergence, self.max_update_ratio = stop_on_divergence, max_update_ratio
        self.begin()

    __repr__ = described

    def begin(self) -> None:
        """Count from the first round."""
        self.traffic, self.guard, self.updates = Traffic(), DivergenceGuard(), UpdateGuard(self.max_update_ratio)
        self._before_round: tuple[dict[str, int], dict[str, int]] = {}, {}
        self.rounds, self.seconds = 0, 0.0
        self.loss = math.nan  # mean training loss of the last round
        self.undone = 0  # rounds in a row
        self.left_out = Counter[int]()  # rounds in which the robust rule has left out a client's update
        self._sound = False  # the last round, as far as can be told before the next
        self._start = 0.0
        self._in_round, self.aggregated, self._goes_on = False, True, True
        self._round: Round | None = None
        self._loaders = outer.RoundLoaders()
        self.simulated: Simulation | None = None
        self._of_the_fit: dict[str, Any] | None = None  # the counters, while an evaluation has those of a checkpoint

    # ------------------------------------------------------------------ the cohort

    def sample_cohort(self, round: int, num_clients: int, seed: int, max_rounds: int | None) -> list[int]:
        """The clients of a round, ascending; a pure function of its arguments."""
        last = self.full_participation_in_last_round and max_rounds is not None and round == max_rounds - 1
        share = 1.0 if last else self.cohort
        return draw_clients("cohort", share, num_clients, derive_seed(seed, Purpose.COHORT, round))

    def sample_eval_clients(self, num_clients: int, seed: int) -> list[int]:
        """The clients that are evaluated after every round, ascending; a pure function of its arguments.

        Raises:
            ConfigurationError: More clients than there are.
        """
        return draw_clients("eval_cohort", self.eval_cohort, num_clients, derive_seed(seed, Purpose.EVAL_CLIENTS))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Set the data module's loaders to the cohort of each round and, during a fit, to the evaluated clients."""
        if stage == "predict":  # which a module does, in the place of its federation
            return
        if not _is_federation(pl_module):
            name = type(pl_module).__name__
            raise ConfigurationError(
                f"FederatedLoop drives a Federation, got {name}: with FederatedLoop(method=FedPer, num_clients=10) it "
                f"makes the federation of {name} and the Trainer's data itself; otherwise use pfl_lightning.federate"
            )
        self._goes_on = stage == "fit"
        if not self._goes_on:
            return
        if self.rounds and not trainer.fit_loop.epoch_progress.current.ready:
            self.begin()  # those were another Trainer's fit's; a checkpoint's are loaded after this
        data: Any = pl_module.data
        clients = data.participating
        size = self._size = len(draw_clients("cohort", self.cohort, len(clients), 0))
        if self.min_clients > size:
            raise ConfigurationError(
                f"min_clients is {self.min_clients}, but a round has {size} clients (cohort={self.cohort!r})"
            )

        if pl_module.privacy is not None:
            private_rounds.check(self, type(self).sample_cohort is not RoundLoop.sample_cohort)
            self.updates = UpdateGuard(None)  # which would let one client decide whether others count

        def cohort(round: int) -> list[int]:
            if pl_module.mechanism is not None:
                rate = private_rounds.sampling_rate(self, pl_module.mechanism, round, trainer.max_epochs)
                places = pl_module.mechanism.sample(rate)
            else:
                places = self.sample_cohort(round, len(clients), pl_module.seed, trainer.max_epochs)
            if places and not 0 <= min(places) <= max(places) < len(clients):
                raise ConfigurationError(
                    f"round {round + 1}: sample_cohort returned {places}, expected positions among the "
                    f"{len(clients)} participating clients, from 0 (not the numbers of clients, where some are novel)"
                )
            sample = [clients[place] for place in places]
            return sample if self.simulated is None else self.simulated.choose(round, sample, clients)

        data.cohort = cohort
        data.eval_clients = [clients[place] for place in self.sample_eval_clients(len(clients), pl_module.seed)]
        self._loaders.begin(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue after a checkpoint or an error; TensorBoard drops the curves of repeated rounds.

        Raises:
            ConfigurationError: The checkpoint has more rounds than the run is to have, or the cohorts are too small or
                too large for the robust rule.
        """
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        found = (getattr(one, "simulation", None) for one in callbacks)
        self.simulated = next((one for one in found if isinstance(one, Simulation)), None)
        federation: Any = pl_module
        if federation.robust is not None:
            federation.robust.check_cohort(self._size, federation.server)
        outer.go_on(trainer, self.rounds, self.guard.stopped if self.stop_on_divergence else 0)
        if federation.mechanism is not None:
            private_rounds.check_budget(self, trainer, federation.mechanism)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Evaluate all clients from now on."""
        self._give_back(trainer)

    def _give_back(self, trainer: Any) -> None:
        if self._of_the_fit is not None:
            self._load(self._of_the_fit)
            self._of_the_fit = None
        self._loaders.end(trainer)
        data: Any = getattr(trainer, "datamodule", None)
        if hasattr(data, "eval_clients"):
            data.eval_clients = None  # all

    # ------------------------------------------------------------------ a round

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round."""
        federation: Any = pl_module
        self._start = time.perf_counter()
        self._before_round = dict(self.traffic.up), dict(self.traffic.down)
        self._in_round, self.aggregated = True, False
        self._round = federation.begin_round(self.traffic, self.updates, self.on_client_error)
        if self.simulated is not None:
            self.simulated.begin_round(self._round.number, self._round.cohort)
            self._round.simulated = self.simulated

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the round after its last client: let the server aggregate, count the round and log its metrics."""
        assert self._round is not None
        if not (trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches):
            return
        growth = self._round.close(self.min_clients if self._round.mechanism is None else 0)
        self.undone = 0 if growth.fault is None else self.undone + 1
        self._sound = growth.fault is None and growth.factor <= MAX_GROWTH
        self.left_out.update(self._round.left_out)
        if self.undone >= MAX_ROLLBACKS:
            raise FederationError(
                f"round {trainer.current_epoch + 1}: {self.undone} rounds in a row had to be undone; the last: "
                f"{growth.fault}. Look at these clients; lower the learning rate, or clip the gradient, where updates "
                "have become very large; set a robust rule (robust=) where clients may lie"
            )
        # Without an optimizer `trainer.global_step` would stay 0, and ModelCheckpoint saves nothing while it does not
        # move: it counts rounds.
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        self.rounds += 1
        self.seconds += time.perf_counter() - self._start
        self.aggregated = True
        metrics = self._round.metrics()
        if self.simulated is not None:
            metrics["simulated/seconds"] = self.simulated.clock
        if self._round.mechanism is not None:
            private_rounds.stop_in_budget(self, trainer, self._round.mechanism, trainer.current_epoch + 1)
        self.loss = metrics.get("train/loss", math.nan)
        in_bar = {name for result in self._round.results for name in result.progress_bar_names}
        for name, value in metrics.items():
            held = torch.tensor(value)  # on the host, where all that reads it is
            pl_module.log(name, held, name in in_bar, logger=False, on_step=False, on_epoch=True, batch_size=1)
        exceeded = any(metrics.get(name, 0.0) > limit for name, limit in self.guard.limits.items())
        if exceeded or growth.factor > MAX_GROWTH:
            federation: Any = pl_module
            self._report(trainer, federation, self.guard.exceeded(metrics, growth, federation))
        metrics |= {f"bytes/up_{kind}": float(size) for kind, size in self.traffic.up.items()}
        metrics |= {f"bytes/down_{kind}": float(size) for kind, size in self.traffic.down.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.current_epoch)

    def _report(self, trainer: L.Trainer, federation: Federation, what: str | None) -> None:
        if what is not None:
            self.guard.report(what, trainer.current_epoch, federation)
            trainer.should_stop = trainer.should_stop or self.stop_on_divergence
            self.guard.stopped = self.rounds if self.stop_on_divergence else 0

    @property
    def clock(self) -> float | None:
        """Simulated seconds of the rounds that are over; ``None`` without a simulation."""
        return None if self.simulated is None else self.simulated.clock

    @property
    def closed_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes up and down of the rounds that are over, by kind, without those of one that was interrupted."""
        return (self.traffic.up, self.traffic.down) if self.aggregated else self._before_round

    @property
    def current_round(self) -> Round | None:
        """The round under way, or the last; ``None`` before the first."""
        return self._round

    @property
    def results(self) -> list[FitResult]:
        """Losses, times and errors of the clients of the round so far, without updates and personal states."""
        return [] if self._round is None else list(self._round.results)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the engine: Lightning calls no ``teardown`` after an error."""
        self._give_back(trainer)
        failed = self.undone or (self.results and all(result.error is not None for result in self.results))
        if isinstance(exception, FederationError) and failed and not self.aggregated:
            outer.name_previous(trainer, exception)
        if _is_federation(pl_module):
            pl_module.stop_engine()

    # From a checkpoint between the last client and the end of the validation Lightning does not go on as if nothing had
    # happened: it skips the rest, and the start of the next round. Until then the round counts as unfinished.
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the end of the round, evaluated or not."""
        self._in_round = self._in_round and not self.aggregated

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep only the last checkpoint of a finished run, unless the last round may have damaged it."""
        for _, previous in outer.previous_checkpoints(trainer) if self._sound else ():
            previous.unlink(missing_ok=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the results of the validation under the finished round."""
        self._in_round = self._in_round and not self.aggregated
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            assert _is_federation(pl_module)
            summary = pl_module.evaluation.summary
            for logger in trainer.loggers:
                logger.log_metrics(summary, step=trainer.current_epoch)
            self._report(trainer, pl_module, self.guard.falls(summary, pl_module, self.loss))

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counters, for the checkpoint."""
        return {
            "in_round": self._in_round,
            "eval_cohort": self.eval_cohort,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "undone": self.undone,
            "sound": self._sound,
            "guard": self.guard.state_dict(),
            "updates": self.updates.state_dict(),
            "left_out": dict(self.left_out),
            "up": dict(self.traffic.up),
            "down": dict(self.traffic.down),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters.

        Raises:
            CheckpointError: The checkpoint was written in the middle of a round.
        """
        if not self._goes_on and self.rounds and self._of_the_fit is None:
            self._of_the_fit = self.state_dict()  # the evaluation is of another round, and the fit may go on
        if state_dict["in_round"] and self._goes_on:  # it can be evaluated
            raise CheckpointError(
                f"the checkpoint was written in the middle of a round, after {state_dict['rounds']} rounds: not all of "
                "its clients had trained, or the new models were not all validated; resume from one that was written "
                "at the end of a round (ModelCheckpoint without every_n_train_steps and train_time_interval)"
            )
        before = state_dict["eval_cohort"]
        if self._goes_on and before != self.eval_cohort:
            warnings.warn(
                f"the checkpoint's run evaluated {before!r} of the clients, this one evaluates {self.eval_cohort!r}: "
                "values of rounds before and after are of different clients, and the best round is chosen among both",
                stacklevel=2,
            )
        self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self.rounds, self.seconds = state_dict["rounds"], state_dict["seconds"]
        self.undone, self._sound = state_dict["undone"], state_dict["sound"]
        self.guard.load_state_dict(state_dict["guard"])
        self.updates.load_state_dict(state_dict["updates"])
        self.left_out = Counter(state_dict.get("left_out", {}))  # which earlier versions do not have
        self.traffic.up, self.traffic.down = Counter(state_dict["up"]), Counter(state_dict["down"])


def loop_of(trainer: Any) -> RoundLoop:
    """The loop among the callbacks of a federation's Trainer."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, RoundLoop))


def _is_federation(module: L.LightningModule) -> TypeGuard[Federation]:
    return hasattr(module, "begin_round")


def draw_clients(name: str, share: int | float, num_clients: int, seed: int) -> list[int]:
    """Distinct clients, ascending; a pure function of its arguments.

    Args:
        name: Name of the option, for the error.
        share: How many: a share of all, rounded up, or a number.
        num_clients: Number of all clients.
        seed: Seed of the draw.

    Raises:
        ConfigurationError: More clients than there are.
    """
    size = max(1, math.ceil(share * num_clients - 1e-9)) if isinstance(share, float) else share
    if size > num_clients:
        raise ConfigurationError(f"{name} is {share} clients, there are {num_clients}")
    if size == num_clients:
        return list(range(num_clients))
    return sorted(np.random.default_rng(seed).choice(num_clients, size, replace=False).tolist())
