"""Calibre (SimCLR) against its restatement in plain torch: k-means and losses by loops, the weights by divergence."""

import copy
import warnings
from functools import partial, partialmethod

import pytest
import torch
from _helpers.engines import assert_evaluations_agree
from _helpers.plain import batches, score, sgd
from _helpers.plain_calibre import PlainCalibre
from _helpers.toy import (
    CLIENTS,
    LABELS,
    SMALL_SIMCLR,
    GivenCohorts,
    Toy,
    assert_same,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
    whole_state,
)
from _helpers.views import ToyViews, flat_encoder

from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import PFLSSL, Calibre
from pfl_lightning.methods.calibre import CalibreUpdate, DivergenceAwareAggregator
from pfl_lightning.phases import Personalization
from pfl_lightning.self_supervised import OBJECTIVES
from pfl_lightning.self_supervised.objective import features_of

EPOCHS, LR = 2, 0.05
EVERYBODY = list(range(CLIENTS))
TWO_ROUNDS = [[0, 2, 3], [1, 2]]
SMALL = {"objective": SMALL_SIMCLR, "clusters": 3}
FIT = partial(Calibre, **SMALL, lr=LR, epochs=EPOCHS)

OPTIONS = {
    "both": ({}, {}),
    "L_n": ({"alpha_p": 0.0}, {"alpha_p": 0.0}),
    "L_p": ({"alpha_n": 0.0}, {"alpha_n": 0.0}),
    "neither": ({"alpha_n": 0.0, "alpha_p": 0.0}, {"alpha_n": 0.0, "alpha_p": 0.0}),
    "strong": ({"alpha_n": 2.0, "alpha_p": 5.0}, {"alpha_n": 2.0, "alpha_p": 5.0}),
    "of unit length": ({"divergence_of": "unit_length"}, {"of_unit_length": True}),
    "by samples": ({"aggregation": "samples"}, {"by_divergence": False}),
}


def both(cohorts, fit=FIT, **options):
    """Play the method and the restatement on noisy views in double precision."""
    data = ToyViews()
    federation = run(fit, len(cohorts), cohorts=cohorts, data=data, encoder=flat_encoder, precision="64-true")
    plain = PlainCalibre(data, EPOCHS, LR, **options)
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    return federation, plain


def assert_same_server(federation, plain):
    sent = {
        name.replace("objective.projector.layers", "projector"): tensor
        for name, tensor in federation.server.broadcast(0, 9).weights.items()
    }
    assert_same(sent, plain.shared(), atol=1e-7)


@pytest.mark.parametrize(("options", "restated"), OPTIONS.values(), ids=OPTIONS)
def test_one_round_equals_the_restatement(options, restated):
    federation, plain = both([EVERYBODY], partial(FIT, **options), **restated)
    assert plain.sizes_of_batches == {1, 2, 3, 4}  # fewer samples than clusters among them
    assert_same_server(federation, plain)
    for client in EVERYBODY:
        assert_same(dict(federation.client_model(client).head.state_dict()), plain.head)


def test_two_rounds_of_some_equal_the_restatement():
    assert_same_server(*both(TWO_ROUNDS))


def test_no_option_is_idle():
    found = []
    for options in OPTIONS.values():
        federation = run(partial(FIT, **options[0]), data=ToyViews(), encoder=flat_encoder, cohorts=[[0, 2]])
        found.append(torch.cat([t.flatten() for t in federation.server.broadcast(0, 1).weights.values()]))
    for index, one in enumerate(found):
        assert all(not torch.allclose(one, other, atol=1e-4) for other in found[:index])


# ---------------------------------------------------------------------- beside the plain objective

# What needs no more than the toy's seven samples.
NEEDS = {"mocov2": {"bank": 6}, "smog": {"groups": 5}}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_regularizers_and_by_samples_it_is_pfl_ssl(name):
    objective = partial(OBJECTIVES[name], hidden=6, out=5, **NEEDS.get(name, {}))
    options = {"data": ToyViews(drop_last=True), "encoder": flat_encoder, "cohorts": TWO_ROUNDS}
    plain = run(partial(PFLSSL, objective=objective, epochs=1), 2, **options)
    off = {"alpha_n": 0.0, "alpha_p": 0.0, "aggregation": "samples"}
    calibre = run(partial(Calibre, objective=objective, epochs=1, **off), 2, **options)
    assert_same(whole_state(calibre), whole_state(plain))
    off |= {"alpha_n": 0.3, "clusters": 3}
    calibrated = run(partial(Calibre, objective=objective, epochs=1, **off), 2, **options)
    first, second = (whole_state(federation) for federation in (plain, calibrated))
    assert first.keys() == second.keys()
    assert all(tensor.isfinite().all() for tensor in second.values())
    assert not torch.allclose(first["server weights.encoder/1/weight"], second["server weights.encoder/1/weight"])


# ---------------------------------------------------------------------- what travels


def test_what_is_uploaded(monkeypatch):
    updates, receive = [], DivergenceAwareAggregator.receive
    monkeypatch.setattr(
        DivergenceAwareAggregator, "receive", lambda server, one: (updates.append(one), receive(server, one))
    )
    loop = GivenCohorts([0, 2])
    federation, plain = run(FIT, data=ToyViews(), encoder=flat_encoder, loop=loop), PlainCalibre(ToyViews(), EPOCHS, LR)
    plain.play(0, [0, 2])
    shared = sum(tensor.numel() for tensor in plain.shared().values())
    for update, client in zip(updates, (0, 2), strict=True):
        assert type(update) is CalibreUpdate
        assert update.num_samples == len(LABELS[client])
        assert float(update.divergence) == pytest.approx(plain.divergences[client], abs=1e-5)
        assert update.bytes_by_kind() == {"weights": 4 * shared, "statistics": 4}
        assert {name.split(".")[0] for name in update.weights} == {"encoder", "objective"}
    assert loop.traffic.down == {"weights": 2 * 4 * shared}
    assert loop.traffic.up == {"weights": 2 * 4 * shared, "statistics": 8}
    assert set(federation.personal.get(0)) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("of", "depends"), [("encodings", True), ("unit_length", False)])
