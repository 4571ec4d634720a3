"""What a run leaves behind: results.json, clients.csv, partition.npz."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.errors import DiskFullError, FederationError, RunLockedError
from pfl_lightning.federation import Federation
from pfl_lightning.metrics import AccuracySummary, EvalMetrics, summarize
from pfl_lightning.state.files import explain_full_disk, replace_file
from pfl_lightning.state.run_lock import RunLock, is_locked_here

__all__ = ["ResultsWriter"]

Accuracies = Mapping[int, float]
CHOICES = ("last", "validation_selected", "best_test")


def accuracies(scores: Mapping[int, EvalMetrics]) -> dict[int, float]:
    """Every client's accuracy; not of models that have none, such as those of a regression."""
    return {client: score.accuracy for client, score in scores.items() if not math.isnan(score.accuracy)}


@dataclass
class _Chosen:
    """A round that was chosen by some rule, and every client's accuracies in it."""

    round: int
    criterion: float
    validation: dict[int, float]
    test: dict[int, float]


class ResultsWriter(L.Callback):
    """Keeps the accuracies of every client and writes them when the fit ends, in whatever way.

    After a kill that leaves no time for it they are written when the run is resumed, even if no round is left to play.

    Three choices are kept apart: the last evaluated round; the round of the highest mean validation accuracy (what one
    may report); and the round of the highest mean test accuracy (what some papers report). Accuracies are test
    accuracies in [0, 1], of the clients that were evaluated; the others have empty fields in ``clients.csv``.

    The folder is locked during a fit: of two processes that would overwrite each other's results the second is refused.

    Args:
        dirpath: Folder for ``results.json`` and ``clients.csv``; ``None`` is the logger's folder, or else the Trainer's
            ``default_root_dir``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.chosen: dict[str, _Chosen] = {}
        self.history: list[dict[str, float]] = []
        self._playing = self._finished = False
        self._lock: RunLock | None = None

    # ------------------------------------------------------------------ after every round

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether this round is the choice of one of the rules."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        assert isinstance(pl_module, Federation)
        validation, test = accuracies(pl_module.validation_scores), accuracies(pl_module.test_scores)
        round, judged = trainer.current_epoch, pl_module.validation_scores.keys() | pl_module.test_scores.keys()
        entry = {"round": float(round), "clients": float(len(judged))}
        if test:
            entry["test_accuracy"] = summarize(list(test), list(test.values())).mean
            self.chosen["last"] = _Chosen(round, float(round), validation, test)
            self._choose("best_test", entry["test_accuracy"], round, validation, test)
        if validation:
            entry["accuracy"] = summarize(list(validation), list(validation.values())).mean
            if test:
                self._choose("validation_selected", entry["accuracy"], round, validation, test)
        self.history = [row for row in self.history if row["round"] < round] + [entry]

    def _choose(
        self, name: str, criterion: float, round: int, validation: dict[int, float], test: dict[int, float]
    ) -> None:
        best = self.chosen.get(name)
        if best is None or criterion > best.criterion:  # the first of equal rounds
            self.chosen[name] = _Chosen(round, criterion, validation, test)

    # ------------------------------------------------------------------ at the end

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lock the folder against other processes, and save the partition beside the results.

        Raises:
            RunLockedError: Another process is writing its results there.
        """
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = self.folder(trainer)
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = None if is_locked_here(folder) else RunLock(folder)  # the command line has locked its run
            with explain_full_disk(folder / "partition.npz", partial=folder / "partition.npz"):
                trainer.datamodule.save_partition(str(folder / "partition.npz"))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on there may be results to write."""
        self._playing, self._finished = True, False

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the results, also where a finished run was resumed and there was nothing to train."""
        self._playing, self._finished = False, True
        self.write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write what there is, so that a run that ends early leaves its results."""
        try:
            refused = isinstance(exception, RunLockedError)  # another process holds the folder
            if self._playing and not refused and _loop(trainer).rounds:
                self._playing = False
                self.write(trainer, pl_module)
        except (OSError, FederationError) as error:  # the exception itself is what must be seen
            warnings.warn(f"the results could not be written: {error}", stacklevel=2)
        finally:
            self._unlock()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let others write to the folder."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def folder(self, trainer: L.Trainer) -> Path:
        """Where the results go."""
        return Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)

    def write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``results.json`` and ``clients.csv``; ``fast_dev_run`` writes nothing."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        assert isinstance(pl_module, Federation)
        folder = self.folder(trainer)
        try:
            text = json.dumps(self.results(trainer, pl_module), indent=2) + "\n"
            for name, content in (("results.json", text), ("clients.csv", self._clients(pl_module))):
                with replace_file(folder / name) as temporary:
                    temporary.write_text(content, newline="")
        except (OSError, DiskFullError) as error:
            error.add_note(f"the results belong in {folder}; resuming the run from its last checkpoint writes them")
            raise

    def results(self, trainer: L.Trainer, federation: Federation) -> dict[str, Any]:
        """The content of ``results.json``."""
        loop = _loop(trainer)
        up, down = loop.traffic.up, loop.traffic.down
        return {
            "method": federation.method_name,
            "finished": self._finished,
            "rounds": loop.rounds,
            "num_clients": federation.personal.num_clients,
            "novel_clients": list(federation.data.novel),
            "evaluated_clients": self.evaluated_clients,
            "seed": federation.seed,
            "accuracy": {name: self._summary(name) for name in CHOICES},
            "bytes": {
                "up": sum(up.values()),
                "down": sum(down.values()),
                "up_by_kind": dict(up),
                "down_by_kind": dict(down),
            },
            "seconds_per_round": loop.seconds / loop.rounds if loop.rounds else None,
            "history": self.history,
        }

    @property
    def evaluated_clients(self) -> int:
        """How many clients the last evaluation had."""
        return int(self.history[-1]["clients"]) if self.history else 0

    def summaries(self) -> dict[str, AccuracySummary]:
        """Test accuracies over clients in the chosen rounds, by choice, as far as there are any."""
        return {
            name: summarize(list(self.chosen[name].test), list(self.chosen[name].test.values()))
            for name in CHOICES
            if name in self.chosen
        }

    def _summary(self, name: str) -> dict[str, Any] | None:
        if name not in self.chosen:
            return None
        chosen = self.chosen[name]
        return {"round": chosen.round, **self.summaries()[name].as_dict(), "num_clients": len(chosen.test)}

    def _clients(self, federation: Federation) -> str:
        """The content of ``clients.csv``."""
        columns = [f"{part}_accuracy_{name}" for name in CHOICES for part in ("test", "validation")]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["client", "train_samples", "validation_samples", "test_samples", *columns])
        for client in range(federation.personal.num_clients):
            parts = federation.data.client_data(client)
            row: list[Any] = [client, len(parts.train), len(parts.validation), len(parts.test)]
            for name in CHOICES:
                chosen = self.chosen.get(name)
                for accuracies in (chosen.test, chosen.validation) if chosen else ({}, {}):
                    row.append(accuracies.get(client, ""))
            writer.writerow(row)
        return text.getvalue()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything seen so far, for the checkpoint."""
        chosen = {
            name: {"round": c.round, "criterion": c.criterion, "validation": dict(c.validation), "test": dict(c.test)}
            for name, c in self.chosen.items()
        }
        return {"chosen": chosen, "history": [dict(entry) for entry in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was seen before the checkpoint."""
        self.chosen = {name: _Chosen(**entry) for name, entry in state_dict["chosen"].items()}
        self.history = [dict(entry) for entry in state_dict["history"]]


def _loop(trainer: L.Trainer) -> FederatedLoop:
    return next(callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop))  # type: ignore[attr-defined]
