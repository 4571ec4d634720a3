"""Engines with modules of uncommon forms: normalization without parameters, terms that are parameters, fused steps."""

from functools import partial

import pytest
import torch
from _helpers.toy import INPUTS, Toy, quiet_trainer, run
from torch import nn
from torch.nn import functional as F

from pfl_lightning import FederatedLoop, Federation, ProcessEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.methods import FedAvg, FedPer

EVEN = Toy(drop_last=True)  # no last batch of one sample, which batch normalization does not take
STEPS = {"lr": 0.3, "epochs": 2}


class Cached(FedAvg):
    """Looks at features before and after a phase with batches of its own."""

    errors: list[float] = []  # noqa: RUF012

    def phases(self):
        return (Phase(epochs=2, batch_size=3),)

    def before_fit(self, context):
        self.features_of(context.data)

    def make_update(self, context, before):
        found = self.features_of(context.data)[0]
        context.data.cached_features = None
        self.errors.append(float((found - self.features_of(context.data)[0]).abs().max()))
        return super().make_update(context, before)


@pytest.mark.parametrize("fused", [False, True])
def test_features_are_those_of_the_trained_encoder(fused):
    Cached.errors.clear()
    run(partial(Cached, optimizer=partial(torch.optim.SGD, lr=0.1, fused=fused)), engine=SequentialEngine())
    assert Cached.errors == [0.0] * 5


def standardized(shape):
    encoder = nn.BatchNorm1d(shape[0], affine=False)
    encoder.out_features = shape[0]
    return encoder


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_normalization_without_parameters_trains(engine):
    federation = run(partial(FedAvg, **STEPS), encoder=standardized, engine=engine(), data=EVEN)
    norm = federation.client_model(0).encoder
    assert int(norm.num_batches_tracked) > 0
    assert not torch.equal(norm.running_mean, torch.zeros(INPUTS))

    class HeadAlone(FedPer):
        def phases(self):
            return (Phase(train=("head.*",)),)

    norm = run(HeadAlone, encoder=standardized, engine=engine(), data=EVEN).client_model(0).encoder
    assert int(norm.num_batches_tracked) == 0


class Temperature(FedAvg):
    """Returns a parameter among its terms."""

    shared = ("encoder.*", "head.*", "tau")

    def assemble(self, encoder):
        super().assemble(encoder)
        self.tau = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self.tau * self(batch[0]), batch[1]), "tau": self.tau}


def test_a_term_that_is_a_parameter_has_its_mean_over_steps():
    found = []
    for engine in (SequentialEngine(), VectorizedEngine(forward="vmap")):
        trainer = quiet_trainer(1, FederatedLoop())
        federation = Federation(partial(Temperature, **STEPS), standardized, engine=engine, seed=1)
        trainer.fit(federation, datamodule=EVEN)
        found.append(float(trainer.callback_metrics["train/tau"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4) != 1.0


class Fails(FedAvg):
    def forward(self, inputs):
        raise KeyError("boom")


class FailsLater(FedAvg):
    def training_step(self, batch, batch_idx):
        if self.phase.name == "fine_tune":
            raise KeyError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", [partial(FailsLater, fine_tune="all", **STEPS), partial(Fails, epochs=1)])
@pytest.mark.parametrize("engine", [SequentialEngine, pytest.param(partial(ProcessEngine, 1), marks=pytest.mark.slow)])
def test_an_error_in_an_evaluation_names_the_client_and_the_round(method, engine):
    federation = Federation(method, standardized, engine=engine(), seed=1)
    with pytest.raises(KeyError, match="boom") as raised:
        quiet_trainer(1, FederatedLoop()).validate(federation, datamodule=Toy(), verbose=False)
    assert any("in the evaluation of client 0, round" in note for note in raised.value.__notes__)


def test_optimizers_in_a_list_of_one_dictionary():
    class Listed(FedAvg):
        def configure_optimizers(self):
            return [{"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)}]

    states = [run(Listed, engine=engine()).server.weights.as_state() for engine in (SequentialEngine, TrainerEngine)]
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
