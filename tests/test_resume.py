"""A run that stops and resumes goes on as if it had not stopped: every tensor, every number, bit by bit."""

import csv
import itertools
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from _helpers.methods import CORE, crossed
from _helpers.resume import play
from _helpers.toy import (
    WEIGHTS_ONLY,
    Toy,
    assert_same,
    dropout_encoder,
    for_toy,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
    wide_encoder,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import Federation, TrainerEngine
from pfl_lightning.methods import (
    APFL,
    APPLE,
    CFL,
    DCPFL,
    FD,
    FML,
    GPFL,
    MOON,
    PFLSSL,
    SCAFFOLD,
    Calibre,
    DualFed,
    FedAdagrad,
    FedAdam,
    FedALA,
    FedAMP,
    FedAS,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedClassAvg,
    FedCM,
    FedCP,
    FedDBE,
    FedDyn,
    FedEM,
    FedEMA,
    FedETF,
    FedFomo,
    FedGH,
    FedKD,
    FedLC,
    FedMD,
    FedMTL,
    FedNova,
    FedNTD,
    FedPAC,
    FedPer,
    FedPHP,
    FedProto,
    FedRep,
    FedRoD,
    FedTGP,
    FedYogi,
    HypCluster,
    KNNPer,
    KTpFL,
    LocalOnly,
    PerFedAvg,
    PFedFDA,
    PFedHN,
    PFedMe,
    PFedSim,
    SphereFed,
)


def last_checkpoint(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)


def flat(value, path=""):
    """Every leaf of a checkpoint with its path; paths of files, times and names of objects are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("seconds", "dirpath", "best_model_path", "last_model_path", "kth_best_model_path"):
                yield from flat(inner, f"{path}/{_without_folder(key)}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}/{index}")
    else:
        yield path, value


def _without_folder(key):
    return Path(key).name if isinstance(key, str) and key.endswith(".ckpt") else key


def assert_same_checkpoint(got, expected):
    left, right = dict(flat(got)), dict(flat(expected))
    for leaves in (left, right):
        leaves.pop("/callbacks/ResultsWriter/counted/0", None)  # seconds
    assert left.keys() == right.keys()
    tensors = 0
    for path, value in right.items():
        if isinstance(value, torch.Tensor):
            tensors += 1
            assert torch.equal(left[path], value), path
        else:
            assert left[path] == value, path
    assert tensors > 3


def logged(folder, version):
    """Logged metrics by (step, name); times are left out."""
    found = {}
    with (folder / "log" / version / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch") and "seconds" not in name:
                    assert (row["step"], name) not in found
                    found[row["step"], name] = value
    return found


METHODS = {
    "FedPAC": (partial(FedPAC, lr=0.05, epochs=1), {}),
    "FedPAC, alignment only": (partial(FedPAC, lr=0.05, epochs=1, combination=False), {}),
    "LocalOnly": (partial(LocalOnly, lr=0.05, epochs=1), {}),
    "FedPer": (partial(FedPer, lr=0.05, epochs=1), {"encoder": normed_encoder, "data": partial(Toy, batch_size=9)}),
    "FedAvg": (partial(FedAvg, lr=0.05, epochs=2), {"encoder": dropout_encoder}),
    "FedBABU": (partial(FedBABU, lr=0.05, epochs=1, fine_tune_epochs=1), {"encoder": dropout_encoder}),
    "FedBN": (partial(FedBN, lr=0.05, epochs=1), {"encoder": normed_encoder, "data": partial(Toy, batch_size=9)}),
    "FedRoD": (partial(FedRoD, lr=0.05, epochs=1, fine_tune="all"), {}),
    "FD": (partial(FD, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "FML": (partial(FML, lr=0.05, epochs=1, partner=wide_encoder), {"encoder": [tiny_encoder, dropout_encoder]}),
    "FedKD": (partial(FedKD, lr=0.05, epochs=1, partner=wide_encoder), {"encoder": [tiny_encoder, linear_encoder]}),
    "FedKD, low rank down": (
        partial(FedKD, lr=0.05, epochs=1, compress_down=True, energy_start=0.6, energy_end=0.6),
        {},
    ),
    "FedProto": (partial(FedProto, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "FedProto, local": (partial(FedProto, lr=0.05, epochs=1, local_prototypes=True), {"encoder": dropout_encoder}),
    "FedMD": (for_toy(FedMD, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "FedMD, warm-up": (for_toy(FedMD, lr=0.05, epochs=1, warmup_epochs=1), {}),
    "KTpFL": (for_toy(KTpFL, lr=0.05, epochs=3), {"encoder": [tiny_encoder, linear_encoder]}),
    "KTpFL, weights": (partial(KTpFL, lr=0.05, epochs=1, weights=True), {"encoder": dropout_encoder}),
    "FedEM": (partial(FedEM, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedEM, fine-tuning": (partial(FedEM, lr=0.05, epochs=1, fine_tune="all"), {}),
    "FedGH": (partial(FedGH, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "FedClassAvg": (partial(FedClassAvg, lr=0.05, epochs=1, warm_up_epochs=1), {"encoder": dropout_encoder}),
    "FedTGP": (for_toy(FedTGP, lr=0.05, epochs=1), {"encoder": [tiny_encoder, linear_encoder]}),
    "FedAMP": (partial(FedAMP, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "PFedHN": (partial(PFedHN, lr=0.05, epochs=1, hidden_size=7), {"encoder": dropout_encoder}),
    "DCPFL": (partial(DCPFL, lr=0.05, epochs=1), {}),
    "DualFed": (for_toy(DualFed, lr=0.05), {}),
    "PFLSSL": (for_toy(PFLSSL, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "Calibre": (for_toy(Calibre, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedEMA": (for_toy(FedEMA, lr=0.05, epochs=1), {}),
    "APFL": (partial(APFL, lr=0.05, epochs=1, adaptive=True, alpha_lr=0.5), {"encoder": dropout_encoder}),
    "PerFedAvg": (partial(PerFedAvg, lr=0.05, epochs=1, order="exact"), {"encoder": dropout_encoder}),
    "PFedMe": (partial(PFedMe, lr=0.05, epochs=1, beta=0.5), {"encoder": dropout_encoder}),
    "SCAFFOLD": (partial(SCAFFOLD, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedAvgM": (partial(FedAvgM, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedAdam": (partial(FedAdam, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedYogi": (partial(FedYogi, lr=0.05, epochs=1), {}),
    "FedAdagrad": (partial(FedAdagrad, lr=0.05, epochs=1), {}),
    "FedDyn": (partial(FedDyn, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedCM": (partial(FedCM, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedNova": (partial(FedNova, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedNTD": (partial(FedNTD, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedPHP": (partial(FedPHP, lr=0.05, epochs=1, rounds=4), {"encoder": dropout_encoder}),
    "PFedSim": (partial(PFedSim, lr=0.05, epochs=1, warmup=2), {"encoder": dropout_encoder}),
    "FedCP": (partial(FedCP, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedLC": (partial(FedLC, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "MOON": (partial(MOON, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "GPFL": (partial(GPFL, lr=0.05, epochs=1, conditions_from="trained"), {"encoder": dropout_encoder}),
    "FedDBE": (partial(FedDBE, lr=0.05, epochs=1, mean_momentum=0.5), {"encoder": dropout_encoder}),
    "KNNPer": (partial(KNNPer, lr=0.05, epochs=1, capacity=0.5), {}),
    "FedALA": (partial(FedALA, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedAS": (partial(FedAS, lr=0.05, epochs=1), {"encoder": normed_encoder, "data": partial(Toy, batch_size=9)}),
    "PFedFDA": (for_toy(PFedFDA, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "FedETF": (for_toy(FedETF, lr=0.05, epochs=1), {"encoder": dropout_encoder}),
    "SphereFed": (for_toy(SphereFed, lr=0.05, epochs=1), {}),
    "HypCluster": (partial(HypCluster, lr=0.05, epochs=1, clusters=2, clustered=("head.*",)), {}),
    "CFL": (partial(CFL, lr=0.05, epochs=1, eps_1=99.0, eps_2=0.0, first_split=1), {"encoder": dropout_encoder}),
    "FedMTL": (partial(FedMTL, lr=0.05, epochs=1, lam=0.1), {"encoder": dropout_encoder}),
    "APPLE": (partial(APPLE, lr=0.3, epochs=1, relationship_lr=0.02), {"encoder": dropout_encoder}),
    "HypCluster, k-means++": (partial(HypCluster, lr=0.05, epochs=1, start="kmeans++"), {"encoder": dropout_encoder}),
    "FedFomo": (partial(FedFomo, lr=0.05, epochs=1, models=2), {}),
    "FedPAC, TrainerEngine": (partial(FedPAC, lr=0.05, epochs=1), {"engine": TrainerEngine}),
    "FedAvg, dropout, TrainerEngine": (
        partial(FedAvg, lr=0.05, epochs=1),
        {"engine": TrainerEngine, "encoder": dropout_encoder},
    ),
}


BEFORE = {"after training": ("after training",), "after validation": ("after validation",)}
LATE = {method.__name__ for method in CORE}


@pytest.mark.repeated
@pytest.mark.parametrize(
    ("method", "options", "before"),
    crossed(METHODS, BEFORE, lambda case, before: case in LATE or before == "after training"),
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, method, options, before):
    late = before == "after validation"
    make = {key: value for key, value in options.items() if key == "encoder"}

    def saver(folder):
        return ModelCheckpoint(
            folder, filename="{epoch}", save_top_k=-1, save_last=True, save_on_train_epoch_end=not late
        )

    def go(folder, rounds, **more):
        fresh = {key: options[key]() for key in ("engine", "data") if key in options}
        return play(folder, rounds, method, checkpoint=saver(folder), **make, **fresh, **more)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    torch.manual_seed(123)  # whatever the process did in between
    resumed = go(tmp_path / "parts", 4, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))

    assert_same(whole_state(resumed), whole_state(whole))
    assert_same_checkpoint(last_checkpoint(tmp_path / "parts"), last_checkpoint(tmp_path / "whole"))
    first, second = logged(tmp_path / "parts", "to-2"), logged(tmp_path / "parts", "to-4")
    assert not first.keys() & second.keys()
    assert first | second == logged(tmp_path / "whole", "to-4")
    assert {step for step, _ in second} == {"2", "3"}


def test_results_of_a_resumed_run_equal_those_of_the_uninterrupted_one(tmp_path):
    method = partial(FedPAC, lr=0.05, epochs=1)
    play(tmp_path / "whole", 4, method)
    play(tmp_path / "parts", 2, method)
    play(tmp_path / "parts", 4, method, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    for name in ("results.json", "clients.csv"):
        texts = [(tmp_path / run / name).read_text().splitlines() for run in ("whole", "parts")]
        left, right = ([line for line in text if "seconds" not in line] for text in texts)
        assert left == right
        assert len(left) > 5


def test_the_state_moves_from_round_to_round(tmp_path):
    """What the comparisons above compare does change, so that they can fail."""
    play(tmp_path, 3, partial(FedPAC, lr=0.05, epochs=1))
    states = [torch.load(tmp_path / f"epoch={k}.ckpt", weights_only=True)["state_dict"] for k in range(3)]
    for earlier, later in itertools.pairwise(states):
        assert not torch.equal(earlier["server.encoder.encoder/0/weight"], later["server.encoder.encoder/0/weight"])
        assert not torch.equal(earlier["server.centroids"], later["server.centroids"])


def test_without_validation_the_end_of_a_round_is_still_its_end(tmp_path):
    method = partial(FedPAC, lr=0.05, epochs=1)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole = run(method, 3, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0)
    resumed = run(method, 3, ckpt_path=str(tmp_path / "epoch=1.ckpt"), limit_val_batches=0)
    assert_same(whole_state(resumed), whole_state(whole))


# ---------------------------------------------------------------------- checkpoints in other hands


@pytest.mark.parametrize(
    "method",
    [FedBABU, FedRep, LocalOnly, FedPAC, FedRoD, FedProto, FedGH, FedClassAvg, DCPFL, DualFed, PFLSSL, Calibre, FedEMA],
    ids=lambda method: method.__name__,
)
def test_a_checkpoint_brings_every_weight_along(tmp_path, method):
    """A federation of another seed that loads it has the same models: nothing comes from the seed any more."""
    options = {"fine_tune": None} if method is FedBABU else {}
    trained = play(tmp_path, 1, for_toy(method, epochs=1, **options), seed=1)
    other = Federation(for_toy(method, epochs=1, **options), tiny_encoder, seed=2)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.validate(other, datamodule=Toy(), ckpt_path=tmp_path / "last.ckpt", **WEIGHTS_ONLY, verbose=False)
    assert_same(whole_state(other), whole_state(trained))
    assert other.validation_scores == trained.validation_scores


def test_going_on_with_another_seed_is_said(tmp_path):
    play(tmp_path, 1, FedAvg, seed=1)
    with pytest.warns(UserWarning, match="made with seed 1, this run has 2"):
        play(tmp_path, 2, FedAvg, seed=2, ckpt_path=str(tmp_path / "last.ckpt"))
