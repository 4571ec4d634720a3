"""A client's draws from Python's and NumPy's generators are seeded: a resumed run is the uninterrupted one."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import assert_same, run, whole_state

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.methods import FedAvg

ENGINES = {
    "sequential": lambda _: SequentialEngine(),
    "trainer": lambda _: TrainerEngine(),
    "vmap": lambda _: VectorizedEngine(forward="vmap"),
    "ray": lambda monkeypatch: fake_ray_engine(monkeypatch)[0],
}


class Draws(FedAvg):
    """Weights its loss by draws, in fits and in the fine-tuning before an evaluation."""

    def loss_terms(self, features, labels):
        weight = random.random() + np.random.rand()  # noqa: NPY002
        return {"cross_entropy": weight * super().loss_terms(features, labels)["cross_entropy"]}


def fitted(engine, seed, rounds, path=None, save=None):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    federation = run(partial(Draws, lr=0.05, epochs=1, fine_tune="all"), rounds, engine=engine, ckpt_path=path)
    if save is not None:
        federation.trainer.save_checkpoint(save)
    return whole_state(federation), {client: score.loss for client, score in federation.test_scores.items()}


@pytest.mark.parametrize("make_engine", ENGINES.values(), ids=ENGINES)
def test_a_resumed_run_draws_the_same(make_engine, monkeypatch, tmp_path):
    whole = fitted(make_engine(monkeypatch), 1, 2)
    fitted(make_engine(monkeypatch), 2, 1, save=tmp_path / "one.ckpt")
    resumed = fitted(make_engine(monkeypatch), 3, 2, path=str(tmp_path / "one.ckpt"))
    assert_same(resumed[0], whole[0], atol=0)
    assert resumed[1] == whole[1]


class DrawsTwice(FedAvg):
    """Draws before its fit, and again for its update."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("drawn", torch.zeros(2, 3))

    def _draw(self):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])  # noqa: NPY002

    def before_fit(self, context):
        return self._draw()

    def make_update(self, context, before):
        self.drawn.copy_(torch.stack([before, self._draw()]))
        return super().make_update(context, before)


def test_an_update_goes_on_with_the_draws_before_the_fit():
    got, want = (run(DrawsTwice, engine=engine) for engine in (VectorizedEngine(forward="vmap"), SequentialEngine()))
    for client in range(5):
        drawn = got.personal.get(client)["drawn"]
        assert torch.equal(drawn, want.personal.get(client)["drawn"])
        assert not (drawn[0] == drawn[1]).any()
