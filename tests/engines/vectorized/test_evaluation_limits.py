"""Evaluations that cannot be vectorized, and those that need too much memory."""

import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from _helpers.engines import assert_scores_agree, evaluate, trained
from _helpers.toy import CLIENTS, linear_encoder, run, tiny_encoder

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized import evaluation
from pfl_lightning.engines.vectorized.phase import _Run
from pfl_lightning.methods import FedAvg, FedBABU, LocalOnly

# ---------------------------------------------------------------------- left to SequentialEngine


class Branches(FedAvg):
    def forward(self, inputs):
        if inputs.sum() > 1e9:
            raise AssertionError
        return super().forward(inputs)


class CallsItem(FedAvg):
    def classify(self, features):
        return super().classify(features) * (1 + 0 * features.sum().item())

    def loss_terms(self, features, labels):
        return {"cross_entropy": torch.nn.functional.cross_entropy(self.head(features), labels)}


class Random(FedAvg):
    def forward(self, inputs):
        return super().forward(inputs + torch.randn_like(inputs))


class DrawsByNumPy(FedAvg):
    def forward(self, inputs):
        return super().forward(inputs) * (1 + np.random.rand())  # noqa: NPY002


class Remembers(FedAvg):
    def forward(self, inputs):
        self.last = inputs
        return super().forward(inputs)


class Buffered(FedAvg):
    """Counts its passes in a buffer, and depends on it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes.add_(1)
        return super().forward(inputs) * self.passes


class Assigned(Buffered):
    def forward(self, inputs):
        self.passes = self.passes + 1
        return FedAvg.forward(self, inputs) * self.passes


REASONS = [
    (Branches, r"Branches.forward, .*test_evaluation_limits.py:\d+: if inputs.sum\(\) > 1e9:: branches on"),
    (CallsItem, r"CallsItem.forward, .*test_evaluation_limits.py:\d+: .*item\(\)\): calls .item\(\)"),
    (Random, "Random.forward, .*random"),
    (DrawsByNumPy, "an evaluation of DrawsByNumPy draws random numbers"),
    (Remembers, "Remembers changes the attribute 'last' in forward"),
    (Buffered, "Buffered.forward changes 'passes'"),
    (Assigned, "Assigned.forward changes 'passes'"),
]


@pytest.mark.parametrize(("method", "reason"), REASONS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("fine_tune", [None, "all"])
def test_a_forward_that_cannot_be_vectorized_says_why_once(method, reason, fine_tune, said):
    """And goes one by one, twice; the fine-tuning and the fits stay vectorized."""
    federation = trained(partial(method, lr=0.02, fine_tune=fine_tune))
    engine, results = VectorizedEngine(3, forward="vmap"), []
    for used in (engine, SequentialEngine()):
        results.append((evaluate(federation, used), evaluate(federation, used)))
    for got, expected in zip(*results, strict=True):
        assert_scores_agree(got, expected, atol=1e-5 if fine_tune else 0)
    (line,) = said()
    assert line.endswith("Its clients are evaluated one by one, as under SequentialEngine")
    assert re.search(reason, line), line
    assert not engine.fits.reasons
    assert not engine.evaluation.groups.reasons


class OwnScale(FedAvg):
    """An attribute that differs between clients, though not between the first and the last."""

    scale = 1.0

    def receive(self, broadcast):
        super().receive(broadcast)
        self.scale = 1.0 + 2 * (broadcast.client % 2)

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


def test_attributes_that_a_broadcast_sets_are_found(said):
    federation = trained(partial(OwnScale, lr=0.02))
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
        (Hooked, "Hooked overrides on_after_backward. Its clients are trained"),
        (Steps, "Steps.training_step, .* branches on data, .* Its clients are evaluated"),
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


def test_what_is_evaluated_together_on_a_cpu(stacked, monkeypatch):
    """Under "auto" the fine-tunings of small networks alone."""
    tuned = []

    def counted(self, *args, start=VectorizedEngine.train_stack):
        tuned.append(len(args[1]))
        return start(self, *args)

    monkeypatch.setattr(VectorizedEngine, "train_stack", counted)
    federation = trained(partial(FedBABU, lr=0.02))
    expected = evaluate(federation, SequentialEngine())
    for forward, small, together in (("auto", True, 1), ("auto", False, 0), ("vmap", True, 2)):
        tuned.clear()
        stacked.clear()
        monkeypatch.setattr("pfl_lightning.engines.vectorized.engine.SMALL", 50_000 if small else 1)
        assert_scores_agree(evaluate(federation, VectorizedEngine(forward=forward)), expected)
        assert tuned == [CLIENTS] * (together > 0)
        assert stacked == [CLIENTS] * (together > 1)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize(("most", "sizes", "lines"), [(3, [5, 3, 2], 1), (1, [5, 3, 2], 3)])
def test_an_out_of_memory_error_halves_the_group(most, sizes, lines, monkeypatch, said):
    found = []

    def limited(client, members, environment, start=evaluation.score_stack):
        found.append(len(members))
        if len(members) > most:
            raise torch.OutOfMemoryError("simulated")
        return start(client, members, environment)

    monkeypatch.setattr(evaluation, "score_stack", limited)
    federation = trained(partial(FedBABU, lr=0.02))
    engine = VectorizedEngine(forward="vmap")
    assert_scores_agree(evaluate(federation, engine), evaluate(federation, SequentialEngine()))
    assert found == sizes
    assert len(said()) == lines
    assert "5 clients evaluated at once need too much memory; going on with 3 at once" in said()[0]
    assert engine.fits.at_once == 32  # fits go on as they were
    found.clear()
    evaluate(federation, engine)
    assert found == ([3, 2] if most == 3 else [])


def test_an_out_of_memory_error_in_the_fine_tuning_halves_the_group(monkeypatch, said):
    train = _Run.train

    def limited(self, streams, *args):
        if len(streams) > 2:
            raise torch.OutOfMemoryError("simulated")
        return train(self, streams, *args)

    monkeypatch.setattr(_Run, "train", limited)
    federation = trained(partial(LocalOnly, lr=0.02, fine_tune="all"), encoder=[tiny_encoder, linear_encoder])
    assert_scores_agree(
        evaluate(federation, VectorizedEngine(forward="vmap")), evaluate(federation, SequentialEngine())
    )
    assert said() == ["VectorizedEngine: 3 clients evaluated at once need too much memory; going on with 2 at once"]


def test_the_engine_can_be_pickled():
    engine = VectorizedEngine(7, forward="vmap")
    evaluate(trained(Branches), engine)
    assert len(engine.evaluation.forward.reasons) == 1
    pickled = pickle.dumps(engine)
    assert b"_parameters" not in pickled  # modules stay where they are
    copy = pickle.loads(pickled)
    assert copy.clients_per_batch == 7
    assert not copy.evaluation.forward.reasons
    assert not copy.evaluation.groups.reasons


def test_clients_alone_are_left_to_the_base(monkeypatch):
    monkeypatch.setattr(evaluation.StackedEvaluation, "_evaluate_together", None)
    federation = trained(partial(LocalOnly, lr=0.02), encoder=[tiny_encoder, linear_encoder])
    got = evaluate(federation, VectorizedEngine(2, forward="vmap"))  # one client of each encoder in a chunk
    assert_scores_agree(got, evaluate(federation, SequentialEngine()), atol=0)
