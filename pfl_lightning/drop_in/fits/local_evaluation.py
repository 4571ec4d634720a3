"""A client that trains a user's LightningModule, evaluated by the module's own validation and test steps."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pfl_lightning.data import BatchSource, class_of_batch
from pfl_lightning.drop_in.fits.logs import LogNotes, LogRecord, undefined_as_nan
from pfl_lightning.drop_in.fits.module_calls import call_step, lent_to_trainer, patched
from pfl_lightning.drop_in.fits.over_rounds import Counts, set_counts
from pfl_lightning.drop_in.fits.own_data import OwnData, standing_in
from pfl_lightning.engines.advice import needs_no_trainer
from pfl_lightning.engines.sequential import BATCH_HOOKS
from pfl_lightning.fit.tasks import FitEnvironment, ScoringTask
from pfl_lightning.functional.numerics import hits
from pfl_lightning.lightning_private import combining_mode
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.notices import silence

if TYPE_CHECKING:
    from pfl_lightning.drop_in.client.user_module import UserModule

_log = logging.getLogger(__name__)


class ClassScores:
    """Counts how often the greatest score is that of the right class, from what a module gives in its own steps.

    Scores are what ``forward`` returned last in the step, where it has shape (N, C) for batches with classes (N,).

    Args:
        module: The module, in evaluation mode.
        num_classes: Number of classes, C; 0 where it is not known, so that the scores tell it.
    """

    def __init__(self, module: nn.Module, num_classes: int) -> None:
        self._module, self._num_classes, self._is_guess = module, num_classes, num_classes == 0
        self._given: Any = None
        self._right, self._seen, self._missing = 0.0, 0, num_classes == 1
        self.forward_called = False

    def watching(self) -> RemovableHandle:
        """See what ``forward`` returns inside."""
        return self._module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._given, self.forward_called = output, True

    def probe(self, batch: Any, environment: FitEnvironment) -> bool:
        """Count a batch (inputs, classes) by what ``forward`` gives for the inputs, which no step has asked for.

        Returns:
            Whether accuracies may still be known: ``forward`` may be missing, or take something else.
        """
        if class_of_batch(batch) is None or not isinstance(batch, tuple | list):
            self._missing = True
        if not self._missing:
            try:
                with environment.precision.forward_context():
                    self._given = self._module(batch[0])
            except Exception as error:  # whatever code does that was not written for these inputs
                _log.info("no accuracy of %s: its forward failed with %r", type(self._module).__name__, error)
                self._missing = True
            self.see(batch)
        return not self._missing

    def see(self, batch: Any) -> None:
        """Count a batch, after the step."""
        classes = None if self._missing else class_of_batch(batch)
        scores, self._given = self._given, None
        if classes is None or not self._are_scores(scores, classes):
            if not self._missing and isinstance(batch, tuple | list) and len(batch) > 2:
                self._tell_of_entries(batch, scores)
            self._missing = True
            return
        self._right += float(hits(scores, classes).sum())
        self._seen += len(classes)

    @staticmethod
    def _tell_of_entries(batch: Sequence[Any], output: Any) -> None:
        """Warn where an output may be class scores, and one of further entries of a batch the classes."""
        whole = [one for one in batch[1:] if isinstance(one, Tensor) and one.dtype == torch.int64 and one.ndim == 1]
        if whole and isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1:
            warnings.warn(
                f"no accuracy is computed: batches have {len(batch)} entries, and which of them is the classes is not "
                "known. Let the data give (inputs, classes), where inputs may be a tuple, or a dictionary with an "
                "entry `label`; or log your own accuracy",
                stacklevel=2,
            )

    def _are_scores(self, output: Any, classes: Tensor) -> bool:
        """Whether an output has a score for each class."""
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(classes):
            return False
        width = output.shape[1]
        if self._is_guess:  # descriptors of numbered items look like scores until a number is too large
            if width < 2 or not 0 <= int(classes.min()) <= int(classes.max()) < width:
                return False
            self._num_classes = self._num_classes or width
        if 1 < self._num_classes < width:
            warnings.warn(
                f"no accuracy is computed: forward gives {width} numbers for each item, but the data have "
                f"{self._num_classes} classes, so the numbers may be scores or features. If they are scores, name "
                f"all {width} classes: `classes` of the data set, or class_names of its data module; if not, log "
                "your own accuracy",
                stacklevel=2,
            )
        return width == self._num_classes

    @property
    def accuracy(self) -> float:
        """Share of samples classified rightly; NaN where scores or classes were missing."""
        return math.nan if self._missing or not self._seen else self._right / self._seen


@dataclass(frozen=True)
class StepsTask:
    """Which of a module's steps are to run, over what.

    Attributes:
        model: The client's, in evaluation mode.
        stage: ``"validation"`` or ``"test"``.
        asked: What is to be evaluated.
        scores: Is shown every batch.
        notes: Is told of every value that is logged.
        own: What the client has of the data.
    """

    model: UserModule
    stage: str
    asked: ScoringTask
    scores: ClassScores
    notes: LogNotes
    own: OwnData

    def loader(self, device: torch.device) -> BatchSource:
        """The batches."""
        return self.asked.part.loader(self.asked.data.eval_batch_size, device=device)


def score_module(model: UserModule, task: ScoringTask) -> EvalMetrics:
    """What a module logs on a part, and its accuracy where ``forward`` gives class scores; the loss is not known (NaN).

    Args:
        model: The client's, in evaluation mode.
        task: What is to be evaluated. The step of its stage is called: a module without a test step is judged by its
            validation step, under names that begin with ``test_``; without both by its accuracy alone. Steps run under
            an inner Trainer, or in a plain loop where there is none.
    """
    module, part, stage = model.module, task.part, task.stage
    scores = ClassScores(module, model.client.num_classes)
    own = next((name for name in (stage, "validation") if is_overridden(f"{name}_step", module)), None)
    model.reset_metrics()  # what a fine-tuning, or the other part, left
    logged, notes = dict[str, float](), LogNotes(module)
    if own is not None:
        with undefined_as_nan(module), scores.watching():
            logged = _run_steps(StepsTask(model, own, task, scores, notes, OwnData(task.data, stage, part)))
    if not logged and not scores.forward_called:
        scores = _probed(model, task)
    if own is not None and own != stage:
        logged = {as_test_name(name): value for name, value in logged.items()}
        notes.progress_bar_names = {as_test_name(name) for name in notes.progress_bar_names}
        for name in ("best", "reductions", "loaders"):
            setattr(notes, name, {as_test_name(key): value for key, value in getattr(notes, name).items()})
    sizes = getattr(part, "sizes", ())
    noted = (frozenset(notes.progress_bar_names), notes.best, sizes, notes.of_loaders if sizes else {})
    return EvalMetrics(scores.accuracy, math.nan, len(part), logged, *noted, notes.reductions)


def _probed(model: UserModule, task: ScoringTask) -> ClassScores:
    """Scores of the forward pass alone, for a module whose steps tell nothing.

    None where batches are changed on their way by hooks that a Trainer calls: these inputs are not the module's.
    """
    scores = ClassScores(model.module, model.client.num_classes)
    owners = [model.module, *([] if task.part.datamodule is None else [task.part.datamodule])]
    if any(is_overridden(hook, owner) for hook in BATCH_HOOKS for owner in owners):
        return scores
    for batch, _, _ in _numbered(task.part.loader(task.data.eval_batch_size, device=task.environment.device)):
        if not scores.probe(task.environment.precision.convert_input(batch), task.environment):
            break
    return scores


def as_test_name(name: str) -> str:
    """What a value of the validation step is called on test parts: ``val_loss`` is ``test_loss``."""
    for before in ("validation", "valid", "val"):
        if name.startswith(before):
            return f"test{name.removeprefix(before)}"
    return f"test_{name}"


def _run_steps(task: StepsTask) -> dict[str, float]:
    """Run the steps and hooks of a stage under an inner Trainer, where there is one; return what the module logged."""
    try:
        found = _run_steps_under_trainer(task)
        return _run_steps_in_loop(task) if found is None else found
    except Exception as error:
        place = f"in the {task.stage} of a client by the module's own steps"
        note = f"{place}: if self.trainer lacks something, it is a Trainer that evaluates one client, not the outer one"
        if not isinstance(error, AttributeError):
            note = (
                f"{place}, on the {len(task.asked.part)} items that belong to the client. Only if they need "
                "a whole validation or test set: FederatedLoop(..., shared_evaluation=True), or federate(..., "
                "shared_evaluation=True), gives every client all of it"
            )
        error.add_note(note)
        raise


def _run_steps_under_trainer(task: StepsTask) -> dict[str, float] | None:
    """Run the validation or test loop of a Trainer on one client's batches.

    Returns:
        Values that the module logged, by name; ``None`` where the engine has no inner Trainer.
    """
    callback = _ScoresCallback(task.scores, task.notes)
    with silence():
        module = task.model.module
        trainer = task.model.local.trainer(task.asked.make_trainer, module, [callback], limit_val_batches=1.0)
    if trainer is None:
        return None
    environment, clock = task.asked.environment, task.asked.environment.clock
    set_counts(trainer, Counts(clock.epoch, clock.step, clock.step))
    trainer.fit_loop.max_epochs = clock.max_epochs
    validates, datamodule = task.stage == "validation", task.asked.part.datamodule  # a loader of the call has none
    run: Callable[..., Any] = trainer.validate if validates else trainer.test
    functions = {"log": task.notes.watched(module.log), "optimizers": _optimizers_when_asked_for(module)}
    with silence(), lent_to_trainer(module, **functions):
        if datamodule is None:
            run(module, dataloaders=task.loader(environment.device), verbose=False)
        else:
            loader = task.loader(torch.device("cpu"))
            name = "val_dataloader" if validates else "test_dataloader"
            run(module, datamodule=standing_in(datamodule, {name: loader}, task.own), verbose=False)
    task.model.client.to(environment.device)
    task.model.client.eval()
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _optimizers_when_asked_for(module: L.LightningModule) -> Callable[..., Any]:
    """``optimizers`` of a module whose steps ask for them where none are: in a plain fit there are some."""
    own = module.optimizers

    @wraps(own)
    def optimizers(*args: Any, **kwargs: Any) -> Any:
        made = module.trainer.optimizers  # which makes those that the strategy gives
        return own(*args, **kwargs) if made else made

    return optimizers


def _run_steps_in_loop(task: StepsTask) -> dict[str, float]:
    """Run the steps and hooks of a stage in a plain loop, without a Trainer.

    Raises:
        ConfigurationError: The module asks for its Trainer.
    """
    module, stage, environment, record = task.model.module, task.stage, task.asked.environment, LogRecord()
    step = getattr(module, f"{stage}_step")
    with patched(module, log=task.notes.watched(record.log)), needs_no_trainer(module):
        getattr(module, f"on_{stage}_start")()
        getattr(module, f"on_{stage}_epoch_start")()
        for batch, index, loader in _numbered(task.loader(environment.device)):
            batch = environment.precision.convert_input(batch)
            record.start_batch(batch, loader)
            task.notes.loader = loader
            getattr(module, f"on_{stage}_batch_start")(batch, index, loader or 0)
            with environment.precision.forward_context():
                output = call_step(step, batch, index, loader)
            task.scores.see(batch)
            getattr(module, f"on_{stage}_batch_end")(output, batch, index, loader or 0)
        record.start_batch(None)
        task.notes.loader = None
        getattr(module, f"on_{stage}_epoch_end")()
        getattr(module, f"on_{stage}_end")()
        return record.values()


def _numbered(loader: BatchSource) -> Iterator[tuple[Any, int, int | None]]:
    """Batches with their number and, of several loaders one after the other, that of their loader."""
    if not isinstance(loader, CombinedLoader):
        yield from ((batch, index, None) for index, batch in enumerate(loader))
        return
    several = len(loader.flattened) > 1 and combining_mode(loader) == "sequential"
    yield from ((batch, index, number if several else None) for batch, index, number in loader)


class _ScoresCallback(L.Callback):
    """Shows every evaluated batch to a :class:`ClassScores`, and notes of which of several loaders it is."""

    def __init__(self, scores: ClassScores, notes: LogNotes) -> None:
        self._scores, self._notes = scores, notes

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the loader."""
        self._notes.loader = dataloader_idx

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """There are no more batches."""
        self._notes.loader = None

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show a validation batch."""
        self._scores.see(batch)

    on_test_batch_start = on_validation_batch_start
    on_test_epoch_end = on_validation_epoch_end
    on_test_batch_end = on_validation_batch_end
