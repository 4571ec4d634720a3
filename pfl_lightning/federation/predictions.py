"""Predictions of a client's own model: what a Trainer's predict gives of it, and as a table with class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import client_number, names_of
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.exported import class_names, description, exported_inputs, load_exported
from pfl_lightning.federation.own_models import check_is_set_up
from pfl_lightning.lightning_private import silent_trainer
from pfl_lightning.notices import named_clients
from pfl_lightning.runs.results import csv_text
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

__all__ = ["Predictions", "predict", "predict_exported"]

PIECE = 1000
"""Inputs that an exported model is given at once."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of one client's own model.

    Attributes:
        client: Number of the client.
        probabilities: Softmax of the class scores, (N, C).
        classes: Classes of the highest scores, (N,); -1 where a score is NaN.
        labels: Classes that the samples have, (N,), where they are the client's own; ``None`` for given inputs.
        class_names: Names of the classes, in the order of the client's outputs.
    """

    client: int
    probabilities: Tensor
    classes: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of the samples that have the class of the highest score; ``None`` without labels."""
        return None if self.labels is None else float((self.classes == self.labels).sum()) / len(self.labels)

    def table(self, samples: Sequence[str] | None = None) -> str:
        """The text of a CSV file: a row for each sample, with ``label`` where there are labels.

        Args:
            samples: Names of the samples; ``None`` for their numbers.
        """
        head = ["sample", *(["label"] if self.labels is not None else []), "prediction"]
        rows: list[list[Any]] = [[*head, *(f"probability {name}" for name in self.class_names)]]
        named = (*self.class_names, "")  # of class -1
        for row, (found, shares) in enumerate(zip(self.classes.tolist(), self.probabilities.tolist(), strict=True)):
            label = [] if self.labels is None else [named[int(self.labels[row])]]
            rows.append([row if samples is None else samples[row], *label, named[found], *shares])
        return csv_text(rows)

    def save(self, path: Path, samples: Sequence[str] | None = None) -> None:
        """Write the table to a file, whose folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:
            temporary.write_text(self.table(samples), newline="")


def trainer_predict(model: L.LightningModule, federation: Federation, trainer: L.Trainer | None, **given: Any) -> Any:
    """What ``trainer.predict`` gives of a client's model; ``None`` is a Trainer like the federation's, without loggers.

    Args:
        model: The model; it belongs to no Trainer afterwards.
        federation: The federation.
        trainer: The Trainer.
        given: Further arguments of ``trainer.predict``.
    """
    if trainer is None:
        device = federation.trainer.strategy.root_device
        devices = 1 if device.index is None or device.type == "cpu" else [device.index]
        trainer = silent_trainer(accelerator=device.type, devices=devices, precision=federation.trainer.precision)
    found = list(trainer.predict(model, **given) or [])
    model.trainer = None
    return found


def predict(federation: Federation, client: int | str, inputs: Any = None) -> Predictions:
    """Predict with a client's own model, as it is evaluated: fine-tuned or personalized, in the Trainer's precision.

    Example:
        >>> found = federation.predict("hospital_a", images)  # doctest: +SKIP
        >>> found.probabilities, found.class_names  # doctest: +SKIP

    Args:
        federation: A federation that was fitted, or evaluated from a checkpoint.
        client: The client's number, or its name where the data have names.
        inputs: A batch (N, ...) of what the data set holds, a tensor or an array, which is normalized as the client's
            data are; images of bytes may also be floats in [0, 1]. ``None`` for the client's test part.

    Raises:
        ConfigurationError: The inputs have another shape or kind, there are none, or the model has no class scores.
        FederationError: The federation has not been fitted or evaluated yet.
        NoSuchClientError: There is no such client.
    """
    check_is_set_up(federation)
    data, device = federation.data, federation.environment.device
    number = client_number(data, client)
    who = named_clients([number], names_of(data))
    model, parts = federation.client_model(number), data.client_data(number)
    if not isinstance(model, FederatedClient):
        raise ConfigurationError(
            f"{who} has your own {type(model).__name__}: predict_clients(federation, loader, clients=[{number}]) "
            "returns what its predict_step returns"
        )
    if model.uses_knn_evaluation():
        raise ConfigurationError(
            f"{who} has no class scores: {federation.method_name} trains no head. Personalize "
            "(--personalize.train linear, or within federation.personalized)"
        )
    part: Any = parts.test
    size, labels = (getattr(parts, "batches", None) or data).eval_batch_size, None
    batches: Any
    if inputs is None:
        if not len(part):
            raise ConfigurationError(f"{who} has no test samples: pass inputs")
        labels = part.targets
        batches = (piece.loader(size, device=device).tensors()[0] for piece in part.split(size))
    else:
        given = _checked(inputs, next(parts.train.split(1)), who)
        batches = (part.transform.normalize(piece.to(device)) for piece in given.split(size))
    scores = torch.cat(trainer_predict(model, federation, None, dataloaders=batches)).cpu()
    return _of_scores(number, scores, labels, class_names(data, number))


def predict_exported(path: str | Path, inputs: Any) -> Predictions:
    """Predict with an exported model (a ``state_dict``) from its files alone, without federation and data.

    Example:
        >>> print(predict_exported("models/client_1.pt", "new_patients.csv").table())  # doctest: +SKIP

    Args:
        path: ``client_<number>.pt``, with ``client_<number>.json`` beside it.
        inputs: What :func:`~pfl_lightning.federation.exported.exported_inputs` takes.

    Raises:
        ConfigurationError: The files do not say how to build the model, or the inputs are not of its kind.
        ValueError: A column is missing, or has text in the place of numbers.
    """
    model, about = load_exported(path), description(path)
    with torch.no_grad():
        scores = torch.cat([model(piece) for piece in exported_inputs(path, inputs).split(PIECE)])
    return _of_scores(about["client"], scores, None, about["classes"])


def _of_scores(client: int, scores: Tensor, labels: Tensor | None, names: Sequence[str] | None) -> Predictions:
    classes = scores.argmax(1).masked_fill(scores.isnan().any(1), -1)
    named = tuple(names or map(str, range(scores.shape[1])))
    return Predictions(client, scores.float().softmax(1), classes, labels, named)


def _checked(inputs: Any, like: Any, who: str) -> Tensor:
    """A batch of inputs, of the shape and kind of the client's own."""
    given, own = torch.as_tensor(inputs), like.raw_inputs
    expected = f"expected {own.dtype} of shape (N, {', '.join(map(str, own.shape[1:]))})"
    came = f"got {given.dtype} of shape {tuple(given.shape)}"
    if given.shape[1:] != own.shape[1:] or given.ndim != own.ndim or not len(given):
        raise ConfigurationError(f"inputs of {who}: {expected}, N of at least 1, {came}")
    if given.is_floating_point() and own.is_floating_point():
        return given.to(own.dtype)
    unit = given.is_floating_point() and own.dtype == torch.uint8 and bool(((given >= 0) & (given <= 1)).all())
    if not unit and given.dtype != own.dtype:
        also = ", or floats from 0 to 1" if own.dtype == torch.uint8 else ""
        raise ConfigurationError(f"inputs of {who}: {expected}{also}, {came}")
    return given.float() if unit else given
