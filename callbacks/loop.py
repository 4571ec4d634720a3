"""The callback that drives the rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np

from pfl_lightning.callbacks.sampling import check_number_of_clients, draw_clients, number_of_clients
from pfl_lightning.callbacks.traffic import Traffic
from pfl_lightning.engines import FitResult
from pfl_lightning.errors import CheckpointError, ConfigurationError, FederationError
from pfl_lightning.federation import Federation
from pfl_lightning.messages import Broadcast
from pfl_lightning.seeding import Purpose, derive_seed

__all__ = ["FederatedLoop"]


class FederatedLoop(L.Callback):
    """Samples the cohort of every round, sends and collects the messages, and lets the server aggregate.

    An epoch of the Trainer is a round. The server aggregates after the last client of the round, before the validation.

    Args:
        cohort: How many clients take part in a round: a share of all (a float in (0, 1], rounded up) or a number.
            Novel clients of the data module are not counted: they never take part.
        full_participation_in_last_round: Whether all clients take part in the last round (round ``max_epochs`` - 1).
        min_clients: The run fails when fewer updates than this can be aggregated in a round.
        eval_cohort: How many clients are evaluated after a round of a fit, a share or a number as for ``cohort``: a
            random sample, the same in all rounds and after a resume. ``validate`` and ``test`` evaluate all clients.
    """

    def __init__(
        self,
        cohort: int | float = 1.0,
        full_participation_in_last_round: bool = False,
        min_clients: int = 1,
        eval_cohort: int | float = 1.0,
    ) -> None:
        check_number_of_clients("cohort", cohort, "an empty cohort has nothing to aggregate")
        check_number_of_clients(
            "eval_cohort", eval_cohort, "to evaluate nobody, set the Trainer's limit_val_batches to 0"
        )
        if min_clients < 1:
            raise ConfigurationError(f"min_clients must be at least 1, got {min_clients}")
        self.cohort, self.full_participation_in_last_round, self.min_clients = (
            cohort,
            full_participation_in_last_round,
            min_clients,
        )
        self.eval_cohort = self._eval_cohort_before = eval_cohort
        self.traffic = Traffic()
        self.rounds, self.seconds = 0, 0.0
        self._start = 0.0
        self._in_round = False
        self._aggregated = True
        self._results: list[FitResult] = []

    # ------------------------------------------------------------------ the cohort

    def cohort_size(self, num_clients: int) -> int:
        """Number of clients in a round.

        Raises:
            ConfigurationError: More clients than there are.
        """
        return number_of_clients("cohort", self.cohort, num_clients)

    def sample_cohort(self, round: int, num_clients: int, seed: int, max_rounds: int | None) -> list[int]:
        """The clients of a round, ascending; a pure function of its arguments."""
        last = self.full_participation_in_last_round and max_rounds is not None and round == max_rounds - 1
        size = num_clients if last else self.cohort_size(num_clients)
        return draw_clients(size, num_clients, derive_seed(seed, Purpose.COHORT, round))

    def sample_eval_clients(self, num_clients: int, seed: int) -> list[int]:
        """The clients that are evaluated after every round, ascending; a pure function of its arguments.

        Raises:
            ConfigurationError: More clients than there are.
        """
        size = number_of_clients("eval_cohort", self.eval_cohort, num_clients)
        return draw_clients(size, num_clients, derive_seed(seed, Purpose.EVAL_CLIENTS))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the data module deliver the cohort of each round and, during a fit, the clients that are evaluated."""
        if not isinstance(pl_module, Federation):
            raise ConfigurationError(f"FederatedLoop drives a Federation, got {type(pl_module).__name__}")
        if stage != "fit":
            return
        data: Any = pl_module.data
        clients = data.participating
        size = self.cohort_size(len(clients))
        if self.min_clients > size:
            raise ConfigurationError(
                f"min_clients is {self.min_clients}, but a round has {size} clients (cohort={self.cohort!r})"
            )

        def cohort(round: int) -> list[int]:
            places = self.sample_cohort(round, len(clients), pl_module.seed, trainer.max_epochs)
            return [clients[place] for place in places]

        data.cohort = cohort
        data.eval_clients = [clients[place] for place in self.sample_eval_clients(len(clients), pl_module.seed)]
        # The cohort may differ in size from round to round, and Lightning asks for the loader's length only on reload.
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say if the run so far evaluated others."""
        if self.eval_cohort != self._eval_cohort_before:
            warnings.warn(
                f"the checkpoint's run evaluated {self._eval_cohort_before!r} of the clients, this one evaluates "
                f"{self.eval_cohort!r}: figures of rounds before and after are of different clients, and the best "
                "round is chosen among both",
                stacklevel=2,
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """From now on all clients are evaluated."""
        self._evaluate_all(trainer)

    @staticmethod
    def _evaluate_all(trainer: L.Trainer) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if hasattr(data, "eval_clients"):
            data.eval_clients = None

    # ------------------------------------------------------------------ a round

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start a round: from now on each client is sent what the server has for it when its turn comes."""
        assert isinstance(pl_module, Federation)
        self._start = time.perf_counter()
        self._in_round, self._aggregated, self._results = True, False, []
        server, round = pl_module.server, trainer.current_epoch

        def send(client: int) -> Broadcast:
            message = server.broadcast(client, round)
            self.traffic.count(self.traffic.down, message)
            return message

        pl_module.start_round(send)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let the engine go: Lightning calls no ``teardown`` after an error."""
        self._evaluate_all(trainer)
        if isinstance(pl_module, Federation):
            pl_module.stop_engine()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass the uploads on to the server; after the last one, aggregate."""
        assert isinstance(pl_module, Federation)
        finished, pl_module.finished = pl_module.finished, []
        for result in finished:
            self._results.append(self._upload(pl_module, result))
        if trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches:
            self._finish_round(trainer, pl_module)

    @property
    def results(self) -> list[FitResult]:
        """Losses, times and errors of the clients of the round so far, without updates and personal states."""
        return list(self._results)

    def _upload(self, federation: Federation, result: FitResult) -> FitResult:
        """Hand one update to the server; the result comes back without it, so that its memory is free."""
        error = result.error
        if result.update is not None:
            self.traffic.count(self.traffic.up, result.update)
            try:
                federation.server.check(result.update)
                federation.server.receive(result.update)
            except FederationError as refused:
                error = refused  # type: ignore[assignment]
        if error is not None:
            warnings.warn(f"left out of the aggregation: {error}", stacklevel=2)
        return replace(result, update=None, personal={}, error=error)

    def _finish_round(self, trainer: L.Trainer, federation: Federation) -> None:
        good = [result for result in self._results if result.error is None]
        if len(good) < self.min_clients:
            failed = [str(result.error) for result in self._results if result.error is not None]
            errors = "; ".join(failed[:3]) + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
            raise FederationError(
                f"round {trainer.current_epoch}: {len(good)} of {len(self._results)} updates can be aggregated, "
                f"min_clients is {self.min_clients}. {errors}"
            )
        federation.server.aggregate()
        federation.server.check_unsaved()
        self._count_server_step(trainer)
        self.rounds += 1
        self.seconds += time.perf_counter() - self._start
        self._aggregated = True
        names = {name for result in good for name in result.losses}
        means = {
            f"train/{name}": float(np.mean([r.losses[name] for r in good if name in r.losses]))
            for name in sorted(names)
        }
        means |= logged_by_modules(good)
        means["train/clients_left_out"] = float(len(self._results) - len(good))
        federation.log_dict(means, logger=False, on_step=False, on_epoch=True, batch_size=1)
        traffic = {f"bytes/up_{kind}": float(size) for kind, size in self.traffic.up.items()}
        traffic |= {f"bytes/down_{kind}": float(size) for kind, size in self.traffic.down.items()}
        self._log(trainer, means | traffic, trainer.current_epoch)

    @staticmethod
    def _count_server_step(trainer: L.Trainer) -> None:
        """Let ``trainer.global_step`` count rounds.

        Without an optimizer it would stay 0, and ModelCheckpoint saves nothing while it does not move.
        """
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    # From a checkpoint between the last client and the validation Lightning does not go on as if nothing had happened:
    # it skips that validation and the start of the next round. Until then the round counts as unfinished.
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The round is over once its models are evaluated."""
        self._in_round = self._in_round and not self._aggregated

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The round is over, evaluated or not."""
        self._in_round = self._in_round and not self._aggregated

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what the validation found against the round."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            assert isinstance(pl_module, Federation)
            self._log(trainer, pl_module.evaluation_values, trainer.current_epoch)

    @staticmethod
    def _log(trainer: L.Trainer, values: dict[str, float], round: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=round)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counters, for the checkpoint."""
        return {
            "in_round": self._in_round,
            "eval_cohort": self.eval_cohort,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "up": dict(self.traffic.up),
            "down": dict(self.traffic.down),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters.

        Raises:
            CheckpointError: The checkpoint was written in the middle of a round.
        """
        if state_dict["in_round"]:
            raise CheckpointError(
                f"the checkpoint was written in the middle of a round, after {state_dict['rounds']} rounds: not all of "
                "its clients had trained, or the new models were not yet validated; resume from one that was written "
                "at the end of a round (ModelCheckpoint without every_n_train_steps and train_time_interval)"
            )
        self.rounds, self.seconds = state_dict["rounds"], state_dict["seconds"]
        self._eval_cohort_before = state_dict.get("eval_cohort", self.eval_cohort)
        self.traffic.up, self.traffic.down = dict(state_dict["up"]), dict(state_dict["down"])


def logged_by_modules(results: Sequence[FitResult]) -> dict[str, float]:
    """What the clients' modules logged themselves, by name: means over clients, weighted by their samples.

    Means over the samples of each client so become means over all samples.
    """
    names = sorted({name for result in results for name in result.logged})
    found = {}
    for name in names:
        own = [result for result in results if name in result.logged]
        found[name] = float(np.average([r.logged[name] for r in own], weights=[r.num_samples for r in own]))
    return found
