"""Small, odd and impossible federations."""

import math
from functools import partial

import pytest
import torch
from _helpers.methods import under
from _helpers.plain import named
from _helpers.toy import LABELS, Toy, assert_same, for_toy, normed_encoder, run, tiny_encoder, whole_state
from torch import nn

from pfl_lightning import Phase, SequentialEngine, TrainerEngine
from pfl_lightning.datamodules import PartitionError
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import SCAFFOLD, DualFed, FedALA, FedAS, FedAvg, FedPAC, PerFedAvg

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")


SMALL = {
    "clients of one class": ([[0] * 5, [1] * 4, [1, 2]],),
    "one client": ([[0] * 5],),
    "one sample each": ([[0], [1]],),
}


@pytest.mark.repeated
@pytest.mark.parametrize(("method", "labels"), under(SMALL, ["one sample each"]))
def test_small_federations_run(method, labels):
    if method is PerFedAvg and len(labels[0]) == 1:
        with pytest.raises(ConfigurationError, match="takes at least 2 samples"):
            run(for_toy(method, epochs=1), data=Toy(labels), cohorts=[range(len(labels))])
        return
    federation = run(for_toy(method, epochs=1), 3, data=Toy(labels), cohorts=[range(len(labels))])
    assert sorted(federation.test_scores) == list(range(len(labels)))
    state = whole_state(federation)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    judged = method.evaluation == "classifier"  # by neighbors there is no loss
    assert all(math.isfinite(score.loss) is judged for score in federation.test_scores.values())


def unused_encoder(input_shape):
    """With a parameter that no feature depends on."""
    encoder = tiny_encoder(input_shape)
    encoder.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return encoder


@pytest.mark.parametrize("method", [partial(SCAFFOLD, control="gradient"), FedAS, partial(FedALA, layers=None)])
def test_a_parameter_that_no_feature_depends_on_has_no_gradient(method):
    federation = run(partial(method, epochs=1, weight_decay=0.0), 2, encoder=unused_encoder)
    assert torch.equal(federation.models[0].encoder.unused, torch.ones(3))
    assert all(bool(tensor.isfinite().all()) for tensor in whole_state(federation).values())


def test_fedpac_alone_is_its_own_head():
    """A cohort of one combines nothing."""
    combined = run(partial(FedPAC, epochs=1), 2, cohorts=[[1]])
    kept = run(partial(FedPAC, epochs=1, combination=False), 2, cohorts=[[1]])
    assert_same(named(combined.client_model(1)), named(kept.client_model(1)), atol=1e-7)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_batch_larger_than_a_clients_data_is_all_of_it(engine):
    # Sums over a whole client in another order, hence the tolerance.
    got = run(partial(FedAvg, epochs=2), data=Toy(batch_size=500), engine=engine())
    expected = run(partial(FedAvg, epochs=2), data=Toy(batch_size=17), engine=engine())
    assert_same(named(got.client_model(0)), named(expected.client_model(0)), atol=1e-6)


def test_dropped_batches():
    with pytest.raises(PartitionError, match=r"leaves client 4 no batch .* 7 training samples, batch_size is 9"):
        run(FedAvg, data=Toy(batch_size=9, drop_last=True))
    exact = [[0, 1] * 4] * 2
    dropped = run(FedAvg, data=Toy([[*own, 2] for own in exact], drop_last=True), cohorts=[[0, 1]])
    whole = run(FedAvg, data=Toy([[*own, 2] for own in exact]), cohorts=[[0, 1]])
    state, other = named(dropped.client_model(0)), named(whole.client_model(0))
    assert any(not state[name].equal(other[name]) for name in state)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize(
    ("method", "options"),
    [(DualFed, {}), (FedAvg, {"encoder": normed_encoder})],
    ids=["in the projector", "in the encoder"],
)
def test_batch_normalization_cannot_train_on_one_sample(method, options, engine):
    """17 samples are four batches of 4 and one of 1. The remedies that the message names do help."""
    message = (
        r"batch normalization cannot train on a batch of one item in phase '.*', and client 1 has 17 training items "
        r"in batches of 4; set another batch_size, or drop_last to true"
    )
    with pytest.raises(ConfigurationError, match=message):
        run(partial(method, epochs=1), engine=engine(), **options)
    for change in ({"drop_last": True}, {"batch_size": 9}):
        federation = run(partial(method, epochs=1), engine=engine(), data=Toy(**change), **options)
        assert len(federation.test_scores) == len(LABELS)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"gradient_clip_val": 0.5}, r"TrainerEngine\(gradient_clip_val=0.5\)"),
        (
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            r"TrainerEngine\(gradient_clip_val=0.5, gradient_clip_algorithm='value'\)",
        ),
        ({"accumulate_grad_batches": 2}, r"TrainerEngine\(accumulate_grad_batches=2\)"),
    ],
)
def test_options_of_the_trainer_on_gradients_are_sent_to_the_engine(options, engine):
    with pytest.raises(ConfigurationError, match=rf"pass it to the engine, Federation\(..., engine={engine}"):
        run(FedAvg, **options)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_phase_that_trains_nothing_is_refused(engine):
    class Misspelt(FedAvg):
        def phases(self):
            return (Phase("head", ("haed.*",)),)

    with pytest.raises(ConfigurationError, match=r"'haed\.\*' matches no parameter"):
        run(Misspelt, engine=engine())
