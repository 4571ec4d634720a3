"""What a run leaves behind: results.json, clients.csv, partition.npz; test.json and validate.json of evaluations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.callbacks.attacks import Attack
from pfl_lightning.callbacks.run_facts import (
    Part,
    confusion_file,
    counts,
    evaluated,
    evaluation_files,
    further_metrics,
    run_facts,
    samples_of,
)
from pfl_lightning.errors import DiskFullError, FederationError, RunLockedError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop, loop_of
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.metrics import ClientSummary, summarize
from pfl_lightning.runs.curves import add_to_curves, cut_curves
from pfl_lightning.runs.files import CLIENTS, PARTITION, RESULTS, set_later_aside
from pfl_lightning.runs.lock import RunLock, is_locked_here, keep_lock
from pfl_lightning.runs.results import (
    CHOICES,
    FORMAT,
    ChosenRound,
    HistoryEntry,
    Values,
    as_text,
    csv_text,
    values_by_metric,
    with_names,
)
from pfl_lightning.state.files import replace_file


class ResultsWriter(L.Callback):
    """Callback that keeps the accuracies of every client and writes them when the fit ends, in any way.

    Each evaluation adds its rows to ``client_curves.csv``.

    After a kill that leaves no time for it they are written when the run is resumed, even if no round is left.

    Three choices are kept apart: the last evaluated round; the round of the highest mean validation accuracy (what one
    may report); and the round of the highest mean test accuracy (what some papers report). Accuracies are in [0, 1], of
    the clients that were evaluated; the others have empty fields in ``clients.csv``. Rounds count from 1. Where a
    method trains no head, what is called accuracy is a nearest-neighbor score: ``evaluated`` says so. The form is that
    of ``results.schema.json``, which lies beside this module.

    A test and a validation outside of a fit leave ``test.json`` and ``validate.json`` of the same form, with
    ``test_clients.csv`` and ``validate_clients.csv``.

    The folder is locked during a fit: of two processes that would overwrite each other's results the second is refused.

    Args:
        dirpath: Folder for ``results.json`` and ``clients.csv``; ``None`` is the logger's folder, or else the Trainer's
            ``default_root_dir``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self._begin()
        self._running = self._finished = self._fits = False
        self._lock: RunLock | None = None

    def _begin(self) -> None:
        self.chosen: dict[str, ChosenRound] = {}
        self.history: list[HistoryEntry] = []
        self._counted: tuple[float, int, int] = (0.0, 0, 0)  # seconds and bytes of the rounds in the history

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note whether a checkpoint's results are to be continued."""
        self._fits = stage == "fit"

    # ------------------------------------------------------------------ after every round

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Check whether a rule chooses this round; outside of a fit, write the results."""
        if trainer.state.fn != TrainerFn.FITTING:
            return self._write_evaluation(trainer, pl_module, "validation")
        if trainer.sanity_checking or not loop_of(trainer).aggregated:  # of a round that was stopped in its middle
            return None
        scores = {"validation": pl_module.validation_scores, "test": pl_module.test_scores}
        values = {part: values_by_metric(own) for part, own in scores.items()}
        validation, test = values["validation"]["accuracy"], values["test"]["accuracy"]
        further = {part: {n: own for n, own in found.items() if n != "accuracy"} for part, found in values.items()}
        judged = scores["validation"].keys() | scores["test"].keys()
        means = summarize(test).mean if test else None, summarize(validation).mean if validation else None
        entry = self._add(trainer, len(judged), *means, further)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            add_to_curves(self.folder(trainer), entry.round, values)
        if test or validation:
            self.chosen["last"] = ChosenRound(entry.round, float(entry.round), validation, test, further)
        for name, mean in zip(("best_test", "validation_selected"), means, strict=True):
            best = self.chosen.get(name)
            # The first of equal rounds, in single precision as for the checkpoint of the best round.
            if mean is not None and (best is None or np.float32(mean) > np.float32(best.criterion)):
                self.chosen[name] = ChosenRound(entry.round, mean, validation, test, further)
        return None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note a finished round, evaluated or not."""
        known = bool(self.history) and self.history[-1].round == trainer.current_epoch + 1
        if not known and loop_of(trainer).aggregated:
            self._add(trainer, 0)

    def _add(
        self,
        trainer: L.Trainer,
        clients: int,
        test: float | None = None,
        validation: float | None = None,
        further: Mapping[str, Values] | None = None,
    ) -> HistoryEntry:
        """Add the current round to the history."""
        keep_lock(self.folder(trainer))  # before the round's checkpoint, which follows
        loop, round = loop_of(trainer), trainer.current_epoch + 1
        now = (loop.seconds, sum(loop.traffic.up.values()), sum(loop.traffic.down.values()))
        before, self._counted = self._counted, now
        seconds, up, down = (total - counted for total, counted in zip(now, before, strict=True))
        loss = loop.loss if math.isfinite(loop.loss) else None
        known = (further or {}).items()
        means = {part: {name: summarize(own).mean for name, own in values.items() if own} for part, values in known}
        entry = HistoryEntry(round, clients, seconds, int(up), int(down), loss, test, validation, means, loop.clock)
        self.history = [row for row in self.history if row.round < round] + [entry]
        return entry

    # ------------------------------------------------------------------ at the end

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lock the folder against other processes, and save the partition next to the results.

        Raises:
            RunLockedError: Another process is writing its results there.
        """
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = self.folder(trainer)
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = None if is_locked_here(folder) else RunLock(folder)  # the command line has locked its run
            for path in set_later_aside(folder, loop_of(trainer).rounds):
                warnings.warn(
                    f"{path} is an evaluation of a round that is run again; it is kept under this name", stacklevel=2
                )
            trainer.datamodule.save_partition(str(folder / PARTITION))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Allow results to be written from now on; those of a resumed run say that it is not finished."""
        self._running, self._finished = True, False
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            cut_curves(self.folder(trainer), loop_of(trainer).rounds)
        if loop_of(trainer).rounds:  # a kill would leave the results of before, which may say otherwise
            self.write(trainer, pl_module)
        else:
            self._begin()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the results, also where a finished run was resumed and there was nothing to train."""
        self._running, self._finished = False, loop_of(trainer).aggregated and not _is_out_of_time(trainer)
        self.write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the results so far when a run ends early."""
        try:
            refused = isinstance(exception, RunLockedError)  # another process holds the folder
            if self._running and not refused and loop_of(trainer).rounds:
                self._running = False
                if loop_of(trainer).rounds == trainer.current_epoch + 1:  # in the validation of a round that is over
                    self.on_train_epoch_end(trainer, pl_module)
                self.write(trainer, pl_module)
        except (OSError, FederationError) as error:  # the exception itself is what must be seen
            warnings.warn(f"the results could not be written: {error}", stacklevel=2)
        finally:
            self._unlock()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Unlock the folder."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def folder(self, trainer: L.Trainer) -> Path:
        """Folder of the results."""
        return Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write what was found."""
        self._write_evaluation(trainer, pl_module, "test")

    def _write_evaluation(self, trainer: L.Trainer, federation: Federation, part: Part) -> None:
        scores = federation.test_scores if part == "test" else federation.validation_scores
        # The clients that adapt their models after the training have files of their own.
        if scores and not federation.is_personalizing and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            loop = next((one for one in trainer.callbacks if isinstance(one, RoundLoop)), None)  # type: ignore[attr-defined]
            self._write(trainer, evaluation_files(trainer, federation, loop, part), "make room and evaluate again")

    def write(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write ``results.json`` and ``clients.csv``; ``fast_dev_run`` writes nothing."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            text = as_text(self.results(trainer, pl_module))
            how = "resuming the run from its last checkpoint writes them"
            files = {RESULTS: text, CLIENTS: self._clients(pl_module), **confusion_file(pl_module)}
            self._write(trainer, files, how)

    def _write(self, trainer: L.Trainer, files: Mapping[str, str], how: str) -> None:
        folder = self.folder(trainer)
        keep_lock(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, content in files.items():
                with replace_file(folder / name) as temporary:
                    temporary.write_text(content, newline="")
        except (OSError, DiskFullError) as error:
            error.add_note(f"the results belong in {folder}; {how}")
            raise

    def results(self, trainer: L.Trainer, federation: Federation) -> dict[str, Any]:
        """The content of ``results.json``."""
        samples = {part: samples_of(federation, part) for part in ("test", "validation")}
        attacks = [one for one in trainer.callbacks if isinstance(one, Attack)]  # type: ignore[attr-defined]

        def choices(metric: str = "accuracy", lower_is_better: bool = False) -> dict[str, Any]:
            found = {name: one.as_dict(samples, metric, lower_is_better) for name, one in self.chosen.items()}
            return {name: found.get(name) for name in CHOICES}

        return {
            **run_facts(federation),
            "finished": self._finished,
            **counts(loop_of(trainer), federation, self.evaluated_clients),
            "evaluated": evaluated(federation, has_accuracy=bool(self.chosen)),
            "accuracy": choices(),
            **further_metrics(federation, choices),
            **({"engine_choices": found} if (found := federation.engine.choices) else {}),
            **({"attack": attacks[0].facts()} if attacks else {}),
            "history": [entry.as_dict() for entry in self.history],
        }

    @property
    def evaluated_clients(self) -> int:
        """Number of clients in the last evaluation."""
        return next((entry.clients for entry in reversed(self.history) if entry.clients), 0)

    def summaries(
        self, part: Part = "test", metric: str = "accuracy", lower_is_better: bool = False
    ) -> dict[str, ClientSummary]:
        """Summaries of a metric over clients in the chosen rounds, by choice.

        Args:
            part: Of which parts.
            metric: Name of the metric.
            lower_is_better: Whether the best client has the lowest value.
        """
        found = {name: self.chosen[name].values(part, metric) for name in CHOICES if name in self.chosen}
        return {name: summarize(values, None, lower_is_better) for name, values in found.items() if values}

    def _clients(self, federation: Federation) -> str:
        """The content of ``clients.csv``."""
        parts = ("train", "validation", "test")
        metrics = ("accuracy", *federation.class_metrics)
        places = [(name, part, metric) for metric in metrics for name in CHOICES for part in ("test", "validation")]
        columns = [f"{part}_{metric}_{name}" for name, part, metric in places]
        rows: list[list[Any]] = [["client", *(f"{part}_samples" for part in parts), "rounds_trained", *columns]]
        scores = [self.chosen[n].values(part, metric) if n in self.chosen else {} for n, part, metric in places]
        trained = federation.rounds_trained
        for client in range(federation.personal.num_clients):
            samples = [len(getattr(federation.data.client_data(client), part)) for part in parts]
            accuracy = [values.get(client, "") for values in scores]
            rows.append([client, *samples, trained[client], *accuracy])
        return csv_text(with_names(rows, federation.data))

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything seen so far, for the checkpoint."""
        chosen = {name: dict(vars(round)) for name, round in self.chosen.items()}
        history = [dict(vars(entry)) for entry in self.history]
        return {"format": FORMAT, "chosen": chosen, "history": history, "counted": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was seen before the checkpoint; an evaluation needs none of it."""
        if self._fits:
            self.chosen = {name: ChosenRound(**entry) for name, entry in state_dict["chosen"].items()}
            self.history = [HistoryEntry(**entry) for entry in state_dict["history"]]
            self._counted = tuple(state_dict["counted"])


def results_writer(trainer: L.Trainer) -> ResultsWriter | None:
    """The writer among a Trainer's callbacks."""
    return next((one for one in trainer.callbacks if isinstance(one, ResultsWriter)), None)  # type: ignore[attr-defined]


def _is_out_of_time(trainer: L.Trainer) -> bool:
    """Whether a timer (``max_time``) has ended the fit before its last round; there is none without ``max_epochs``."""
    last = trainer.max_epochs
    if last is None or last < 0 or loop_of(trainer).rounds >= last:
        return False
    timers: list[Any] = [one for one in trainer.callbacks if "Timer" in lightning_kinds(one)]  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in timers]
    return any(seconds is not None and seconds <= 0 for seconds in left)
