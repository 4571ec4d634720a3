"""Scores that are NaN are right for no class, under every engine, and one client's loss is not everybody's."""

import math
from functools import partial

import pytest
import torch
from _helpers.project import Data, run_project
from _helpers.toy import Toy, quiet_trainer, tiny_encoder

from pfl_lightning import FederatedLoop, Federation, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.datamodules import Samples
from pfl_lightning.functional.numerics import hits
from pfl_lightning.methods import FedAvg

LOST = 1  # the client


class Lost(Toy):
    """The test inputs of a client are NaN."""

    def load(self) -> Samples:
        samples = super().load()
        inputs = samples.test_inputs.clone()
        inputs[torch.from_numpy(self.partition.lists[2][LOST])] = math.nan
        return Samples(samples.train_inputs, samples.train_targets, samples.class_names, inputs, samples.test_targets)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])
def test_a_client_whose_scores_are_nan_has_no_sample_right(engine):
    federation = Federation(partial(FedAvg, lr=0.3, epochs=1), tiny_encoder, engine=engine(), seed=1)
    trainer = quiet_trainer(1, FederatedLoop())
    with pytest.warns(UserWarning, match=r"the loss of client 1 is NaN, and test_loss/mean is that of the other"):
        trainer.fit(federation, datamodule=Lost())
    scores = federation.test_scores
    assert scores[LOST].accuracy == 0
    assert math.isnan(scores[LOST].loss)
    others = [score for client, score in scores.items() if client != LOST]
    mean = sum(score.loss for score in others) / len(others)
    assert float(trainer.callback_metrics["test_loss/mean"]) == pytest.approx(mean)
    assert all(score.accuracy > 0 for score in others)


def test_so_has_a_project():
    data = Data(Lost())
    federation, _ = run_project(FedAvg, data=data)
    assert federation.test_scores[LOST].accuracy == 0
    assert federation.test_scores[0].accuracy > 0


def test_minus_infinity_is_a_score():
    scores = torch.tensor([[-math.inf, 0.0], [0.0, math.inf], [math.nan, 1.0]])
    assert hits(scores, torch.ones(3).long()).tolist() == [True, True, False]
