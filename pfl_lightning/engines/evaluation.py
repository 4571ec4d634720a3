"""Evaluation of one client's model on a part of the client's data."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import SplitSource
from pfl_lightning.engines.preparation import prepare_evaluation, prepares_evaluation, remember_before
from pfl_lightning.engines.tasks import EvaluationTask, FitEnvironment
from pfl_lightning.fit_data import FitData
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.functional.numerics import hits
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.state.tensors import load_state

__all__ = ["SplitMetrics", "load_own_state", "score_neighbors", "score_part"]

SplitMetrics = tuple[EvalMetrics | None, EvalMetrics | None]
"""Metrics of the validation and the test part; ``None`` where there is none."""


def score_part(model: nn.Module, part: SplitSource, batch_size: int, environment: FitEnvironment) -> EvalMetrics:
    """Accuracy and mean cross entropy, without gradients.

    Args:
        model: From inputs to class scores (N, C), in evaluation mode.
        part: The samples; at least one.
        batch_size: Samples at a time.
        environment: Device and precision.
    """
    right = torch.zeros((), dtype=torch.int64, device=environment.device)
    loss = torch.zeros((), dtype=torch.float32, device=environment.device)  # whatever the default type is
    for piece in part.split(batch_size):
        x, y = piece.loader(batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            scores = model(environment.precision.convert_input(x))
        right += hits(scores, y).sum()
        loss += F.cross_entropy(scores.float(), y, reduction="sum")
    return EvalMetrics(float(right) / len(part), float(loss) / len(part), len(part))


def score_neighbors(
    client: FederatedClient, part: SplitSource, data: FitData, environment: FitEnvironment
) -> EvalMetrics:
    """Accuracy of the nearest of the client's training samples, in the space of the features; there is no loss (NaN).

    Args:
        client: The model, in evaluation mode.
        part: The samples; at least one.
        data: The client's own training data.
        environment: Device and precision.
    """
    known, classes = data.features(client.encoder)
    right = 0.0
    for piece in part.split(data.eval_batch_size):
        inputs, targets = piece.loader(data.eval_batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            features = client.encoder(environment.precision.convert_input(inputs))
        right += len(piece) * float(nearest_neighbor_accuracy(known.float(), classes, features.float(), targets))
    return EvalMetrics(right / len(part), math.nan, len(part))


def load_own_state(client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> None:
    """Put the model that a client is evaluated with into the module of its architecture, before any fine-tuning.

    It is the client's personal state under what the server would send now; or, for a method that evaluates the trained
    models, the client's model after its last local fit. Then comes the method's own ``before_evaluation``.
    """
    prepares = prepares_evaluation(client)
    if prepares:
        remember_before(client)
    if client.buffers_change:
        client.restore_buffers()
    if not task.trained:
        load_state(client, task.stored)
    client.receive(task.broadcast if client.device.type == "cpu" else task.broadcast.to(client.device))
    client.recall(task.attributes)
    if task.trained:
        load_state(client, task.stored)  # over the received weights; what else was received stays
    if prepares:
        prepare_evaluation(client, task.context, environment)
