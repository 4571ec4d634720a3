"""Comparison of VectorizedEngine with SequentialEngine."""

import pytest
import torch

from _helpers.toy import Toy, assert_same, run, whole_state
from pfl_lightning import SequentialEngine, VectorizedEngine

UNEQUAL = {"validation": [5, 0, 9, 1, 20], "test": [8, 8, 3, 16, 40]}
"""Samples of each client, which the toy data gives in pieces of 7."""


def assert_agree(fit, rounds=1, cohorts=([1, 3, 2],), precision="64-true", **options):
    """Train under both engines, compare states and losses; returns what VectorizedEngine said."""
    engines = VectorizedEngine(forward="vmap"), SequentialEngine()
    options |= {"cohorts": cohorts, "precision": precision}
    got, expected = (run(fit, rounds, engine=engine, **options) for engine in engines)
    assert_same(whole_state(got), whole_state(expected), atol=1e-9 if precision == "64-true" else 1e-6)
    losses = [{k: float(v) for k, v in f.trainer.callback_metrics.items() if "train/" in k} for f in (got, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    return " ".join(got.engine._warned)


def trained(fit, **options):
    """Train under SequentialEngine, without evaluations."""
    return run(fit, limit_val_batches=0, **options)


def evaluate(federation, engine, clients=None):
    """Evaluate clients on both parts, as the federation lets its own engine do, in the Trainer's precision."""
    chosen = range(federation.num_clients) if clients is None else clients
    tasks = (
        (
            federation.clients.model_of(client),
            federation.evaluation_task(client, validation=True, test=True),
        )
        for client in chosen
    )
    with torch.no_grad(), federation.trainer.precision_plugin.val_step_context():
        return list(engine.evaluate(tasks, federation.environment))


def assert_scores_agree(got, expected, atol=1e-5):
    """Compare evaluations client by client."""
    assert [result.client for result in got] == [result.client for result in expected]
    assert got
    for one, other in zip(got, expected, strict=True):
        for part in ("validation", "test"):
            score, wanted = getattr(one, part), getattr(other, part)
            assert (score is None) == (wanted is None)
            if wanted is not None:
                assert (score.accuracy, score.num_samples) == (wanted.accuracy, wanted.num_samples)
                assert score.loss == pytest.approx(wanted.loss, abs=atol, nan_ok=True)
        assert str(one.finetune_failures) == str(other.finetune_failures)


def assert_evaluations_agree(fit, *, atol=1e-5, data=None, engine=None, **options):
    """Evaluate a federation under both engines; nothing may have fallen back. Returns the results."""
    federation, settings = trained(fit, data=data or Toy(**UNEQUAL), **options), engine or {}
    vectorized = VectorizedEngine(forward="vmap", **settings)
    got = evaluate(federation, vectorized)
    assert not vectorized._warned
    assert not vectorized.groups.reasons
    assert_scores_agree(got, evaluate(federation, SequentialEngine(**settings)), atol)
    return got
