"""Several encoders in one federation: engines, groups of clients, checkpoints."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, first_net, named, sgd
from _helpers.toy import (
    CLIENTS,
    FEATURES,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    quiet_trainer,
    run,
    tiny_encoder,
    whole_state,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.encoders import ByClient
from pfl_lightning.errors import CheckpointError
from pfl_lightning.methods import DCPFL, FedClassAvg, FedGH, FedProto, LGFedAvg, LocalOnly

COHORTS = [[0, 2, 3], [1, 2], [0, 1, 2, 3]]  # client 4 never trains
METHODS = [LocalOnly, LGFedAvg, FedProto, FedGH, FedClassAvg, DCPFL]
NAMES = [method.__name__ for method in METHODS]


def other_encoder(input_shape):
    """Another architecture, with all that makes a fit depend on its state and on randomness."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, FEATURES))
    encoder.out_features = FEATURES
    return encoder


BOTH = [tiny_encoder, other_encoder]


def play(method, rounds=2, encoder=BOTH, **options):
    options = {"cohorts": COHORTS, "data": Toy(batch_size=9)} | options
    return run(partial(method, lr=0.05, epochs=1), rounds, encoder=encoder, **options)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_client_stores_the_state_of_its_own_architecture(method):
    """Those that trained differ; the one that did not has the first weights of its architecture."""
    federation = play(method)
    names = [{n for n in model.kept_names() if n.startswith("encoder.")} for model in federation.models]
    for client in range(CLIENTS):
        stored = federation.personal.get(client)
        assert {n for n in stored if n.startswith("encoder.")} == names[client % 2]
        assert federation.personal.written(client) == (client != 4)
    weights = [federation.personal.get(client)["encoder.0.weight"] for client in range(CLIENTS)]
    assert torch.equal(weights[4], first_net().encoder[0].weight)
    for one, two in [(0, 2), (0, 4), (2, 4), (1, 3)]:
        assert not torch.equal(weights[one], weights[two])


# ---------------------------------------------------------------------- engines


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_engines_agree_bit_by_bit(method):
    tight = play(method, engine=SequentialEngine(cache_features=False))
    full = play(method, engine=TrainerEngine())
    assert_same(whole_state(full), whole_state(tight))
    assert full.test_scores == tight.test_scores
    assert len(tight.test_scores) == CLIENTS


class InGroups(VectorizedEngine):
    """Takes several clients at once; says whom it was given together, each time of one architecture."""

    def __init__(self):
        super().__init__(clients_per_batch=4)
        self.given = []

    def _fit_together(self, client, group, environment):
        self.given.append([task.context.client for task in group])


@pytest.mark.parametrize("method", [LGFedAvg, DCPFL], ids=["LGFedAvg", "DCPFL"])
def test_groups_of_clients_are_split_by_architecture(method):
    engine = InGroups()
    together = play(method, 3, engine=engine)
    assert engine.given == [[0, 2], [0, 2], [1, 3]]  # one client alone is no group
    assert_same(whole_state(together), whole_state(play(method, 3)))


def test_clients_of_both_architectures_train_as_they_would_alone():
    """The reference is written in plain torch."""

    def plain_encoder(input_shape):
        encoder = nn.Sequential(nn.Linear(input_shape[0], 7), nn.ReLU(), nn.Linear(7, FEATURES))
        encoder.out_features = FEATURES
        return encoder

    data = Toy()
    federation = run(partial(LocalOnly, lr=0.05, epochs=2), cohorts=[[0, 1, 3]], encoder=[tiny_encoder, plain_encoder])
    fresh = Federation(LocalOnly, [tiny_encoder, plain_encoder], seed=SEED)
    quiet_trainer(1).validate(fresh, data, verbose=False)
    for client in (0, 1, 3):
        net = fresh.client_model(client)
        sgd(net, batches(data, client, 0, "fit/0", 2), list(net.parameters()), 0.05)
        assert_same(named(federation.client_model(client)), named(net), atol=1e-6)


# ---------------------------------------------------------------------- checkpoints


def saving(folder):
    return {"callbacks": [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)], "enable_checkpointing": True}


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, method):
    whole = play(method, 3, **saving(tmp_path))
    resumed = play(method, 3, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    assert (resumed.validation_scores, resumed.test_scores) == (whole.validation_scores, whole.test_scores)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_checkpoint_brings_every_weight_along(tmp_path, method):
    """A federation of another seed that loads it has the same models, those that never trained included."""
    trained = play(method, 1, **saving(tmp_path))
    other = Federation(partial(method, lr=0.05, epochs=1), BOTH, seed=SEED + 1)
    quiet_trainer(1).validate(other, Toy(batch_size=9), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert_same(whole_state(other), whole_state(trained))
    assert other.validation_scores == trained.validation_scores


def wider_encoder(input_shape):
    encoder = nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, FEATURES))
    encoder.out_features = FEATURES
    return encoder


OTHERS = {
    "another assignment": (ByClient(BOTH, [0, 1, 0, 1, 1]), "assigns its architectures to"),
    "swapped": (BOTH[::-1], "of another encoder"),
    "the first alone": (tiny_encoder, "of another encoder, .*: the shape of models.1"),
    "one more": ([*BOTH, tiny_encoder], "of another encoder, .*: the shape of models.2"),
    "another second": (
        [tiny_encoder, wider_encoder],
        r"the shape of models.1.encoder.0.weight is \(7, 6\)",
    ),
}


@pytest.mark.filterwarnings("ignore:the checkpoint was made with seed")
@pytest.mark.parametrize(("encoder", "message"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_other_encoders_or_another_dealing_is_refused(tmp_path, encoder, message):
    """And nothing of it has been taken over."""
    play(LGFedAvg, 1, **saving(tmp_path))
    method = partial(LGFedAvg, lr=0.05, epochs=1)
    untouched, federation = (Federation(method, encoder, seed=SEED + 1) for _ in range(2))
    quiet_trainer(1).validate(untouched, Toy(batch_size=9), verbose=False)
    trainer, path = quiet_trainer(1, GivenCohorts([0])), tmp_path / "epoch=0.ckpt"
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(federation, datamodule=Toy(batch_size=9), ckpt_path=path)
    assert_same(whole_state(federation), whole_state(untouched))


def renamed_encoder(input_shape):
    return tiny_encoder(input_shape)


def test_a_checkpoint_of_an_encoder_by_another_name_is_taken_with_a_warning(tmp_path):
    play(LGFedAvg, 1, **saving(tmp_path))
    with pytest.warns(UserWarning, match=r"encoders are called \['tiny_encoder', .* this run's \['renamed_encoder'"):
        play(LGFedAvg, 2, [renamed_encoder, BOTH[1]], ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_an_architecture_without_clients_is_saved_and_restored(tmp_path):
    deal = partial(ByClient, BOTH, [0] * CLIENTS)
    whole = play(LGFedAvg, 2, deal(), **saving(tmp_path))
    resumed = play(LGFedAvg, 2, deal(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert_same(whole_state(resumed), whole_state(whole))
    assert not torch.equal(whole.client_model(0).head.weight, whole.models[1].head.weight)
