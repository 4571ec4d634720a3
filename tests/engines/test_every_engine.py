"""Every method under every engine: the same states, scores and losses, and one engine goes on where another stopped."""

from functools import lru_cache, partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.methods import under
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    dropout_encoder,
    for_toy,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.encoders import WithProjector
from pfl_lightning.methods import DualFed, FedAvg, FedBN, FedPAC, FedPer, FedProto, FedRep

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")

COHORTS = [[0, 2, 3], [1, 2, 4]]
# What makes the engine, what it is compared with, and how far they may be apart.
ENGINES = {
    "TrainerEngine": (lambda patch: TrainerEngine(), "without a cache", 0.0),
    "VectorizedEngine": (lambda patch: VectorizedEngine(forward="vmap"), "plain", 1e-5),
    "RayEngine, one worker": (lambda patch: fake_ray_engine(patch, 1)[0], "plain", 0.0),
    "RayEngine, three workers": (lambda patch: fake_ray_engine(patch, 3)[0], "plain", 0.0),
    "ProcessEngine": (lambda patch: forked_process_engine(patch, 2), "plain", 0.0),
    "RayEngine of VectorizedEngine": (
        lambda patch: fake_ray_engine(patch, 2, engine=VectorizedEngine(2, forward="vmap"))[0],
        "vectorized",
        0.0,
    ),
}
OFTEN = ("TrainerEngine", "VectorizedEngine")
"""Engines under which every method is tried by default, since it can hinder them; the core of methods under all."""
REFERENCES = {
    "plain": SequentialEngine,
    "without a cache": lambda: SequentialEngine(cache_features=False),
    "vectorized": lambda: VectorizedEngine(2, forward="vmap"),
}

ENGINE = pytest.mark.parametrize(("make", "reference", "atol"), ENGINES.values(), ids=ENGINES)


@lru_cache(maxsize=8)
def expected_of(method, reference, precision):
    """What a method gives under a reference, which several engines are compared with."""
    fit = for_toy(method, lr=0.01, epochs=1)
    return run(fit, 2, cohorts=COHORTS, engine=REFERENCES[reference](), precision=precision)


@lru_cache(maxsize=8)
def expected_of_case(case, reference):
    """What a case gives under a reference."""
    fit, options = CASES[case]
    return run(fit, 2, engine=REFERENCES[reference](), **run_options(options))


def assert_alike(got, expected, atol):
    assert_same(whole_state(got), whole_state(expected), atol=atol)
    for scores, others in (
        (got.test_scores, expected.test_scores),
        (got.validation_scores, expected.validation_scores),
    ):
        assert list(scores) == list(others) == list(range(CLIENTS))
        for client, score in others.items():
            assert scores[client].loss == pytest.approx(score.loss, abs=100 * atol, nan_ok=True)
            assert scores[client].num_samples == score.num_samples
    metrics = [{k: float(v) for k, v in run.trainer.callback_metrics.items() if "/" in k} for run in (got, expected)]
    assert metrics[0].keys() == metrics[1].keys()
    losses = [{k: v for k, v in found.items() if "accuracy" not in k} for found in metrics]
    assert losses[0] == pytest.approx(losses[1], abs=100 * atol)


@pytest.mark.repeated
@pytest.mark.parametrize(("method", "make", "reference", "atol"), under(ENGINES, OFTEN))
def test_engines_agree(method, make, reference, atol, monkeypatch):
    precision = "32-true"
    if method.__name__ == "DualFed" and atol > 0:  # whose lambda of 40 multiplies rounding
        precision, atol = "64-true", 1e-8
    fit = for_toy(method, lr=0.01, epochs=1)
    got = run(fit, 2, cohorts=COHORTS, engine=make(monkeypatch), precision=precision)
    assert_alike(got, expected_of(method, reference, precision), atol)


