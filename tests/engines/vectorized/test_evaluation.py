"""Clients that are evaluated together get the scores that SequentialEngine gives them one by one."""

from functools import partial

import pytest
import torch
from _helpers.engines import UNEQUAL, assert_evaluations_agree, assert_scores_agree, evaluate, trained
from _helpers.methods import EVERY_METHOD
from _helpers.plain import score
from _helpers.toy import CLIENTS, Toy, for_toy, linear_encoder, normed_encoder, run, tiny_encoder

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.methods import FedAvg, FedBABU, FedClassAvg, FedFomo, FedProto, LGFedAvg, LocalOnly
from pfl_lightning.metrics import EvalMetrics

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")


@EVERY_METHOD
def test_every_method_agrees(method):
    parts = {**UNEQUAL, "validation": [5, 2, 9, 1, 20]} if method is FedFomo else UNEQUAL  # it needs one of each client
    data = Toy(batch_size=9, **parts)
    assert_evaluations_agree(for_toy(method, lr=0.01, epochs=1), encoder=normed_encoder, data=data)


@pytest.mark.parametrize("encoder", [tiny_encoder, normed_encoder])
@pytest.mark.parametrize("fine_tune", ["head", "all"])
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "fresh"])
def test_fine_tuning_agrees(fine_tune, cache, encoder):
    """Clients have 1 to 2 batches an epoch, and are tuned from weights that differ."""
    fit = partial(LGFedAvg, fine_tune_epochs=3, fine_tune_lr=0.05)
    options = {"encoder": encoder, "data": Toy(batch_size=9, **UNEQUAL), "engine": {"cache_features": cache}}
    got = assert_evaluations_agree(partial(fit, fine_tune=fine_tune), **options)
    untuned = assert_evaluations_agree(fit, **options)
    assert all(one.test.loss != other.test.loss for one, other in zip(got, untuned, strict=True))


def test_schedules_and_clipping_of_a_fine_tuning_agree():
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    assert_evaluations_agree(partial(FedBABU, lr=0.1, lr_scheduler=scheduler), engine={"gradient_clip_val": 0.1})


@pytest.mark.parametrize("eval_model", ["trained", "aggregated"])
@pytest.mark.parametrize("method", [FedClassAvg, LGFedAvg, FedAvg], ids=lambda method: method.__name__)
def test_either_model_of_a_client_agrees(method, eval_model):
    """Client 4 has not trained: it has no trained model of its own."""
    assert_evaluations_agree(partial(method, lr=0.02, eval_model=eval_model, fine_tune="head"), cohorts=[range(4)])


@pytest.mark.parametrize("rounds", [1, 2])
def test_scores_of_a_fit_agree(rounds):
    """Two architectures, taken in turn, in groups that do not end with the clients."""
    options = {"encoder": [tiny_encoder, linear_encoder], "data": Toy(**UNEQUAL)}
    fit = partial(FedProto, lr=0.02, epochs=1, fine_tune="all")
    engines = VectorizedEngine(4, forward="vmap"), SequentialEngine()
    got, expected = (run(fit, rounds, engine=engine, **options) for engine in engines)
    for scores, wanted in (
        (got.validation_scores, expected.validation_scores),
        (got.test_scores, expected.test_scores),
    ):
        assert list(scores) == list(wanted)
        assert {c: s.accuracy for c, s in scores.items()} == {c: s.accuracy for c, s in wanted.items()}
        assert [s.loss for s in scores.values()] == pytest.approx([s.loss for s in wanted.values()], abs=1e-4)
    assert list(got.test_scores) == list(range(CLIENTS))
    assert 1 not in got.validation_scores


@pytest.mark.parametrize("limit", [2, 3])
def test_fewer_clients_agree(limit):
    options = {"limit_val_batches": limit, "cohorts": [range(CLIENTS)]}
    engines = VectorizedEngine(forward="vmap"), SequentialEngine()
    got, expected = (run(partial(FedBABU, lr=0.02), engine=engine, **options) for engine in engines)
    assert list(got.test_scores) == list(range(limit))
    for client, wanted in expected.test_scores.items():
        assert got.test_scores[client].accuracy == wanted.accuracy
        assert got.test_scores[client].loss == pytest.approx(wanted.loss, abs=1e-5)


def test_scores_are_those_of_the_clients_own_models():
    """Evaluation by hand, on samples that no loader has seen."""
    data = Toy(**UNEQUAL)
    federation = trained(partial(LocalOnly, lr=0.05), data=data)
    for result in evaluate(federation, VectorizedEngine(forward="vmap")):
        model = federation.client_model(result.client)
        for part, found in (("validation", result.validation), ("test", result.test)):
            if found is None:
                assert len(data.tensors(result.client, part)[1]) == 0
            else:
                assert (found.accuracy, found.loss) == pytest.approx(score(model, data, result.client, part), abs=1e-5)


def test_small_groups_agree(tuned):
    """The client that is left alone goes as under SequentialEngine."""
    federation = trained(FedBABU, data=Toy(**UNEQUAL))
    expected = evaluate(federation, SequentialEngine())
    for group, sizes in ((2, [2, 2]), (3, [3, 2]), (4, [4])):
        tuned.clear()
        assert_scores_agree(evaluate(federation, VectorizedEngine(group, forward="vmap")), expected)
        assert tuned == sizes


class OwnScore(FedAvg):
    """Evaluates by a rule of its own."""

    def evaluate(self, part, stage, data, environment, make_trainer):
        return EvalMetrics(0.125, 0.5, len(part))


def test_an_evaluation_of_the_methods_own_is_used():
    score = run(OwnScore, engine=VectorizedEngine(forward="vmap")).test_scores[0]
    assert (score.accuracy, score.loss) == (0.125, 0.5)
