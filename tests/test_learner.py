"""A server that learns: its steps, its place in checkpoints, and what it takes back."""

from functools import partial

import pytest
import torch
from _helpers.resume import play
from _helpers.toy import assert_same, run, whole_state
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.learner import Learner
from pfl_lightning.methods import FedAvg
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.image import Snapshot

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def make(optimizer=SGD, **options):
    torch.manual_seed(0)
    return Learner(nn.Linear(2, 1), optimizer, **options)


def squares(learner, steps):
    """Objectives of which each depends on the step before."""
    inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    return [lambda: learner.network(inputs).square().mean()] * steps


def whole(learner):
    """Every number of a network and of its momentum."""
    moments = learner.optimizer.state_dict()["state"]
    kept = {f"{i} {name}": value for i, state in moments.items() for name, value in state.items()}
    return {name: value.tolist() for name, value in {**learner.network.state_dict(), **kept}.items()}


def test_steps_are_those_of_the_optimizer():
    learner = make(clip=0.5)
    plain = make().network
    velocity = [torch.zeros_like(p) for p in plain.parameters()]
    for _ in range(3):
        loss = plain(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).square().mean()
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for p, g, v in zip(plain.parameters(), gradients, velocity, strict=True):
            v.mul_(0.9).add_(g * min(1.0, float(0.5 / norm)) + 0.01 * p.detach())
            p.data.sub_(0.1 * v)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # neither reaches the steps
        learner.learn(squares(learner, 3), 0, "")
    assert_same(learner.network.state_dict(), plain.state_dict(), atol=1e-6)
    assert all(p.grad is None for p in learner.network.parameters())


def test_what_is_sent_carries_no_graph():
    learner = make()
    with torch.autocast("cpu", torch.bfloat16), learner.evaluating():
        found = learner.network(torch.ones(2))
    assert not found.requires_grad
    assert found.dtype == torch.float32


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.1)], ids=["SGD", "Adam"])
def test_a_loaded_learner_goes_on_as_the_saved_one(optimizer):
    whole, loaded = make(optimizer), make(optimizer)
    whole.learn(squares(whole, 2), 0, "")
    saved = whole.state_dict()
    loaded.load_state_dict(saved)
    whole.learn(squares(whole, 2), 1, "")
    loaded.learn(squares(loaded, 2), 1, "")
    assert_same(loaded.network.state_dict(), whole.network.state_dict())


def test_a_loaded_learner_has_the_rates_that_are_configured():
    whole, loaded = make(), make(partial(torch.optim.SGD, lr=0.5, momentum=0.2))
    assert whole.learn(squares(whole, 2), 0, "")
    loaded.load_state_dict(whole.state_dict())
    velocity = [whole.optimizer.state[p]["momentum_buffer"].clone() for p in whole.network.parameters()]
    before = [p.detach().clone() for p in loaded.network.parameters()]
    loss = loaded.network(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).square().mean()
    gradients = torch.autograd.grad(loss, list(loaded.network.parameters()))
    loaded.learn(squares(loaded, 1), 1, "")
    for p, start, v, g in zip(loaded.network.parameters(), before, velocity, gradients, strict=True):
        torch.testing.assert_close(p.detach(), start - 0.5 * (0.2 * v + g))


def test_a_result_that_is_not_finite_is_taken_back_with_the_momentum():
    learner, twin = make(), make()
    for one in (learner, twin):
        one.learn(squares(one, 2), 0, "")
    with pytest.warns(
        UserWarning,
        match="round 5: the server's network is kept as it was, since its new values are not finite; be kind",
    ):
        assert not learner.learn([lambda: learner.network.weight.sum() * torch.inf], 4, "be kind")
    for one in (learner, twin):
        one.learn(squares(one, 1), 5, "")
    assert_same(learner.network.state_dict(), twin.network.state_dict())


def test_half_precision_of_the_clients_does_not_reach_it():
    learner = make()
    learner.learn(squares(learner, 1), 0, "")
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    learner.to(torch.bfloat16)
    assert_same(learner.network.state_dict(), before)
    assert {state["momentum_buffer"].dtype for state in learner.optimizer.state.values()} == {torch.float32}
    learner.to(torch.float64)
    learner.learn([lambda: learner.network.weight.square().sum()], 1, "")
    assert {state["momentum_buffer"].dtype for state in learner.optimizer.state.values()} == {torch.float64}


FUSED = partial(SGD, fused=True)


