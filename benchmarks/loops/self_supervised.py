"""Heads and losses of self-supervised training in plain PyTorch, for loops of several methods."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, OUT = 2048, 256


def simclr_projector(width: int) -> nn.Sequential:
    """SimCLR's projector of features of this width."""
    return nn.Sequential(
        nn.Linear(width, HIDDEN, bias=False),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, OUT, bias=False),
        nn.BatchNorm1d(OUT),
    )


def byol_head(width: int) -> nn.Sequential:
    """BYOL's projector, and its predictor."""
    return nn.Sequential(
        nn.Linear(width, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)
    )


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent of two views, the loss of SimCLR."""
    rows = F.normalize(torch.cat([first, second]))
    scores = rows @ rows.T / temperature
    scores = scores.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(rows)).roll(len(first)))
