"""Scores of one client's model on a part of the client's data: by classes, or by nearest neighbors."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.data import SplitSource
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.functional.numerics import hits
from pfl_lightning.metrics import EvalMetrics


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


def score_neighbors(encoder: nn.Module, part: SplitSource, data: FitData, environment: FitEnvironment) -> EvalMetrics:
    """Accuracy of the nearest of the client's training samples, in the space of the features; there is no loss (NaN).

    Args:
        encoder: The network, in evaluation mode.
        part: The samples; at least one.
        data: The client's own training data.
        environment: Device and precision.
    """
    known, classes = data.features(encoder)
    right = 0.0
    for piece in part.split(data.eval_batch_size):
        inputs, targets = piece.loader(data.eval_batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            features = encoder(environment.precision.convert_input(inputs))
        right += len(piece) * float(nearest_neighbor_accuracy(known.float(), classes, features.float(), targets))
    return EvalMetrics(right / len(part), math.nan, len(part))
