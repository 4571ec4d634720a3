"""Base of the engines: a task in, a result out, phases in between."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData, SplitSource
from pfl_lightning.engines.advice import explained
from pfl_lightning.engines.lifecycle import (
    SplitMetrics,
    begin,
    conclude,
    enter_phase,
    failure,
    forget_preparation,
    load_own_state,
    phase_data,
    trains,
    without_autocast,
)
from pfl_lightning.engines.threads import is_set_by_user, step_work, threads_for_work
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.tasks import (
    EvaluationResult,
    EvaluationTask,
    FitEnvironment,
    FitResult,
    FitTask,
    PhaseResult,
)
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.notices import named_clients, shown_before
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed


@contextmanager
def naming_clients(*contexts: FitContext) -> Iterator[None]:
    """Name the clients in warnings given inside, and show each of them once, not for every client of every round.

    Filters apply as ever: what one of them ignores is not shown, and what it makes an error is raised.

    Args:
        contexts: Of the clients that train or are evaluated inside.
    """
    show = warnings.showwarning

    def show_named(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
        text = str(message)
        if shown_before(text, category, filename, lineno):
            return
        clients, names = [context.client for context in contexts], contexts[0].facts.names
        if named_clients(clients) not in text:
            with suppress(Exception):  # a category with arguments of its own is shown without the name
                where = f"{named_clients(clients, names)}, round {contexts[0].round + 1}"
                given, message = message, category(f"{where}: {text}")
                message.without_name = getattr(given, "without_name", text)
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_named
    try:
        yield
    finally:
        if warnings.showwarning is show_named:
            warnings.showwarning = show


class Engine(ABC):
    """Base of the engines, which train and evaluate clients.

    Args:
        gradient_clip_val: Clip gradients at this value; ``None`` does not clip. (The outer Trainer has no gradients, so
            that its own option of this name does not apply.)
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        threads: Number of threads that torch computes on, on a CPU, from :meth:`start` to :meth:`stop`. ``None`` takes
            it from the work of a training step (:mod:`pfl_lightning.engines.threads`), unless ``OMP_NUM_THREADS`` or
            ``torch.set_num_threads`` has set it, and except for a user's LightningModule. Results may differ between
            numbers of threads, in the last bits.
    """

    clients_per_batch: int = 1
    """Number of clients that are taken at once."""

    gives_trainer: bool = False
    """Whether modules have a Trainer while they train."""

    def __init__(
        self,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        threads: int | None = None,
    ) -> None:
        if gradient_clip_algorithm not in ("norm", "value"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm' or 'value', got {gradient_clip_algorithm!r}")
        check_number("gradient_clip_val", gradient_clip_val, strict=True, optional=True)
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        check_at_least("threads", threads, 1, optional=True)
        self.threads = threads
        self.choices: dict[str, str] = {}  # which way was measured to be faster, by architecture; kept in checkpoints
        self._held: int | None = None
        self._threads_before = 0  # number of threads that this engine has set, and the caller's
        self._work: float | None = None  # of a training step, once it was counted
        self._logged_threads = False  # the number of threads

    def start(self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment) -> None:
        """Called before the first task of a fit, a validation or a test; an override calls this one, too.

        Args:
            models: The module of each architecture.
            data: Every client's data.
            environment: Settings of the outer Trainer and of the run.
        """
        self._release_threads()  # the number of an earlier start is not the user's
        self._work = None
        self._hold_threads(self.choose_threads(models, data, environment))

    def stop(self) -> None:
        """Release what :meth:`start` took; called when the fit, the validation or the test is over or has failed."""
        self._release_threads()

    def _hold_threads(self, threads: int | None) -> None:
        self._held, self._threads_before = threads, torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)

    def _release_threads(self) -> None:
        if self._held is not None and torch.get_num_threads() == self._held:  # else somebody has set it since
            torch.set_num_threads(self._threads_before)
        self._held = None

    def choose_threads(
        self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment
    ) -> int | None:
        """Return the number of threads of local fits and evaluations; ``None`` leaves torch's as it is.

        It is left on a GPU, where the user has set it, and for a user's LightningModule, whose local fits go as in a
        plain run of its project.
        """
        of_user = is_set_by_user() or any(model.step_module is not model for model in models)
        if self.threads is not None or of_user or environment.device.type != "cpu":
            return self.threads
        if self._work is None:
            self._work = step_work(models, data)
        if not self._logged_threads:
            rank_zero_info(
                f"Threads of local fits: {threads_for_work(self._work)}, since a training step takes "
                f"{self._work / 1e9:.2g} GFLOP forward. Another number is the engine's option threads, or "
                "OMP_NUM_THREADS"
            )
            self._logged_threads = True
        return threads_for_work(self._work)

    @contextmanager
    def holding_threads(
        self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment
    ) -> Iterator[None]:
        """Context manager that sets a run's number of threads, for fits outside of a run."""
        outside = self._held is None
        if outside:
            self._hold_threads(self.choose_threads(models, data, environment))
        try:
            yield
        finally:
            if outside:
                self._release_threads()

    def make_trainer(
        self, environment: FitEnvironment, callbacks: Sequence[L.Callback] = (), **options: Any
    ) -> L.Trainer | None:
        """Return an inner Trainer; ``None``, by default, in engines that train in a loop of their own."""
        return None

    # ------------------------------------------------------------------ local fits

    def run(self, tasks: Iterable[tuple[FederatedClient, FitTask]], environment: FitEnvironment) -> Iterator[FitResult]:
        """Run the local fits of a round, each with the module of its architecture.

        Tasks are taken, and results yielded, one by one and in the same order, so that neither broadcasts nor updates
        of a whole cohort need be held. A result's personal state is valid until the next result is asked for.

        Updates are returned unchecked: the server checks each of them once.
        """
        for client, task in tasks:
            with naming_clients(task.context):
                start = time.perf_counter()
                context, losses = task.context, dict[str, list[float]]()
                gradients = torch.is_grad_enabled()
                try:
                    context = begin(client, task)
                    seed = derive_seed(environment.seed, Purpose.FIT_MODEL, context.round, context.client)
                    with without_autocast(environment), torch_seed(seed, python=True), ExitStack() as stack:
                        if client.user_module is not None:
                            stack.enter_context(client.user_module.on_own_data(context.data))
                        before = client.before_fit(context)
                        for index, phase in enumerate(client.phases()):
                            found = self._run_prepared(client, phase, context, environment, f"{Purpose.FIT}/{index}")
                            taken, cut = context.num_steps + found.num_steps, context.is_cut or found.is_cut
                            left = context.max_steps - found.num_steps
                            context = replace(context, num_steps=taken, max_steps=left, is_cut=cut)
                            for name, value in found.losses.items():
                                losses.setdefault(name, []).append(value)
                        result = conclude(client, context, before, losses, start)
                except Exception as error:
                    torch.set_grad_enabled(gradients)
                    failed = failure(error, client, context, environment)
                    result = FitResult.failed(context, time.perf_counter() - start, failed)
            yield result

    def _run_prepared(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        enter_phase(client, phase)
        if context.max_steps <= 0:
            if client.user_module is not None and client.user_module.progress is not None:
                client.user_module.progress.skip_phase()
            return PhaseResult({}, 0, is_cut=phase.epochs > 0)
        whole = context.data
        context = replace(context, data=phase_data(client, phase, context))
        try:
            with ExitStack() as stack:
                if client.user_module is not None:
                    stack.enter_context(client.user_module.on_own_data(context.data))
                    stack.enter_context(client.user_module.lent_data(context.data))
                found = self.run_phase(client, phase, context, environment, purpose)
        except (ValueError, RuntimeError) as error:
            better = explained(error, client, phase, context)
            if better is error:
                raise
            raise better from error
        if trains(client.encoder):  # fused optimizers change parameters without a trace
            whole.cached_features = context.data.cached_features = None
        return found

    @abstractmethod
    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train ``client`` in place through one phase.

        Batch orders and augmentations are drawn from a generator seeded by (seed, round, client, ``purpose``).
        ``max_steps`` of the context ends the phase early.

        Raises:
            NonFiniteLossError: The loss became NaN or infinite.
        """

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients by their own models, fine-tuned where their method does so; results in the tasks' order."""
        for client, task in tasks:
            context = task.context
            try:
                with naming_clients(context):
                    error = self.load_own_model(client, task, environment)
                    result = EvaluationResult(context.client, *self.score(client, task, environment), error)
            except Exception as failed:
                failed.add_note(f"in the evaluation of {context.who}, round {context.round + 1}")
                raise
            forget_preparation(client)
            yield result

    def score(self, client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> SplitMetrics:
        """Metrics of the module's current model, in evaluation mode, on the requested parts.

        What a model draws derives from (seed, round, client, part), so that neither the engine nor a resume changes it.
        """
        context = task.context

        def score(part: SplitSource | None, stage: str) -> EvalMetrics | None:
            if part is None or not len(part):
                return None
            make_trainer, place = partial(self.make_trainer, environment), int(stage == "test")
            purpose = Purpose.EVALUATION_STEPS
            seed = derive_seed(environment.seed, purpose, context.round, context.client, place)
            # No cast of another client's weights is kept.
            with without_autocast(environment), torch_seed(seed, python=True):
                return client.evaluate(part, stage, context.data, environment, make_trainer)

        return score(task.validation, "validation"), score(task.test, "test")

    def load_own_model(
        self, client: FederatedClient, task: EvaluationTask, environment: FitEnvironment
    ) -> ClientError | None:
        """Bring the module to a client's own model, fine-tuned, in evaluation mode.

        Returns:
            Why it was not fine-tuned, if that failed.
        """
        load_own_state(client, task, environment)
        error = None
        if client.personalization_phases():
            try:
                with torch.enable_grad():
                    self.personalize(client, task.context, environment)
            except ClientError as found:
                error = found
                load_own_state(client, task, environment)
        client.eval()
        return error

    def personalize(self, client: FederatedClient, context: FitContext, environment: FitEnvironment) -> None:
        """Run the client's personalization phases in place, on the state that it holds."""
        client.train()
        if client.user_module is not None:
            client.user_module.begin_progress(None)  # what it comes to is forgotten
        client.loss_scale = b""
        seed = derive_seed(environment.seed, Purpose.PERSONALIZE_MODEL, context.round, context.client)
        with without_autocast(environment), torch_seed(seed, python=True):
            for index, phase in enumerate(client.personalization_phases()):
                self._run_prepared(client, phase, context, environment, f"{Purpose.PERSONALIZE}/{index}")
