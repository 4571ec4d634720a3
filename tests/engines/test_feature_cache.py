"""Features of a frozen encoder are computed once only where every batch would give the same ones."""

import random
from functools import partial

import pytest
import torch
from _helpers.toy import FEATURES, Toy, assert_same, run, tiny_encoder, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.methods import FedPAC, FedRep


class Drops(nn.Module):
    """Leaves out its second layer in some batches of the training, by a draw from torch or from Python."""

    out_features = FEATURES

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(6, FEATURES), nn.Linear(FEATURES, FEATURES), draw

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        return hidden if self.training and self.draw() < 0.2 else hidden + torch.tanh(self.second(hidden))


class Centers(nn.Module):
    """Subtracts a center that every pass of the training moves."""

    out_features = FEATURES

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, FEATURES)
        self.register_buffer("center", torch.zeros(FEATURES))

    def forward(self, inputs):
        found = self.layer(inputs)
        centered = found - self.center
        if self.training:
            with torch.no_grad():
                self.center.lerp_(found.mean(0), 0.5)
        return centered


def by_batch(_):
    """Normalizes by the batch in evaluations, too."""
    layers = nn.Linear(6, FEATURES), nn.BatchNorm1d(FEATURES, track_running_stats=False), nn.Tanh()
    encoder = nn.Sequential(*layers)
    encoder.out_features = FEATURES
    return encoder


ENCODERS = {
    "torch": lambda _: Drops(lambda: float(torch.rand(()))),
    "python": lambda _: Drops(random.random),
    "buffer": lambda _: Centers(),
    "spectral": lambda shape: spectral(shape),
    "by batch": by_batch,
}


def spectral(shape):
    """Power iterations in every pass of the training."""
    encoder = tiny_encoder(shape)
    encoder[0] = nn.utils.spectral_norm(encoder[0])
    return encoder


def data():
    """Toy data in batches of 9, and features in chunks of everything."""
    toy = Toy(batch_size=9)
    toy.eval_batch_size = 1000
    return toy


@pytest.mark.parametrize("method", [FedRep, FedPAC])
@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_an_encoder_that_differs_between_batches_is_run_on_each(encoder, method):
    def go(cache):
        engine = SequentialEngine(cache_features=cache)
        return run(partial(method, lr=0.05), encoder=encoder, data=data(), engine=engine, limit_val_batches=0)

    assert_same(whole_state(go(True)), whole_state(go(False)), atol=1e-6)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_others_are_run_once(engine, monkeypatch):
    passes = []
    forward = nn.Linear.forward

    def counted(layer, inputs):
        passes.append(layer.in_features)
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    run(partial(FedRep, head_epochs=20, epochs=1), cohorts=[[0]], engine=engine(), limit_val_batches=0)
    assert 0 < passes.count(6) < 20  # layers on inputs: of the trial, the features and the encoder's epoch
