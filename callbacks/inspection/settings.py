"""Hyper-parameters of a run, together with its final metrics."""

from __future__ import annotations

from typing import Any

import lightning as L

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.results import results_writer
from pfl_lightning.callbacks.run_facts import constructor_parameters
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of

Setting = bool | int | float | str
METRICS = (
    *("test_accuracy/mean", "test_accuracy/worst_decile", "val_accuracy/mean", "train/loss"),
    *("final/validation_selected", "final/last", "final/best_test"),
)


class RunSettings(InspectionCallback):
    """Hyper-parameters with the final metrics (TensorBoard's HPARAMS tab), and the resolved config as text.

    The tab shows the last value of ``test_accuracy/mean``, ``test_accuracy/worst_decile``, ``val_accuracy/mean`` and
    ``train/loss``, also for running and interrupted runs. At the end of training with a
    :class:`~pfl_lightning.callbacks.ResultsWriter`, the mean test accuracies of its choices are logged as
    ``final/last``, ``final/validation_selected`` and ``final/best_test``. Other loggers get the hyper-parameters by
    ``log_hyperparams``.

    Args:
        config: The config as text, set by the command line; ``None`` for a list of the hyper-parameters.
        dirpath: See :class:`InspectionCallback`.
    """

    def __init__(self, config: str | None = None, dirpath: str | None = None) -> None:
        super().__init__(dirpath=dirpath)
        self.config = config

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Log hyper-parameters and config; a resumed run adds its own config at its first round."""
        values = settings_of(trainer, federation)
        self.recorder.hyper_parameters(values, METRICS)
        text = self.config or "\n".join(f"{name}: {value}" for name, value in values.items())
        self.recorder.text("config", text, trainer.current_epoch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the final metrics."""
        writer = results_writer(trainer)
        if writer is not None and self._round is not None:
            finals = {f"final/{choice}": summary.mean for choice, summary in writer.summaries().items()}
            self.recorder.scalars(finals, self._round)


def settings_of(trainer: L.Trainer, federation: Federation) -> dict[str, Setting]:
    """Hyper-parameters of a run by name: the simple arguments of method, data, partition, loop and engine."""
    data: Any = federation.data
    objects = {"method": federation.clients.models[0], "data": data, "partition": getattr(data, "partition", None)}
    objects |= {"loop": loop_of(trainer), "engine": federation.engine}
    found: dict[str, Setting] = {
        "method": federation.method_name,
        "encoder": ", ".join(federation.clients.labels),
        "data": type(data).__name__,
        "num_clients": federation.num_clients,
        "seed": federation.seed,
        "rounds": trainer.max_epochs or -1,
        "precision": str(trainer.precision),
        "engine": type(federation.engine).__name__,
    }
    if objects["partition"] is not None:
        found["partition"] = type(objects["partition"]).__name__
    for name, one in objects.items():
        found |= {f"{name}/{argument}": value for argument, value in constructor_values(one).items()}
    return found


def constructor_values(one: object) -> dict[str, Setting]:
    """Constructor arguments of an object that it keeps as attributes of the same name and that are simple values.

    Lists and tuples of simple values are converted to text, and ``None`` to ``"null"``.

    Example:
        >>> from pfl_lightning.datamodules import DirichletOverClients
        >>> constructor_values(DirichletOverClients(num_clients=20, alpha=0.1, min_samples=5))
        {'num_clients': 20, 'alpha': 0.1, 'samples_per_client': 'null', 'min_samples': 5, 'seed': 0}
    """
    found: dict[str, Setting] = {}
    for name in constructor_parameters(type(one)):
        value = vars(one).get(name, one)  # a module's submodules are elsewhere
        if value is None:
            found[name] = "null"
        elif isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(v, bool | int | float | str) for v in value):
            found[name] = str(list(value))
    return found
