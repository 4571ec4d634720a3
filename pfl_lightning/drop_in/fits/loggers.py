"""The outer Trainer's loggers, as modules find them inside local fits and evaluations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger

from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.lightning_private import callback_values, put_root_dir, trainer_or_none, values_for_loggers

_log = logging.getLogger(__name__)

_WRITES = ("add_", "after_save", "finalize", "log", "save", "watch")
"""How names of functions begin by which loggers write."""

_ONCE = ("after_save_checkpoint", "finalize", "graph", "hparams", "hyperparams", "save", "watch")
"""How names end of what is done once, by the outer Trainer."""


class OuterRun:
    """The outer Trainer and the client whose turn it is, for what runs inside; nothing in another process.

    Attributes:
        trainer: The outer Trainer during a fit, a validation or a test.
        clients: What so many clients, the first of each round and evaluation, send to their loggers arrives.
    """

    def __init__(self, clients: int = 1) -> None:
        self.trainer: L.Trainer | None = None
        self.clients, self._client, self._place, self._every = clients, 0, 0, 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None, "_every": self.validates_every}

    @property
    def validates_every(self) -> int:
        """The outer Trainer's ``check_val_every_n_epoch``, also in another process."""
        return self._every if self.trainer is None else self.trainer.check_val_every_n_epoch or 1

    def turn(self, client: int, place: int) -> None:
        """From now on it is a client's turn.

        Args:
            client: Its number.
            place: Its place in the round or the evaluation.
        """
        self._client, self._place = client, place

    @property
    def arrives(self) -> bool:
        """Whether what the client logs itself goes to the outer loggers."""
        return self.trainer is not None and self._place < self.clients

    @property
    def round(self) -> int:
        """The step under which it is logged."""
        return 0 if self.trainer is None else self.trainer.current_epoch

    def named(self, name: str) -> str:
        """A name with the client in front."""
        return f"client_{self._client}/{name}"

    def options(
        self, module: L.LightningModule, callbacks: Iterable[L.Callback], rates: dict[str, float]
    ) -> dict[str, Any]:
        """Options of an inner Trainer: its loggers.

        Args:
            module: The module that it runs.
            callbacks: Its callbacks.
            rates: Takes what a LearningRateMonitor logs; the last values stay.
        """
        found = [DummyLogger()] if self.trainer is None else self.trainer.loggers
        loggers = [LocalLogger(own, self, module, rates) for own in found]
        options: dict[str, Any] = {"logger": loggers or False}
        if any("LearningRateMonitor" in lightning_kinds(callback) for callback in callbacks):
            options["log_every_n_steps"] = 1  # fits are short
        return options

    def callbacks(self) -> list[L.Callback]:
        """What lets ``self.trainer.log_dir`` be that of the outer Trainer, also where there is no logger."""
        return [] if self.trainer is None else [_RootDir(str(self.trainer.default_root_dir))]


class _RootDir(L.Callback):
    """Gives an inner Trainer the outer one's folder, when it has looked for SLURM's checkpoints in none."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        put_root_dir(trainer, self._folder)


class _Local:
    """An object of a logger as it is found inside, which writes nothing there.

    What TensorBoard's ``add_*`` functions write is passed on with the round and the client.

    Args:
        own: The object.
        run: Says whose turn it is.
    """

    def __init__(self, own: Any, run: OuterRun) -> None:
        self._own, self._run = own, run

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]  # isinstance(self.logger, TensorBoardLogger) holds
        return type(self._own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_own", "_run"):  # of an object that is being made
            raise AttributeError(name)
        value = getattr(self._own, name)
        if not callable(value) or not name.startswith(_WRITES):
            return value
        if not self._run.arrives or name.endswith(_ONCE):
            return _nothing
        if name.startswith("add_"):
            return _passed(value, self._run)
        _say_that_it_is_left_out(type(self._own).__name__, name)
        return _nothing

    def __getitem__(self, name: str) -> Any:
        return DummyLogger().experiment


class LocalLogger(_Local):
    """A logger of the outer Trainer, as a module finds it inside a local fit or an evaluation.

    Its folder, name and version are those of the outer logger. What the inner Trainer logs is dropped: values that the
    module logs are taken from there, for means over the clients.

    Args:
        own: The outer logger.
        run: Says whose turn it is.
        module: The module that the inner Trainer runs.
        rates: Takes what a LearningRateMonitor logs.
    """

    def __init__(self, own: Any, run: OuterRun, module: L.LightningModule, rates: dict[str, float]) -> None:
        super().__init__(own, run)
        self._module, self._rates = module, rates

    @property
    def experiment(self) -> Any:
        """What the logger writes with."""
        return _Local(self._own.experiment, self._run)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass on values that the module sends here itself."""
        trainer, logged, monitored = trainer_or_none(self._module), {"epoch"}, set[str]()
        if trainer is not None:
            logged |= values_for_loggers(trainer)
            monitored = callback_values(trainer) - logged  # where LearningRateMonitor puts its own
        self._rates |= {name: float(value) for name, value in metrics.items() if name in monitored}
        own = {self._run.named(n): value for n, value in metrics.items() if n not in monitored and n not in logged}
        if own and self._run.arrives:
            self._own.log_metrics(own, step=self._run.round)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Dropped."""


@cache
def _say_that_it_is_left_out(owner: str, name: str) -> None:
    _log.warning(
        "%s.%s writes nothing inside local fits and evaluations: use self.logger.log_metrics or a TensorBoardLogger, "
        "or write in a callback of the outer Trainer",
        owner,
        name,
    )


def _passed(function: Callable[..., Any], run: OuterRun) -> Callable[..., Any]:
    """An ``add_*`` function of TensorBoard whose tags get the client in front and whose step is the round."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        for name in bound.signature.parameters:
            if name in ("tag", "main_tag") and name in bound.arguments:
                bound.arguments[name] = run.named(bound.arguments[name])
            elif name == "global_step":
                bound.arguments[name] = run.round
        return function(*bound.args, **bound.kwargs)

    return call
