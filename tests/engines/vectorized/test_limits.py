"""Limits of VectorizedEngine: refusals, fits left to SequentialEngine, and failures."""

import logging
import math
import pickle
from functools import partial

import pytest
import torch
from _helpers.resume import play
from _helpers.toy import CLIENTS, Toy, assert_same, dropout_encoder, normed_encoder, run, whole_state

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized import phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedClassAvg, FedPAC, FedProx, FedRep
from pfl_lightning.state.tensors import TensorDict

ALL = [range(CLIENTS)]


@pytest.fixture
def said(caplog):
    """The lines that the engine logged."""
    caplog.set_level(logging.WARNING, logger=VectorizedEngine.__module__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == VectorizedEngine.__module__]


class LogsByTheWay(FedAvg):
    def loss_terms(self, features, labels):
        self.log("width", features.norm())
        return super().loss_terms(features, labels)


def test_a_step_that_logs_is_refused_with_its_line():
    with pytest.raises(ConfigurationError, match=r"(?s)'width'.*test_limits.py.*self.log\("):
        run(LogsByTheWay, engine=VectorizedEngine())


def test_several_optimizers_are_refused_in_no_other_engines_name():
    class Two(FedAvg):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.head)]

    with pytest.raises(ConfigurationError, match=r"(?s)^this engine takes one optimizer.*need TrainerEngine"):
        run(Two, engine=VectorizedEngine())


def test_group_sizes_are_checked():
    with pytest.raises(ValueError, match="clients_per_batch must be at least 1, got 0"):
        VectorizedEngine(0)


# ---------------------------------------------------------------------- left to SequentialEngine


class CallsItem(FedAvg):
    def loss_terms(self, features, labels):
        self_scale = 1 + 0 * features.sum().item()
        return {name: self_scale * term for name, term in super().loss_terms(features, labels).items()}


class Branches(FedAvg):
    def loss_terms(self, features, labels):
        if features.sum() > 1e9:
            raise AssertionError
        return super().loss_terms(features, labels)


class Chooses(FedAvg):
    def loss_terms(self, features, labels):
        chosen = labels >= 0
        return super().loss_terms(features[chosen], labels[chosen])


class Remembers(FedAvg):
    def loss_terms(self, features, labels):
        self.last = features
        return super().loss_terms(features, labels)


class OwnAttribute(FedAvg):
    def before_fit(self, context):
        self.scale = 1 / context.data.num_samples

    def loss_terms(self, features, labels):
        return {name: self.scale * term for name, term in super().loss_terms(features, labels).items()}