@pytest.mark.parametrize("optimizer", [SGD, FUSED, partial(torch.optim.Adam, lr=0.1)], ids=["SGD", "fused", "Adam"])
@pytest.mark.parametrize("rounds", [0, 1], ids=["the first round", "the second round"])
def test_a_round_that_is_undone_undoes_its_steps(optimizer, rounds):
    learner, twin = make(optimizer), make(optimizer)
    for one in (learner, twin):
        one.learn(squares(one, rounds), 0, "")
    before = Snapshot(learner)
    learner.learn(squares(learner, 3), 1, "")
    before.restore()
    for one in (learner, twin):
        one.learn(squares(one, 1), 1, "")
    assert whole(learner) == whole(twin)


@pytest.mark.parametrize("optimizer", [SGD, FUSED], ids=["SGD", "fused"])
def test_steps_are_taken_back_twice_in_a_round(optimizer):
    """A copy that two share is as it was for both; one that is no longer what the network holds is not shared."""
    learner, twin = make(optimizer), make(optimizer)
    learner.learn(squares(learner, 2), 0, "")
    twin.learn(squares(twin, 2), 0, "")
    round_begins, at_first = Snapshot(learner), whole(learner)
    for _ in range(2):
        learner.learn(squares(learner, 1), 1, "")
        twin.learn(squares(twin, 1), 1, "")
        with pytest.warns(UserWarning, match="not finite"):
            assert not learner.learn([lambda: learner.network.weight.sum() * torch.inf], 1, "")
        assert whole(learner) == whole(twin)
    round_begins.restore()
    assert whole(learner) == at_first


def test_within_a_round_no_second_copy_is_made(monkeypatch):
    learner = make()
    learner.learn(squares(learner, 1), 0, "")
    round_begins, made = Snapshot(learner), []
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: made.append(tensor) or tensor.detach().add(0))
    learner.learn(squares(learner, 1), 1, "")
    assert made == []
    learner.learn(squares(learner, 1), 1, "")
    assert len(made) == len([*learner.network.parameters()]) * 2  # and the momentum
    del round_begins


# ------------------------------------------------------------------ in a federation


class Learning(FedAvg):
    """FedAvg whose server also fits a line to the number of samples that come."""

    def configure_aggregator(self, num_clients):
        return LearningAggregator(self, num_clients)


class LearningAggregator(AveragingAggregator):
    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.learner = Learner(nn.Linear(1, 1), partial(torch.optim.Adam, lr=0.1))
        self._sizes = []

    def receive(self, update):
        self._sizes.append(float(update.num_samples))
        super().receive(update)

    def aggregate(self):
        sizes, self._sizes = self._sizes, []
        line = self.learner.network
        steps = [lambda n=n: (line(torch.tensor([n])) - n).square().sum() for n in sizes]
        self.learner.learn(steps, 0, "")
        super().aggregate()


METHOD = partial(Learning, lr=0.05, epochs=1)


def test_kill_and_resume_gives_the_same_weights(tmp_path):
    whole = play(tmp_path / "whole", 4, METHOD)
    play(tmp_path / "parts", 2, METHOD)
    resumed = play(tmp_path / "parts", 4, METHOD, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    assert_same(resumed.server.learner.network.state_dict(), whole.server.learner.network.state_dict())
    saved = [torch.load(tmp_path / run / "last.ckpt", weights_only=True)["state_dict"] for run in ("whole", "parts")]
    states = [found["server.learner._extra_state"]["state"] for found in saved]
    for index, moments in states[0].items():
        assert float(moments["step"]) == 4 * 3  # three clients a round
        assert torch.equal(moments["exp_avg"], states[1][index]["exp_avg"])


def test_its_first_weights_are_drawn_by_the_runs_seed_alone():
    torch.manual_seed(1)
    first = run(METHOD, 1)
    torch.manual_seed(2)
    assert_same(run(METHOD, 1).server.learner.network.state_dict(), first.server.learner.network.state_dict())
    other = run(METHOD, 1, seed=3).server.learner.network
    assert not torch.equal(other.weight, first.server.learner.network.weight)


def test_an_optimizer_outside_of_it_is_noticed():
    class Forgetful(LearningAggregator):
        def __init__(self, client, num_clients):
            super().__init__(client, num_clients)
            self.weight = nn.Parameter(torch.ones(1))
            self.own = SGD([self.weight])

        def aggregate(self):
            super().aggregate()
            self.weight.grad = torch.ones(1)
            self.own.step()

    class Client(FedAvg):
        def configure_aggregator(self, num_clients):
            return Forgetful(self, num_clients)

    with pytest.raises(ConfigurationError, match=r"Forgetful.own.* changed in a round"):
        run(partial(Client, lr=0.05, epochs=1), 2)


def test_a_clip_that_is_none():
    with pytest.raises(ValueError, match="clip must be"):
        make(clip=0.0)
