"""All inspection callbacks at once: nothing of the training changes, whatever the method, the engine and the data."""

import math
import random
from dataclasses import replace
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.events import board, events, rounds, scalars
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import (
    CLIENTS,
    Toy,
    assert_same,
    for_toy,
    linear_encoder,
    normed_encoder,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
    wide_encoder,
)

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import ClientAccuracy, FederatedLoop, Inspection, UnitAttribution
from pfl_lightning.callbacks.inspection.features import FeatureEmbedding
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import PFLSSL, DualFed, FedAvg, FedBN, FedClassAvg, FedPAC, FedProto, LocalOnly

COHORTS = [[0, 2, 3], [1, 2, 4]]
ENGINES = {
    "SequentialEngine": lambda patch: SequentialEngine(),
    "TrainerEngine": lambda patch: TrainerEngine(),
    "VectorizedEngine": lambda patch: VectorizedEngine(forward="vmap"),
    "RayEngine": lambda patch: fake_ray_engine(patch, 2)[0],
}

pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")


def quick(**options):
    """Without the t-SNE, which takes most of the time and draws from a seed of its own."""
    return Inspection(every_n_rounds=1, **options).callbacks(without=[FeatureEmbedding])


def everything(federation):
    """The global random states, the modules as the last client left them, buffers of no checkpoint, and all states."""
    found = {"torch": torch.get_rng_state(), "python": torch.tensor(random.getstate()[1])}
    found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # noqa: NPY002
    found |= {f"module {name}": value.detach().clone() for name, value in federation.models.named_parameters()}
    # Lightly leaves the pointer of a memory bank that is not used uninitialized.
    buffers = {name: value for name, value in federation.models.named_buffers() if not name.endswith("bank_ptr")}
    found |= {f"module {name}": value.clone() for name, value in buffers.items()}
    return found | whole_state(federation)  # which loads all clients in turn


def compare(tmp_path, callbacks, method, make=lambda: None, loop=None, **options):
    """Run with and without, from the same random state."""
    runs = []
    for version, own in enumerate((callbacks, [])):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        settings = {"cohorts": COHORTS, **options, "engine": make()}
        if loop is not None:
            settings["loop"] = loop()
        runs.append(run(method, 2, callbacks=own, logger=board(tmp_path, version), **settings))
    got, expected = runs
    assert_same(everything(got), everything(expected))
    for scores in ("test_scores", "validation_scores"):
        assert str(getattr(got, scores)) == str(getattr(expected, scores))  # NaN is NaN as text
    found, plain = events(tmp_path, 0), events(tmp_path, 1)
    for tag in plain.Tags()["scalars"]:
        assert str(scalars(found, tag)) == str(scalars(plain, tag))
    return found