def test_the_scale_of_an_encoder_and_the_rate(monkeypatch, of, depends):
    rates = []
    for scale in (1.0, 0.01):
        found: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr("pfl_lightning.methods.calibre.features_of", partial(_scaled, scale))
            patch.setattr(DivergenceAwareAggregator, "receive", partialmethod(_note_rate, found))
            patch.setattr(DivergenceAwareAggregator, "aggregate", lambda server: None)
            run(partial(FIT, divergence_of=of), data=ToyViews(), encoder=flat_encoder, cohorts=[[0, 2]])
        rates.append(found)
    assert rates[0] == pytest.approx([100 * r for r in rates[1]] if depends else rates[1], rel=1e-4)


def _note_rate(server, found, update):
    found.append(float(update.divergence))


def _scaled(scale, encoder, data):
    return scale * features_of(encoder, data)


def test_by_samples_no_divergence_is_uploaded():
    loop = GivenCohorts([0, 2])
    run(partial(FIT, aggregation="samples"), data=ToyViews(), encoder=flat_encoder, loop=loop)
    assert set(loop.traffic.up) == {"weights"}


# ---------------------------------------------------------------------- the client


def test_batches_smaller_than_the_clusters_are_refused():
    message = (
        r"client 0, round 1: batches of 4 samples cannot be divided into 5 clusters; use a batch_size of at least 5"
    )
    with pytest.raises(ConfigurationError, match=message):
        run(partial(FIT, clusters=5), data=ToyViews(), encoder=flat_encoder)
    run(partial(FIT, clusters=5, alpha_n=0.0, alpha_p=0.0), data=ToyViews(), encoder=flat_encoder)


def test_a_client_with_fewer_samples_than_clusters_takes_part():
    data = ToyViews([[0], [1, 1], [2, 3, 2, 3, 2]])
    federation = run(FIT, 2, data=data, encoder=flat_encoder, cohorts=[[0, 1, 2]])
    assert all(tensor.isfinite().all() for tensor in whole_state(federation).values())


def test_the_head_waits_and_is_fitted_alone_in_the_personalization():
    client = FIT(tiny_encoder((6,)), 5)
    assert client.phases() == (Phase("self_supervised", ("encoder.*", "objective.*"), EPOCHS),)
    inputs, labels = Toy().tensors(1)
    client.personalization = Personalization("head")
    (client.phase,) = client.personalization_phases()
    terms = client.training_step((inputs, labels), 0)
    assert set(terms) == {"loss", "cross_entropy"}
    expected = torch.nn.functional.cross_entropy(client.head(client.encoder(inputs)), labels)
    torch.testing.assert_close(terms["loss"], expected)


def test_a_head_is_fitted_on_single_plain_views_of_the_servers_encoder():
    data, options = ToyViews(), {"fine_tune": "head", "fine_tune_epochs": 3, "fine_tune_lr": 0.1}
    more = {"data": data, "encoder": flat_encoder, "precision": "64-true"}
    federation = run(partial(FIT, **options), **more)
    for client in (0, 3):
        net = copy.deepcopy(own_model(federation, client)).eval()
        steps = batches(data, client, 0, "personalize/0", 3)
        steps = ([inputs.double(), labels] for inputs, labels in steps)
        sgd(net, steps, list(net.head.parameters()), 0.1, momentum=0.9, weight_decay=1e-4)
        assert_same(dict(federation.client_model(client).head.state_dict()), dict(net.head.state_dict()), atol=1e-9)
        assert federation.test_scores[client].loss == pytest.approx(
            score(net.float(), data, client, "test")[1], abs=1e-5
        )


def test_engines_fit_the_same_heads():
    fit = partial(FIT, fine_tune="head", fine_tune_epochs=3, fine_tune_lr=0.1)
    assert_evaluations_agree(fit, data=ToyViews(), encoder=flat_encoder)


def test_an_encoder_that_is_not_finite_is_left_out():
    class Breaks(Calibre):
        def make_update(self, context, before):
            if context.client == 0:
                torch.nn.init.constant_(self.encoder[1].weight, float("nan"))
            return super().make_update(context, before)

    with pytest.warns(UserWarning, match="client 0, round 1: the encoder's features are not finite"):
        run(partial(Breaks, **SMALL), data=ToyViews(), encoder=flat_encoder, cohorts=[[0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_n": -0.1}, "alpha_n must be a finite number of at least 0"),
        ({"alpha_p": float("inf")}, "alpha_p must be a finite number of at least 0"),
        ({"clusters": 0}, "clusters must be at least 1"),
        ({"prototype_temperature": 0.0}, "prototype_temperature must be a finite number above 0"),
        ({"divergence_of": "length"}, r"divergence_of must be one of \('encodings', 'unit_length'\)"),
        ({"aggregation": "mean"}, r"aggregation must be one of \('divergence', 'samples'\)"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FIT(tiny_encoder((6,)), 5, **options)


def test_defaults_are_the_papers():
    client = Calibre(normed_encoder((6,)), 5)
    assert (client.alpha_n, client.alpha_p, client.clusters, client.views) == (0.3, 0.3, 10, 2)
    assert (client.lr, client.momentum, client.weight_decay) == (0.01, 0.9, 1e-4)
    assert client.objective.nt_xent.temperature == 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(client.configure_aggregator(3), DivergenceAwareAggregator)