class Hooked(FedAvg):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Foreign(FedAvg):
    spare = torch.nn.Parameter(torch.zeros(2))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), type(self).spare], lr=self.lr)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (CallsItem, r"CallsItem.training_step, .*test_limits.py:\d+: .*\.item\(\): .*calling .item\(\)"),
        (
            Branches,
            r"Branches.training_step, .*test_limits.py:\d+: if features.sum.*data-dependent control flow",
        ),
        (Chooses, r"Chooses.training_step, .*test_limits.py:\d+: return super"),
        (Remembers, "Remembers changes the attribute 'last' in training_step"),
        (OwnAttribute, "OwnAttribute changes the attribute 'scale' in receive, before_fit or phases"),
        (Hooked, "Hooked overrides on_after_backward"),
        (Foreign, r"the optimizer of Foreign holds a tensor of shape \(2,\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_vectorized_says_why_once_and_runs_one_by_one(method, reason, said):
    got = run(method, 2, cohorts=ALL, engine=VectorizedEngine())
    (line,) = said()
    assert line.endswith("Its clients run one by one, as under SequentialEngine")
    assert __import__("re").search(reason, line), line
    assert_same(whole_state(got), whole_state(run(method, 2, cohorts=ALL)))


def test_a_bug_is_raised_as_it_is():
    class Broken(FedAvg):
        def loss_terms(self, features, labels):
            return super().loss_terms(features[:, :2], labels)

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        run(Broken, engine=VectorizedEngine())
    assert caught.value.__notes__ == ["in the local fit of client 0, round 1"]


def test_batches_of_one_sample_under_normalization_are_named(said):
    with pytest.raises(ConfigurationError, match="client 1: batch normalization cannot train on a batch of"):
        run(FedAvg, cohorts=[[1, 0]], encoder=normed_encoder, data=Toy(batch_size=8), engine=VectorizedEngine())
    assert said() == []


def test_a_client_alone_is_trained_as_by_fabric_fit(said):
    def go(engine):
        return whole_state(run(FedAvg, 2, cohorts=[[3], [1]], encoder=dropout_encoder, engine=engine))

    assert_same(go(VectorizedEngine()), go(SequentialEngine()))
    assert said() == []


# ---------------------------------------------------------------------- when something goes wrong


def test_a_client_with_a_non_finite_loss_leaves_the_others_alone():
    bad = 2
    first = sum(len(own) for own in Toy().labels[:bad])

    def poison(inputs, targets):
        inputs[first + 3] = math.nan

    def go(engine):
        with pytest.warns(UserWarning, match=r"left out of the aggregation: client 2, round 1: the loss is nan at st"):
            return run(partial(FedRep, lr=0.05), data=Toy(change=poison), cohorts=ALL, engine=engine)

    got, expected = go(VectorizedEngine()), go(SequentialEngine())
    assert not got.personal.written(bad)
    own = [{n: t for n, t in whole_state(f).items() if f"client {bad}" not in n} for f in (got, expected)]
    assert_same(*own, atol=1e-6)


@pytest.mark.parametrize("most", [3, 1])
def test_an_out_of_memory_error_halves_the_group(most, monkeypatch, said):
    """More clients than ``most`` are too many; the round is the same."""
    sizes = []
    train = phase.train

    def limited(stack, step, optimizer, streams, *args):
        sizes.append(len(streams))
        if len(streams) > most:
            raise torch.OutOfMemoryError("simulated")
        return train(stack, step, optimizer, streams, *args)

    monkeypatch.setattr(phase, "train", limited)
    got = run(partial(FedProx, lr=0.05), 2, cohorts=ALL, engine=VectorizedEngine())
    assert sizes == ([5, 3, 2, 3, 2] if most == 3 else [5, 3, 2])
    assert len(said()) == (1 if most == 3 else 3)
    assert "5 clients at once need too much memory; continuing with 3 at once" in said()[0]
    assert_same(whole_state(got), whole_state(run(partial(FedProx, lr=0.05), 2, cohorts=ALL)), atol=1e-6)


def test_what_the_server_holds_is_not_written_into():
    """A client may keep the broadcast's own tensors, as FedProx does."""

    class Keeps(FedProx):
        seen = []  # noqa: RUF012

        def receive(self, broadcast):
            super().receive(broadcast)
            type(self).seen.append([(tensor, tensor.clone()) for tensor in broadcast.weights.values()])

    run(partial(Keeps, lr=0.05), cohorts=ALL, engine=VectorizedEngine())
    assert isinstance(Keeps.seen, list)
    assert all(torch.equal(tensor, copy) for pairs in Keeps.seen[:CLIENTS] for tensor, copy in pairs)
    assert len(TensorDict()) == 0


# ---------------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("method", [FedPAC, partial(FedClassAvg, warm_up_epochs=1)], ids=["FedPAC", "FedClassAvg"])
@pytest.mark.parametrize("encoder", [dropout_encoder, normed_encoder])
def test_stop_and_resume_is_exact(method, encoder, tmp_path):
    options = {"encoder": encoder, "engine": VectorizedEngine(), "data": Toy(batch_size=9)}
    whole = play(tmp_path / "whole", 3, method, **options)
    play(tmp_path / "parts", 1, method, **options)
    options |= {"engine": VectorizedEngine(), "data": Toy(batch_size=9)}
    resumed = play(tmp_path / "parts", 3, method, ckpt_path=str(tmp_path / "parts" / "last.ckpt"), **options)
    assert_same(whole_state(resumed), whole_state(whole))


def test_a_run_may_be_resumed_under_another_engine(tmp_path):
    whole = play(tmp_path / "whole", 2, FedPAC, engine=SequentialEngine())
    for first, second in ((SequentialEngine, VectorizedEngine), (VectorizedEngine, SequentialEngine)):
        folder = tmp_path / first.__name__
        play(folder, 1, FedPAC, engine=first())
        resumed = play(folder, 2, FedPAC, ckpt_path=str(folder / "last.ckpt"), engine=second())
        assert_same(whole_state(resumed), whole_state(whole), atol=1e-5)


def test_the_engine_can_be_pickled():
    engine = VectorizedEngine(7, gradient_clip_val=0.5)
    run(Hooked, engine=engine)
    copy = pickle.loads(pickle.dumps(engine))
    assert (copy.clients_per_batch, copy.gradient_clip_val, len(copy.groups.reasons)) == (7, 0.5, 0)
    assert len(engine.groups.reasons) == 1
