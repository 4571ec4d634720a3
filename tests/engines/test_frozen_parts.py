"""A part that does not train in a phase stays as it is, and its features may be computed once."""

import pytest
import torch
from _helpers.toy import FEATURES, Toy, assert_same, normed_encoder, run, whole_state
from torch import nn
from torch.nn import functional as F

from pfl_lightning import Phase, SequentialEngine, TrainerEngine
from pfl_lightning.methods import FedPAC, FedRep


class FunctionalDropout(nn.Module):
    """Random without a module that says so."""

    out_features = FEATURES

    def __init__(self, input_shape):
        super().__init__()
        self.layer = nn.Linear(input_shape[0], FEATURES)

    def forward(self, x):
        return F.dropout(torch.tanh(self.layer(x)), 0.4, self.training)


class HeadOnly(FedRep):
    def phases(self):
        return (Phase("head", ("head.*",), 2),)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_running_statistics_of_a_frozen_encoder_are_held(engine):
    federation = run(HeadOnly, 1, encoder=normed_encoder, engine=engine())
    state = federation.client_model(0).state_dict()
    assert state["encoder.1.num_batches_tracked"] == 0
    assert torch.equal(state["encoder.1.running_mean"], torch.zeros(FEATURES))


def test_running_statistics_follow_where_the_encoder_trains():
    state = run(FedRep, 1, encoder=normed_encoder, data=Toy(drop_last=True)).client_model(0).state_dict()
    assert not torch.equal(state["encoder.1.running_mean"], torch.zeros(FEATURES))


@pytest.mark.parametrize("encoder", [FunctionalDropout, normed_encoder])
def test_features_computed_once_change_nothing(encoder):
    states = []
    for cache in (True, False):
        engine = SequentialEngine(cache_features=cache)
        states.append(whole_state(run(FedPAC, 2, encoder=encoder, engine=engine, data=Toy(drop_last=True))))
    assert_same(*states, atol=1e-6)


class UsesInputs(FedRep):
    """A training step of its own, which may look at the inputs."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        assert inputs.shape[1] == Toy().load().train_inputs.shape[1]
        return F.cross_entropy(self.head(self.encoder(inputs)), labels) + 0 * inputs.sum()


def test_a_training_step_of_its_own_gets_inputs():
    assert_same(whole_state(run(UsesInputs, 1)), whole_state(run(FedRep, 1)), atol=1e-6)
