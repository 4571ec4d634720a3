"""Clients of unequal sizes: incomplete batches are padded where the loss is a mean over samples, and few run alone."""

from functools import partial

import pytest
import torch
from _helpers.engines import assert_agree
from _helpers.toy import Toy, dropout_encoder, for_toy, normed_encoder, quiet_trainer, run, tiny_encoder

from pfl_lightning import Federation, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import Digits, DirichletOverClients, RandomFlip
from pfl_lightning.engines.vectorized import step
from pfl_lightning.functional import supervised_contrastive_loss
from pfl_lightning.methods import MOON, SCAFFOLD, Ditto, FedAvg, FedPAC, FedProto, FedProx, FedRep

ALL = ([0, 1, 2, 3, 4],)


@pytest.fixture
def passes(monkeypatch):
    """Of every computation of a step: the number of clients, whether padded, whether one after the other."""
    found, compute = [], step.EagerComputation.__call__

    def counted(self, inputs, index):
        found.append((len(inputs.batch[0]), inputs.mask is not None, inputs.apart))
        return compute(self, inputs, index)

    monkeypatch.setattr(step.EagerComputation, "__call__", counted)
    return found


@pytest.mark.parametrize("augment", [[], [RandomFlip()]], ids=["plain", "augmented"])
def test_a_stack_takes_hardly_more_passes_than_the_longest_client(passes, augment):
    data = Digits(DirichletOverClients(20, alpha=0.5), batch_size=10, augment=augment)
    engine = VectorizedEngine(forward="vmap")
    federation = Federation(partial(FedAvg, lr=0.05, epochs=3), encoder="mlp", engine=engine)
    quiet_trainer(1, FederatedLoop(), limit_val_batches=0).fit(federation, datamodule=data)
    sizes = [len(data.client_data(client).train) for client in range(20)]
    longest = 3 * max(-(-size // 10) for size in sizes)
    assert len({size % 10 for size in sizes}) > 5
    assert longest < len(passes) <= 1.1 * longest
    assert not engine._warned
    assert all(apart == (count <= 2) for count, padded, apart in passes if not padded)


@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedProx, FedRep, Ditto, SCAFFOLD, FedProto, MOON])
def test_padded_batches_give_what_the_batches_give(method, passes):
    assert not assert_agree(for_toy(method, lr=0.05, epochs=2), rounds=2, cohorts=ALL)
    assert any(padded for _, padded, _ in passes)
    assert any(apart for _, _, apart in passes)


def test_attached_values_follow_and_clipping_and_momentum_are_as_without(passes):
    class Weighted(FedAvg):
        averages_samples = True

        def before_fit(self, context):
            context.data.attach(torch.arange(context.data.num_samples, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            inputs, labels, weights = batch
            losses = torch.nn.functional.cross_entropy(self(inputs), labels, reduction="none")
            return self.sum_of_terms({"cross_entropy": (weights * losses).mean()})

    engines = {"gradient_clip_val": 0.5}
    assert not assert_agree(partial(Weighted, lr=0.02, momentum=0.9, epochs=2), cohorts=ALL)
    run(Weighted, 1, cohorts=ALL, engine=VectorizedEngine(forward="vmap", **engines))
    assert any(padded for _, padded, _ in passes)


# ---------------------------------------------------------------------- what is not padded


class Contrasts(FedAvg):
    """Compares the samples of a batch."""

    def loss_terms(self, features, labels):
        return {"cross_entropy": supervised_contrastive_loss(features, labels)}


class WronglyDeclared(Contrasts):
    averages_samples = True

    def loss_terms(self, features, labels):
        return super().loss_terms(features, labels)


class Counts(torch.nn.Module):
    """Counts the samples that it has seen, which a padded batch would change."""

    out_features = 4

    def __init__(self, input_shape):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += inputs.detach().sum()
        return torch.tanh(self.layer(inputs))


@pytest.mark.parametrize(
    ("method", "encoder", "said"),
    [
        (Contrasts, tiny_encoder, ""),
        (FedAvg, normed_encoder, ""),
        (WronglyDeclared, tiny_encoder, "batches of WronglyDeclared are not padded: its loss is"),
        (FedAvg, Counts, "batches of FedAvg are not padded: its step cannot be taken sample by sample"),
    ],
)
def test_what_is_no_mean_over_samples_is_not_padded(method, encoder, said, passes):
    found = assert_agree(partial(method, lr=0.02, epochs=2), cohorts=ALL, encoder=encoder, data=Toy(batch_size=9))
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert sum(padded for _, padded, _ in passes) <= 1  # that was compared


def test_random_steps_are_not_padded_and_say_nothing(passes):
    federation = run(partial(FedAvg, epochs=2), 1, encoder=dropout_encoder, engine=VectorizedEngine(forward="vmap"))
    assert not federation.engine._warned
    assert sum(padded for _, padded, _ in passes) == 1
    assert len(federation.engine.groups.unpadded) == 1


def test_a_subclass_that_changes_the_loss_must_say_that_it_averages():
    class Mine(FedProx):
        def loss_terms(self, features, labels):
            return super().loss_terms(features, labels)

    said = [step_averages(kind) for kind in (FedProx, Mine, type("Same", (FedProx,), {}))]
    assert said == [True, False, True]


def step_averages(kind):
    from pfl_lightning.engines.vectorized.limits import averages_samples

    return averages_samples(kind(tiny_encoder((6,)), 5))


def test_clients_without_an_incomplete_batch_are_not_touched(passes):
    data = Toy(labels=[[0, 1] * 4] * 4, batch_size=4)
    run(partial(FedAvg, epochs=1), 1, data=data, cohorts=[range(4)], engine=VectorizedEngine(forward="vmap"))
    assert set(passes) == {(4, False, False)}