CASES = {
    "batch norm": (partial(FedBN, lr=0.05, epochs=1), {"encoder": normed_encoder, "batch_size": 9}),
    "own statistics": (for_toy(DualFed, lr=0.01, contrastive=1.0), {"encoder": normed_encoder, "batch_size": 9}),
    "own statistics of others": (
        partial(FedAvg, lr=0.01, epochs=1, batch_norm="own_statistics"),
        {"encoder": partial(WithProjector, encoder=tiny_encoder, hidden=6), "batch_size": 9},
    ),
    "batch statistics of frozen parts": (
        for_toy(DualFed, lr=0.01, contrastive=1.0, stage2_mode="training", projector_batch_norm=True),
        {"encoder": normed_encoder, "batch_size": 9, "precision": "64-true"},  # it multiplies rounding
    ),
    "two encoders": (partial(FedProto, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "fine-tuning": (partial(FedAvg, lr=0.05, epochs=1, fine_tune="all"), {}),
    "trained models": (partial(FedAvg, lr=0.05, epochs=1, eval_model="trained"), {}),
    "schedule": (
        partial(FedRep, epochs=1, lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)),
        {},
    ),
    "one sample": (partial(FedAvg, lr=0.05, epochs=1), {"labels": [[0], [1, 2, 3], [0] * 9, [2] * 4, [4] * 5]}),
}


def run_options(options):
    data = {key: options[key] for key in ("batch_size", "labels") if key in options}
    found = {"encoder": options.get("encoder", tiny_encoder), "cohorts": COHORTS, "data": Toy(**data)}
    return found | {key: options[key] for key in ("precision",) if key in options}


@pytest.mark.repeated
@ENGINE
@pytest.mark.parametrize("case", CASES)
def test_engines_agree_whatever_the_clients_have(case, make, reference, atol, monkeypatch):
    fit, options = CASES[case]
    got = run(fit, 2, engine=make(monkeypatch), **run_options(options))
    assert_alike(got, expected_of_case(case, reference), atol)


@pytest.mark.repeated
@ENGINE
@pytest.mark.parametrize(
    ("fit", "encoder"),
    [
        (partial(FedPAC, lr=0.05, epochs=1, fine_tune="head"), tiny_encoder),
        (partial(FedAvg, lr=0.05, epochs=1, eval_model="trained"), dropout_encoder),
        (partial(FedPer, lr=0.01, epochs=1, batch_norm="own_statistics"), normed_encoder),
        (for_toy(DualFed, lr=0.01, contrastive=1.0, stage2_mode="training"), normed_encoder),
    ],
    ids=["FedPAC", "dropout", "own statistics", "batch statistics of frozen parts"],
)
def test_stop_and_resume_is_exact_under_each_engine(fit, encoder, tmp_path, make, reference, atol, monkeypatch):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options = {"cohorts": COHORTS, "encoder": encoder, "data": Toy(batch_size=9)}
    whole = run(fit, 3, engine=make(monkeypatch), **options)
    options |= {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    run(fit, 2, engine=make(monkeypatch), callbacks=[saver], **options)
    torch.manual_seed(5)
    resumed = run(fit, 3, engine=make(monkeypatch), ckpt_path=str(tmp_path / "epoch=1.ckpt"), **options)
    assert_same(whole_state(resumed), whole_state(whole))
    assert resumed.test_scores == whole.test_scores


@pytest.fixture(scope="module")
def whole():
    """A run without a stop."""
    return run(partial(FedPAC, lr=0.01, epochs=1), 3, engine=SequentialEngine(), cohorts=COHORTS)


@pytest.mark.repeated
@pytest.mark.parametrize("first", ENGINES, ids=ENGINES)
@pytest.mark.parametrize("then", ["SequentialEngine", "VectorizedEngine", "RayEngine, three workers"])
def test_a_run_goes_on_under_another_engine(tmp_path, first, then, monkeypatch, whole):
    fit = partial(FedPAC, lr=0.01, epochs=1)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)

    def make(name):
        return SequentialEngine() if name == "SequentialEngine" else ENGINES[name][0](monkeypatch)

    options = {"cohorts": COHORTS, "enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    run(fit, 1, engine=make(first), callbacks=[saver], **options)
    resumed = run(fit, 3, engine=make(then), ckpt_path=str(tmp_path / "epoch=0.ckpt"), **options)
    assert_alike(resumed, whole, 1e-5)
