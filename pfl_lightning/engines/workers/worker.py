"""Worker process: local fits and evaluations of the clients of a payload, by an ordinary engine."""

from __future__ import annotations

import logging
import math
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.engines.workers.packing import DATA_SETS, Packed, pack, pack_error, unpack
from pfl_lightning.errors import ClientCodeError, ConfigurationError
from pfl_lightning.fit.tasks import Clock, EvaluationTask, FitEnvironment, FitTask
from pfl_lightning.notices import remembering_in

DENORMAL = 1e-40
"""Below the normal numbers of single precision."""


def _flushes() -> bool:
    return bool(torch.tensor(DENORMAL, dtype=torch.float32).mul(1) == 0)  # torch has no getter


def _is_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str | None:
    """``None`` where a backend's own switch sets the precision of products: torch refuses to mix them."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


_CUDNN, _ONEDNN = torch.backends.cudnn, torch.backends.mkldnn
_PLACES: tuple[tuple[Any, str], ...] = ((torch.backends.cuda, "matmul"), *((_CUDNN, name) for name in ("conv", "rnn")))
_PLACES += tuple((_ONEDNN, name) for name in ("matmul", "conv", "rnn"))
_ATTRIBUTES = [(getattr(*place, None), "fp32_precision") for place in _PLACES]
_ATTRIBUTES += [(_CUDNN, "benchmark"), (_CUDNN, "deterministic")]

SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_is_deterministic, lambda found: torch.use_deterministic_algorithms(found[0], warn_only=found[1])),
    (_matmul_precision, torch.set_float32_matmul_precision),
    *((partial(getattr, *place), partial(setattr, *place)) for place in _ATTRIBUTES if hasattr(*place)),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_flushes, torch.set_flush_denormal),
)
"""Global switches of torch that change results or check them, set by the user or the outer Trainer: read and set."""


def read_switches() -> tuple[Any, ...]:
    """Current switches of this process."""
    return tuple(read() for read, _ in SWITCHES)


def throw_switches(values: Sequence[Any]) -> None:
    """Set the switches of this process that differ: setting one may set others, too."""
    for (read, throw), value in zip(SWITCHES, values, strict=True):
        if value not in (None, read()):
            throw(value)


@dataclass(frozen=True)
class Setup:
    """Setup of a worker, in addition to the data.

    Attributes:
        models: Client module of each architecture.
        engine: Engine that trains and evaluates the clients.
        environment: Settings of the outer Trainer; the worker sets its own device.
        switches: Global switches of torch.
        filters: Filters of warnings, as in the module ``warnings``.
    """

    models: tuple[FederatedClient, ...]
    engine: Engine
    environment: FitEnvironment
    switches: tuple[Any, ...]
    filters: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ClientWork:
    """Task of a client as sent to a worker, which has the data.

    Attributes:
        model: Index of the client's architecture.
        task: The task, without its context and the parts of the data.
        stored: See :class:`~pfl_lightning.client.FitContext`.
        max_steps: See :class:`~pfl_lightning.client.FitContext`.
        parts: Names of the parts that are evaluated.
    """

    model: int
    task: FitTask | EvaluationTask
    stored: bool = True
    max_steps: float = math.inf
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: int, task: FitTask | EvaluationTask) -> ClientWork:
        """Work of a whole task."""
        parts = tuple(part for part in ("validation", "test") if getattr(task, part, None) is not None)
        absent: dict[str, Any] = dict.fromkeys(("context", *parts))
        return cls(model, replace(task, **absent), task.context.stored, task.context.max_steps, parts)


@dataclass(frozen=True)
class Payload:
    """Message to a worker, with the tasks of one client or several.

    Attributes:
        work: Packed tuple of :class:`ClientWork`.
        bundles: Numbers and references of the bundles of common tensors that the work refers to.
        alive: Numbers of all bundles that later payloads may refer to; a worker drops the others.
        clock: How far the outer Trainer has come, which the settings at the start do not tell.
        choices: Which ways were measured to be faster, see :class:`~pfl_lightning.engines.Engine`.
    """

    work: Packed
    bundles: tuple[tuple[int, Any], ...] = ()
    alive: frozenset[int] = frozenset()
    clock: Clock = field(default_factory=Clock)
    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """Warning, or a line of the package's log (without a category).

    Attributes:
        text: What is said.
        category: Of a warning.
        level: Of a line of the log.
        file: Where the warning was given.
        line: Where in the file.
        same: Equal for warnings that say the same of several clients.
    """

    text: str
    category: type[Warning] | None = None
    level: int = logging.WARNING
    file: str = ""
    line: int = 0
    same: str = ""


@dataclass(frozen=True)
class Reply:
    """Reply of a worker.

    Attributes:
        value: Packed results; ``None`` after an error.
        error: Packed error.
        traceback: Traceback of the error.
        notices: Warnings and log lines.
    """

    value: Packed | None
    error: Packed | None = None
    traceback: str = ""
    notices: tuple[Notice, ...] = ()


def versions() -> dict[str, str]:
    """Versions that must agree between workers and this process for equal results."""
    from pfl_lightning import __version__

    own = {"pfl_lightning": __version__, "torch": torch.__version__, "lightning": L.__version__}
    return own | {"Python": ".".join(platform.python_version_tuple()[:2])}


class Worker:
    """Worker that fits and evaluates the clients of the payloads that it receives.

    Args:
        threads: Threads of a fit.
        path: Further entries of ``sys.path``.
        get: Function that returns the object of a reference.
    """

    def __init__(self, threads: int, path: Sequence[str] = (), *, get: Callable[[Any], Any]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        torch.set_num_threads(threads)
        self._bundles: dict[int, Sequence[Tensor]] = {}
        self._get = get
        self._models: tuple[FederatedClient, ...]
        self._data: FederatedData
        self._engine: Engine
        self._environment: FitEnvironment
        self._filters: tuple[Any, ...] = ()
        self._shown = set[tuple[Any, ...]]()

    def prepare(self, setup: Sequence[Any], data: Sequence[Any], device: str, expected: dict[str, str]) -> Reply:
        """Take the setup and the data, each as a sequence of one reference (which Ray would resolve otherwise)."""

        def take() -> None:
            if versions() != expected:  # first of all: another version may not even unpack them
                raise ConfigurationError(
                    f"a worker has other versions than this process: {versions()} there, {expected} here; the results "
                    "would differ. Install the same on all nodes"
                )
            self._data = unpack(self._get(data[0]), copy=False)
            found: Setup = unpack(self._get(setup[0]), {DATA_SETS: getattr(self._data, "divided_datasets", ())})
            throw_switches(found.switches)
            self._filters, self._engine, there = found.filters, found.engine, torch.device(device)
            if there.type == "cuda" and not torch.cuda.is_available():
                raise RuntimeError("the worker finds no GPU: torch.cuda.is_available() is false there")
            precision = found.environment.precision
            if isinstance(precision, MixedPrecision) and precision.device != there.type:  # it names its device
                precision = MixedPrecision(cast(Any, precision.precision), there.type)
            self._environment = replace(found.environment, device=there, precision=precision)
            self._models = tuple(model.to(there) for model in found.models)
            self._engine.threads = torch.get_num_threads()  # chosen where the workers were started
            self._engine.start(self._models, self._data, self._environment)

        return self._answer(take)

    def alive(self) -> bool:
        """Return True: the process answers."""
        return True

    def fit(self, payload: Payload) -> Reply:
        """Fit the clients of a payload; the value has a list of results and the engine's choices."""
        return self._answer(lambda: (self._fit(payload), self._engine.choices))

    def evaluate(self, payload: Payload) -> Reply:
        """Evaluate the clients of a payload; the value has a list of results and the engine's choices."""
        return self._answer(lambda: (self._evaluate(payload), self._engine.choices))

    def _fit(self, payload: Payload) -> list[Any]:
        environment, tasks = self._environment, list(self._tasks(payload, training=True))
        results = []
        with torch.enable_grad(), environment.precision.train_step_context():
            for result in self._engine.run(tasks, environment):
                if isinstance(result.error, ClientCodeError) and result.error.cause is not None:
                    result.error.cause = unpack(pack_error(result.error.cause))
                # What is packed shares the result's memory, and a personal state is valid until the next is asked for.
                results.append(result if len(tasks) == 1 else result.with_own_state())
        return results

    @torch.no_grad()
    def _evaluate(self, payload: Payload) -> list[Any]:
        environment = replace(self._environment, clock=payload.clock)
        tasks = list(self._tasks(payload, training=False))
        with environment.precision.val_step_context():
            return list(self._engine.evaluate(tasks, environment))

    def _tasks(self, payload: Payload, training: bool) -> Iterator[tuple[FederatedClient, Any]]:
        self._bundles = {number: kept for number, kept in self._bundles.items() if number in payload.alive}
        for number, reference in payload.bundles:
            if number not in self._bundles:
                self._bundles[number] = unpack(self._get(reference))
        self._engine.choices |= payload.choices
        for work in unpack(payload.work, self._bundles):
            sent, model, environment = work.task.broadcast, self._models[work.model], self._environment
            place = (self._data, sent.client, sent.round, model, environment)
            context = make_context(*place, training=training, stored=work.stored)
            own = self._data.client_data(sent.client)
            given = {part: getattr(own, part) for part in work.parts} | {"broadcast": sent.to(environment.device)}
            yield model, replace(work.task, context=replace(context, max_steps=work.max_steps), **given)

    def _answer(self, compute: Callable[[], Any]) -> Reply:
        with remembering_in(self._shown), _noted(self._filters) as notices:
            try:
                value, error, where = pack(compute()), None, ""
            except Exception as found:
                where = traceback.format_exc()  # before the error loses its frames
                value, error = None, pack_error(found)
        return Reply(value, error, where, tuple(notices()))


@contextmanager
def _noted(filters: Sequence[Any]) -> Iterator[Callable[[], list[Notice]]]:
    """Context manager that collects warnings and the package's log, to be repeated in the main process.

    Args:
        filters: The main process's filters of warnings, when they are known.
    """
    logger, lines = logging.getLogger("pfl_lightning"), list[Notice]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(Notice(record.getMessage(), level=record.levelno))  # type: ignore[method-assign]
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            if filters:
                warnings.filters[:] = filters  # type: ignore[index]
            yield lambda: [*lines, *map(_notice, caught)]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _notice(said: warnings.WarningMessage) -> Notice:
    text = str(said.message)
    same = getattr(said.message, "without_name", text)
    return Notice(text, said.category, file=said.filename, line=said.lineno, same=same)
