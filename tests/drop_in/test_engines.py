"""Engines other than SequentialEngine and TrainerEngine.

The tests take over 10 s: a real worker process is started.
"""

import pytest
from _helpers.project import run_project
from _helpers.toy import assert_same

from pfl_lightning import RayEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.methods import FedProx

ENGINES = {
    "vectorized": (lambda: VectorizedEngine(forward="vmap"), SequentialEngine),
    "trainer in a worker": (lambda: RayEngine(workers=1, start_timeout=400.0, engine=TrainerEngine()), TrainerEngine),
}


@pytest.mark.parametrize(("engine", "like"), ENGINES.values(), ids=ENGINES)
def test_other_engines_train_it_alike(engine, like):
    options = {"num_clients": 2, "mu": 0.1}
    expected, first = run_project(FedProx, engine=like(), **options)
    got, second = run_project(FedProx, engine=engine(), **options)
    assert second.callback_metrics["train_loss"] == first.callback_metrics["train_loss"]
    assert_same(dict(got.global_model().state_dict()), dict(expected.global_model().state_dict()))
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].logged == score.logged
        assert got.test_scores[client].accuracy == score.accuracy
