"""What a client computes before its evaluation: under every engine, for novel clients, and forgotten afterwards."""

from functools import partial

import pytest
import torch
from _helpers.engines import evaluate
from _helpers.fake_cluster import fake_ray_engine
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import CLIENTS, Toy, assert_same, own_model, quiet_trainer, run, whole_state

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg
from pfl_lightning.phases import Personalization
from pfl_lightning.state.tensors import TensorDict

ENGINES = pytest.mark.parametrize(
    "make",
    [
        lambda patch: TrainerEngine(),
        lambda patch: VectorizedEngine(forward="vmap"),
        lambda patch: fake_ray_engine(patch, 2)[0],
        lambda patch: forked_process_engine(patch, 2),
    ],
    ids=["trainer", "vmap", "ray", "processes"],
)


class Prepared(FedAvg):
    """Scores gain the client's class counts, a draw, and a step of the head along its own gradient."""

    def __init__(self, *args, sized=False, **options):
        super().__init__(*args, **options)
        self.sized = sized
        self.own = TensorDict(persistent=False)
        self.register_buffer("drawn", torch.zeros(self.num_classes), persistent=False)

    def before_evaluation(self, context):
        assert not self.training
        assert not torch.is_grad_enabled()
        assert len(self.own) == 0  # what the client before had is gone
        features, labels = context.data.features(self.encoder)
        with torch.enable_grad():
            loss = torch.nn.functional.cross_entropy(self.classify(features), labels)
            gradient = torch.autograd.grad(loss, self.head.bias)[0]
        self.head.bias -= gradient
        validation = context.validation
        held_out = 0 if validation is None else validation.num_samples
        counts = context.data.class_counts(self.num_classes).to(self.head.bias)
        rows = context.data.num_samples if self.sized else 1
        self.own.assign({"counts": (0.1 * counts + held_out).expand(rows, -1).clone()})
        self.drawn = torch.randn(self.num_classes)

    def classify(self, features):
        scores = super().classify(features)
        if self.training or len(self.own) == 0:
            return scores
        return scores + self.own.as_state()["counts"].mean(0) + self.drawn


FIT = partial(Prepared, lr=0.05, epochs=1)


def by_hand(federation, data, client):
    """Scores of the client's test part."""
    model = own_model(federation, client)
    inputs, _ = data.tensors(client, "test")
    with torch.no_grad():
        return model(inputs)


@ENGINES
@pytest.mark.parametrize(("sized", "fine_tune"), [(False, "head"), (True, None)])
def test_every_engine_calls_it(make, sized, fine_tune, monkeypatch):
    fit = partial(FIT, sized=sized, fine_tune=fine_tune)
    data = partial(Toy, validation=[5, 0, 9, 1, 20])
    got = run(fit, 2, cohorts=[[0, 2, 3]], engine=make(monkeypatch), data=data())
    expected = run(fit, 2, cohorts=[[0, 2, 3]], engine=SequentialEngine(), data=data())
    assert_same(whole_state(got), whole_state(expected), atol=1e-5)
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].loss == pytest.approx(score.loss, abs=1e-4)


def test_it_has_the_clients_own_parts_and_draws():
    data = Toy(validation=[5, 0, 9, 1, 20])
    federation = run(FIT, 1, data=data)
    result = evaluate(federation, SequentialEngine())
    for client in range(CLIENTS):
        labels = data.tensors(client, "test")[1]
        scores = by_hand(federation, data, client)
        assert result[client].test.loss == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)))
        counts = torch.bincount(torch.tensor(data.labels[client]), minlength=5)
        held_out = [5, 0, 9, 1, 20][client]
        assert torch.equal(own_model(federation, client).own.as_state()["counts"][0], 0.1 * counts + held_out)
    drawn = [own_model(federation, client).drawn for client in range(CLIENTS)]
    assert not torch.equal(drawn[0], drawn[1])
    again = evaluate(federation, SequentialEngine(), [3, 1])
    assert again == [result[3], result[1]]  # whoever came before


@pytest.mark.parametrize("engine", [SequentialEngine(), VectorizedEngine(forward="vmap")])
def test_nothing_is_left_behind(engine):
    evaluated = run(FIT, 2, engine=engine)
    model = evaluated.clients.models[0]
    assert len(model.own) == 0
    assert not model.drawn.any()
    plain = run(FIT, 2, engine=engine, limit_val_batches=0)
    assert_same(whole_state(evaluated), whole_state(plain))


def test_a_copy_for_the_owner_predicts_as_it_was_evaluated():
    data = Toy()
    federation = run(FIT, 1, data=data)
    inputs, _ = data.tensors(2, "test")
    given = federation.client_model(2)
    with torch.no_grad():
        torch.testing.assert_close(given.eval()(inputs), by_hand(federation, data, 2))
    assert len(federation.clients.models[0].own) == 0


def test_novel_clients_and_a_personalization_get_it():
    data = Toy(novel_clients=2)
    federation = run(FIT, 1, data=data, loop=FederatedLoop())
    for client in data.novel:
        assert len(own_model(federation, client).own) == 1
    with federation.personalized(Personalization("linear", epochs=1)):
        quiet_trainer(1).test(federation, data, verbose=False)
    assert sorted(federation.test_scores) == list(range(CLIENTS))


def test_a_buffer_that_is_written_into_is_refused():
    class Writing(Prepared):
        def before_evaluation(self, context):
            self.drawn.fill_(1.0)

    with pytest.raises(ConfigurationError, match=r"writes into the buffer 'drawn'.*replace it by assign"):
        run(partial(Writing, lr=0.05, epochs=1), 1)