@pytest.mark.filterwarnings("ignore:.*compares 2 augmented views")
@pytest.mark.parametrize("method", [DualFed, FedBN, FedClassAvg, FedProto, PFLSSL], ids=lambda method: method.__name__)
def test_every_kind_of_method_trains_as_without(tmp_path, method):
    found = compare(tmp_path, quick(), for_toy(method, epochs=1))
    assert rounds(found, "cka_matrix/features" if method is not DualFed else "cka_matrix/pre_projection") == [0, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_as_without(tmp_path, monkeypatch, engine):
    inspection, images = Inspection(every_n_rounds=1, clients=3, samples=4), {"attribution_ranks", "partition"}
    first = engine == "SequentialEngine"  # the others without the t-SNE, which reads models as the rest does
    callbacks = inspection.callbacks(without=[] if first else [FeatureEmbedding])
    make = partial(ENGINES[engine], monkeypatch)
    found = compare(tmp_path, callbacks, partial(FedPAC, epochs=2, lr=0.1), make)
    images |= {"combination_weights", *(["features/features"] if first else [])}
    assert images <= set(found.Tags()["images"])


def test_fine_tuned_models_batch_normalization_and_precision(tmp_path):
    method = for_toy(FedAvg, epochs=1, fine_tune="all")
    found = compare(tmp_path, quick(), method, encoder=normed_encoder, precision="bf16-mixed", data=Toy(drop_last=True))
    assert rounds(found, "cka_matrix/features") == [0, 1]


def test_several_encoders_of_different_widths(tmp_path):
    callbacks = Inspection(every_n_rounds=1, clients=4, samples=4).callbacks()
    found = compare(tmp_path, callbacks, partial(LocalOnly, epochs=1), encoder=[tiny_encoder, wide_encoder])
    images = set(found.Tags()["images"])
    assert {"features/features_4", "features/features_7", "cka_matrix/features"} <= images
    assert "attribution_ranks" not in images


def test_a_sample_is_evaluated_novel_clients_and_clients_without_test_samples(tmp_path):
    data = Toy(novel_clients=1, test=[8, 8, 0, 8, 8], validation=[5, 0, 5, 5, 0])
    callbacks = quick()
    found = compare(
        tmp_path, callbacks, partial(FedPAC, epochs=1), loop=partial(FederatedLoop, 2, eval_cohort=3), data=data
    )
    assert rounds(found, "combination_weights") == [0, 1]
    assert not [tag for tag in found.Tags()["scalars"] if "novel" in tag]


@pytest.mark.filterwarnings("ignore:.*compares 2 augmented views")
def test_without_evaluations_and_with_states_on_disk(tmp_path):
    found = compare(
        tmp_path,
        quick(),
        partial(FedClassAvg, epochs=1),
        limit_val_batches=0,
        store={"client_state_memory_gb": 0},
        encoder=[tiny_encoder, linear_encoder],
    )
    assert "clients/test_accuracy" not in found.Tags()["histograms"]


class _Fails(FedPAC):
    """Only client 1 can train."""

    def loss_terms(self, features, labels):
        bad = float("inf") if len(labels) and int(self.failing) else 1.0
        return {name: term * bad for name, term in super().loss_terms(features, labels).items()}

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("failing", torch.zeros(()), persistent=False)

    def before_fit(self, context):
        self.failing.fill_(float(context.client != 1))
        return super().before_fit(context)


@pytest.mark.filterwarnings("ignore:left out of the aggregation")
def test_a_round_in_which_almost_no_client_could_train(tmp_path):
    found = compare(tmp_path, quick(), partial(_Fails, epochs=1), cohorts=[range(CLIENTS)])
    assert {event.histogram_value.num for event in found.Histograms("clients/train_loss")} == {1}
    assert scalars(found, "combination/own")[1] == 1


def test_a_round_without_batches(tmp_path):
    """Lightning skips the rounds; nothing is shown and nothing fails."""
    found = compare(tmp_path, quick(), partial(FedPAC, epochs=1), limit_train_batches=0)
    assert set(found.Tags()["images"]) <= {"partition"}


def test_a_fit_that_goes_on_from_a_checkpoint_shows_what_the_uninterrupted_one_does(tmp_path):
    def play(version, number, ckpt_path=None):
        options = {"logger": board(tmp_path, version), "enable_checkpointing": True, "ckpt_path": ckpt_path}
        return run(partial(FedPAC, epochs=1), number, callbacks=quick(), **options)

    play(0, 2)
    path = play(1, 1).trainer.checkpoint_callback.best_model_path
    play(1, 2, path)
    whole, parts = events(tmp_path, 0), events(tmp_path, 1)
    tags = [tag for tag in whole.Tags()["scalars"] if not tag.startswith("final/")]
    assert len(tags) > 20
    for tag in tags:
        assert scalars(parts, tag) == scalars(whole, tag), tag
    for tag in whole.Tags()["images"]:
        assert rounds(parts, tag) == rounds(whole, tag), tag
        pictures = [{one.step: one.encoded_image_string for one in found.Images(tag)} for found in (whole, parts)]
        assert pictures[0] == pictures[1], tag


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_n_rounds": 0}, "every_n_rounds must be"), ({"clients": 0}, "clients to inspect must be")],
)
def test_settings_without_meaning_are_refused(options, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        Inspection(**options)


def test_what_the_trainer_has_already_is_left_out():
    kinds = [type(callback) for callback in Inspection().callbacks(without=[ClientAccuracy])]
    assert ClientAccuracy not in kinds
    assert len(kinds) == len(set(kinds)) == len(Inspection().callbacks()) - 1


def test_an_evaluation_has_the_groups_callbacks_too(tmp_path):
    inspection = Inspection(dirpath=str(tmp_path))
    trainer = quiet_trainer(1, FederatedLoop(), inspection)
    trainer.validate(Federation(FedPAC, tiny_encoder), datamodule=Toy(), verbose=False)
    assert sum(isinstance(callback, ClientAccuracy) for callback in trainer.callbacks) == 1
    trainer.test(Federation(FedPAC, tiny_encoder), datamodule=Toy(), verbose=False)
    assert sum(isinstance(callback, ClientAccuracy) for callback in trainer.callbacks) == 1


def test_the_group_itself_is_a_callback(tmp_path):
    """It adds its callbacks, apart from those that the Trainer has; a second fit adds none."""
    inspection = Inspection(every_n_rounds=1, clients=2, samples=3, dirpath=str(tmp_path))
    own = UnitAttribution(dirpath=str(tmp_path))
    federation = run(partial(FedPAC, epochs=1), callbacks=[own, inspection])
    trainer = federation.trainer
    kinds = [type(callback) for callback in inspection.callbacks(without=[UnitAttribution])]
    place = trainer.callbacks.index(inspection)
    assert [type(callback) for callback in trainer.callbacks[place + 1 : place + 1 + len(kinds)]] == kinds
    assert {path.name for path in tmp_path.rglob("*.png")}
    before = list(trainer.callbacks)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(federation, datamodule=trainer.datamodule)
    assert trainer.callbacks == before


class _Bare(L.Callback):
    """Makes the federation one of models without features, of data without classes and evaluations without accuracy."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_fit_start(self, trainer, pl_module):
        for model in pl_module.models:
            del model.encoder.out_features
        self.monkeypatch.setattr(Toy, "num_classes", 0)

    def on_validation_epoch_end(self, trainer, pl_module):
        for scores in (pl_module.test_scores, pl_module.validation_scores):
            scores.update({client: replace(score, accuracy=math.nan) for client, score in scores.items()})


def test_models_without_features_classes_and_accuracies(tmp_path, monkeypatch):
    callbacks = [_Bare(monkeypatch), *Inspection(1).callbacks()]
    run(partial(FedAvg, epochs=1), 2, callbacks=callbacks, logger=board(tmp_path))
    found = events(tmp_path)
    assert found.Tags()["images"] == ["partition"]  # the sizes of the clients
    assert found.Tags()["histograms"] == ["clients/train_cross_entropy", "clients/train_loss"]
    assert {"bytes/total", "train/loss"} <= set(found.Tags()["scalars"])
    assert "test_accuracy/lower" not in found.Tags()["scalars"]


def test_a_model_without_features_is_named(monkeypatch):
    with pytest.warns(UserWarning, match="UnitAttribution shows nothing: tiny_encoder has no encoder with features"):
        run(partial(FedAvg, epochs=1), callbacks=[_Bare(monkeypatch), UnitAttribution()])
