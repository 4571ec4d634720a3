"""Samples without labels: they train the methods that need no labels, and reach nothing else."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.methods import often
from _helpers.plain_calibre import PlainCalibre
from _helpers.resume import play
from _helpers.toy import CLIENTS, SMALL_SIMCLR, Toy, assert_same, for_toy, quiet_trainer, run, whole_state
from _helpers.views import ToyViews, WithUnlabeled, flat_encoder

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import METHODS, PFLSSL, Calibre, FedEMA
from pfl_lightning.phases import Personalization
from pfl_lightning.self_supervised import MoCoV2

COHORTS = [[0, 2, 3], [1, 2]]
TAKE = (PFLSSL, Calibre, FedEMA)


def play_rounds(fit, data=None, rounds=2, **options):
    options = {"cohorts": COHORTS, "encoder": flat_encoder, "precision": "64-true"} | options
    return run(fit, rounds, data=data or WithUnlabeled(), **options)


RESTATED = {
    "PFLSSL": (partial(PFLSSL, objective=SMALL_SIMCLR), {"alpha_n": 0.0, "alpha_p": 0.0, "by_divergence": False}),
    "Calibre": (partial(Calibre, objective=SMALL_SIMCLR, clusters=3), {}),
}


@pytest.mark.parametrize(("fit", "restated"), RESTATED.values(), ids=RESTATED)
def test_two_rounds_equal_the_restatement_on_all_samples(fit, restated):
    """The batches, the weights by samples or by divergence: of samples with and without labels together."""
    data = WithUnlabeled()
    federation = play_rounds(partial(fit, lr=0.05, epochs=2), data)
    plain = PlainCalibre(data, 2, 0.05, **restated)
    for round, cohort in enumerate(COHORTS):
        plain.play(round, cohort)
    sent = federation.server.broadcast(0, 2).weights
    got = {name.replace("objective.projector.layers", "projector"): tensor for name, tensor in sent.items()}
    assert_same(got, plain.shared(), atol=1e-7)
    without = play_rounds(partial(fit, lr=0.05, epochs=2), ToyViews()).server.broadcast(0, 2).weights
    assert not torch.equal(without["encoder.1.weight"], sent["encoder.1.weight"])


def test_a_memory_bank_is_as_large_as_all_samples_allow():
    data = WithUnlabeled()
    data.setup()
    labeled = min(len(data.client_data(client).train) for client in range(CLIENTS))
    objective = partial(MoCoV2, hidden=8, out=4, bank=labeled + 1)
    play_rounds(partial(PFLSSL, objective=objective, lr=0.05, epochs=1), data, 1)
    with pytest.raises(ConfigurationError, match=f"larger than the {labeled} training samples"):
        play_rounds(partial(PFLSSL, objective=objective, lr=0.05, epochs=1), ToyViews(), 1)


def counting(base, seen):
    """The method; ``seen`` takes for each client the labels of all its batches, and the samples in its update."""

    class Counting(base):
        def before_fit(self, context):
            self.now = context.client
            return super().before_fit(context)

        def training_step(self, batch, batch_idx):
            seen.setdefault(self.now, []).extend(batch[1].tolist())
            return super().training_step(batch, batch_idx)

        def make_update(self, context, before):
            update = super().make_update(context, before)
            seen[f"samples of {context.client}"] = update.num_samples
            return update

    return Counting


@pytest.mark.parametrize("method", TAKE)
def test_every_epoch_has_each_sample_once_and_novel_clients_have_none(method):
    seen, data = {}, WithUnlabeled(novel_clients=2)
    play_rounds(for_toy(counting(method, seen), epochs=2), data, 1, loop=FederatedLoop())
    further = []
    for client in data.participating:
        _, labels = data.tensors(client)
        assert sorted(seen[client]) == sorted(2 * labels.tolist())
        assert seen[f"samples of {client}"] == len(labels)
        further.append(int((labels == -1).sum()))
    assert sorted(further) == [7, 8, 8]
    assert not set(data.novel) & seen.keys()
    assert all(len(data.client_data(client).unlabeled) == 0 for client in data.novel)


def test_who_takes_them():
    assert {method for method in METHODS if method.uses_unlabeled_data} == set(TAKE)


@pytest.mark.parametrize("method", often(m for m in METHODS if not m.uses_unlabeled_data), ids=lambda m: m.__name__)
def test_other_methods_train_as_without(method):
    fit = for_toy(method, lr=0.02, epochs=1)
    options = {"encoder": flat_encoder, "cohorts": [[0, 1, 2]]}
    found, expected = run(fit, data=WithUnlabeled(), **options), run(fit, data=ToyViews(), **options)
    assert_same(whole_state(found), whole_state(expected))
    assert found.test_scores == expected.test_scores


class Copies(WithUnlabeled):
    """The samples without labels are those of the tests: as neighbors, they would be the nearest."""

    def load(self):
        samples = ToyViews.load(self)
        return dataclasses.replace(samples, unlabeled_inputs=samples.test_inputs)


def test_the_nearest_neighbors_are_samples_with_labels():
    data = Copies()
    federation = play_rounds(for_toy(PFLSSL, lr=0.02, epochs=1), data, 1, cohorts=[range(CLIENTS)])
    for client in range(CLIENTS):
        encoder = federation.client_model(client).encoder
        known, classes = Toy.tensors(data, client)
        tests, truth = Toy.tensors(data, client, "test")
        near = torch.cdist(*(torch.nn.functional.normalize(encoder(x.double())) for x in (tests, known))).argmin(1)
        right = float((classes[near] == truth).double().mean())
        assert federation.test_scores[client].accuracy == pytest.approx(right)
    assert any(len(data.client_data(client).unlabeled) > 0 for client in range(CLIENTS))


def engines(monkeypatch):
    return {
        "SequentialEngine": SequentialEngine(),
        "TrainerEngine": TrainerEngine(),
        "RayEngine": fake_ray_engine(monkeypatch, 2)[0],
        "VectorizedEngine": VectorizedEngine(forward="vmap"),
    }


ENGINES = ["SequentialEngine", "TrainerEngine", "RayEngine", "VectorizedEngine"]


@pytest.mark.repeated
@pytest.mark.parametrize("train", ["linear", "head", "all"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_personalization_is_that_without_them(train, engine, monkeypatch):
    federation = play_rounds(for_toy(Calibre, lr=0.02, epochs=1), rounds=1, precision="32-true")
    federation.engine = engines(monkeypatch)[engine]
    scores = []
    for data in (WithUnlabeled(), ToyViews()):
        with federation.personalized(Personalization(train, epochs=2, lr=0.05, batch_size=6)):
            quiet_trainer(1).test(federation, data, verbose=False)
        scores.append(dict(federation.test_scores))
    assert len(scores[0]) == CLIENTS
    assert scores[0] == scores[1]


@pytest.mark.parametrize("engine", ["SequentialEngine", "RayEngine", "VectorizedEngine"])
def test_a_fine_tuning_before_an_evaluation_is_that_without_them(engine, monkeypatch):
    """Labels of -1 would be refused by the cross entropy."""
    fit = for_toy(PFLSSL, lr=1e-12, weight_decay=0.0, epochs=1, fine_tune="head", fine_tune_lr=0.1)
    found, expected = (
        play_rounds(fit, data, 1, engine=engines(monkeypatch)[engine], cohorts=[range(CLIENTS)])
        for data in (WithUnlabeled(), ToyViews())
    )
    losses = [[score.loss for score in federation.test_scores.values()] for federation in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.repeated
@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("method", TAKE)
def test_engines_agree(method, engine, monkeypatch):
    tolerance = 1e-8 if "Vectorized" in engine else 0.0
    fit, engine = for_toy(method, lr=0.02, epochs=2), engines(monkeypatch)[engine]
    got, expected = play_rounds(fit, engine=engine), play_rounds(fit, engine=SequentialEngine())
    assert_same(whole_state(got), whole_state(expected), atol=tolerance)
    assert not getattr(engine, "_warned", None)


@pytest.mark.parametrize("method", TAKE)
def test_stop_and_resume_is_exact(tmp_path, method):
    fit, options = for_toy(method, lr=0.02, epochs=1), {"encoder": flat_encoder, "cohort": 3}
    whole = play(tmp_path / "whole", 3, fit, data=WithUnlabeled(), **options)
    play(tmp_path / "parts", 1, fit, data=WithUnlabeled(), **options)
    torch.manual_seed(5)
    path = str(tmp_path / "parts" / "last.ckpt")
    resumed = play(tmp_path / "parts", 3, fit, data=WithUnlabeled(), ckpt_path=path, **options)
    assert_same(whole_state(resumed), whole_state(whole))


class WithAHead(PFLSSL):
    """Fits its head within the local fit, on plain batches."""

    def phases(self):
        return (*super().phases(), Phase("the head", ("head.*",), 2, lr=0.1, plain=True, losses=("cross_entropy",)))


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_phase_of_plain_batches_has_labels(engine, monkeypatch):
    engine = engines(monkeypatch)[engine]
    got, expected = (
        play_rounds(for_toy(WithAHead, lr=0.02, epochs=1), engine=fit, rounds=1) for fit in (engine, SequentialEngine())
    )
    assert_same(whole_state(got), whole_state(expected), atol=0.0 if engine == "RayEngine" else 1e-8)
    assert not getattr(engine, "_warned", None)


def test_in_such_a_phase_each_labeled_sample_comes_once_an_epoch():
    seen = {}

    class Watched(counting(WithAHead, seen)):
        def steps_on_features(self):
            return False

    data = WithUnlabeled()
    play_rounds(for_toy(Watched, epochs=1), data, 1)
    _, labels = data.tensors(0)
    once = labels.tolist()
    assert sorted(seen[0][: len(once)]) == sorted(once)
    assert sorted(seen[0][len(once) :]) == sorted(2 * data.labels[0])
