"""Engines other than FabricFit and TrainerFit."""

import pytest
from _helpers.project import run_project
from _helpers.toy import assert_same

from pfl_lightning import FabricFit, RayFit, TrainerFit, VectorizedFit
from pfl_lightning.methods import FedProx

ENGINES = {
    "vectorized": (lambda: VectorizedFit(forward="vmap"), FabricFit),
    "trainer in a worker": (lambda: RayFit(workers=1, engine=TrainerFit()), TrainerFit),
}


@pytest.mark.parametrize(("engine", "like"), ENGINES.values(), ids=ENGINES)
def test_other_engines_train_it_alike(engine, like):
    options = {"num_clients": 2, "mu": 0.1}
    expected, first = run_project(FedProx, local_fit=like(), **options)
    got, second = run_project(FedProx, local_fit=engine(), **options)
    assert second.callback_metrics["train_loss"] == first.callback_metrics["train_loss"]
    assert_same(dict(got.global_model().state_dict()), dict(expected.global_model().state_dict()))
    for client, score in expected.test_scores.items():
        assert got.test_scores[client].logged == score.logged
        assert got.test_scores[client].accuracy == score.accuracy
