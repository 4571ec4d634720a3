"""Evaluations that cannot be vectorized, and those that need too much memory."""

import pickle
import re
from functools import partial

import pytest
import torch
from _helpers.engines import assert_scores_agree, evaluate, trained
from _helpers.toy import CLIENTS, linear_encoder, run, tiny_encoder

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized import phase
from pfl_lightning.methods import FedAvg, FedBABU, LocalOnly

# ---------------------------------------------------------------------- left to SequentialEngine


class OwnScale(FedAvg):
    """An attribute that differs between clients, though not between the first and the last."""

    scale = 1.0

    def receive(self, broadcast):
        super().receive(broadcast)
        self.scale = 1.0 + 2 * (broadcast.client % 2)

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


def test_attributes_that_a_broadcast_sets_are_found(said):
    federation = trained(partial(OwnScale, lr=0.02, fine_tune="head"))
    results = [evaluate(federation, engine) for engine in (VectorizedEngine(forward="vmap"), SequentialEngine())]
    assert_scores_agree(*results, atol=0)
    (line,) = said()
    assert "OwnScale changes the attribute 'scale' in receive, before_evaluation or personalization_phases" in line


class Hooked(FedAvg):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Steps(FedAvg):
    """Branches on data while it is fine-tuned."""

    def loss_terms(self, features, labels):
        if self.phase.name == "fine_tune" and features.sum() > 1e9:
            raise AssertionError
        return super().loss_terms(features, labels)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Hooked, "Hooked overrides on_after_backward. Its clients run"),
        (Steps, "Steps.training_step, .* data-dependent .* Its clients run"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fine_tuning_that_cannot_be_vectorized_goes_one_by_one(method, reason, said):
    federation = trained(partial(method, lr=0.02, fine_tune="all"))
    engine = VectorizedEngine(forward="vmap")
    for _ in range(2):
        assert_scores_agree(evaluate(federation, engine), evaluate(federation, SequentialEngine()), atol=0)
    (line,) = said()
    assert re.search(f"{reason} one by one, as under SequentialEngine$", line), line


def test_a_bug_is_raised_as_it_is():
    class Broken(FedAvg):
        def classify(self, features):
            return self.head(features if self.training else features[:, :2])

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(Broken, engine=VectorizedEngine(forward="vmap"))


def test_what_is_fine_tuned_together_on_a_cpu(tuned, monkeypatch):
    """Under "auto" small networks alone."""
    federation = trained(partial(FedBABU, lr=0.02))
    expected = evaluate(federation, SequentialEngine())
    for forward, small, together in (("auto", True, True), ("auto", False, False), ("vmap", True, True)):
        tuned.clear()
        monkeypatch.setattr("pfl_lightning.engines.vectorized.engine.SMALL", 50_000 if small else 1)
        assert_scores_agree(evaluate(federation, VectorizedEngine(forward=forward)), expected)
        assert tuned == [CLIENTS] * together


# ---------------------------------------------------------------------- memory


def test_an_out_of_memory_error_in_the_fine_tuning_halves_the_group(monkeypatch, said):
    train = phase.train

    def limited(stack, step, optimizer, streams, *args):
        if len(streams) > 2:
            raise torch.OutOfMemoryError("simulated")
        return train(stack, step, optimizer, streams, *args)

    monkeypatch.setattr(phase, "train", limited)
    federation = trained(partial(LocalOnly, lr=0.02, fine_tune="all"), encoder=[tiny_encoder, linear_encoder])
    assert_scores_agree(
        evaluate(federation, VectorizedEngine(forward="vmap")), evaluate(federation, SequentialEngine())
    )
    assert said() == ["VectorizedEngine: 3 clients at once need too much memory; continuing with 2 at once"]


def test_the_engine_can_be_pickled():
    engine = VectorizedEngine(7, forward="vmap")
    evaluate(trained(partial(Steps, fine_tune="all")), engine)
    assert len(engine.groups.reasons) == 1
    pickled = pickle.dumps(engine)
    assert b"_parameters" not in pickled  # modules stay where they are
    copy = pickle.loads(pickled)
    assert copy.clients_per_batch == 7
    assert not copy.groups.reasons
