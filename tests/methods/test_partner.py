"""The partner network of a method: its first weights, what travels, what is kept, evaluated and refused."""

import pickle
from functools import partial

import pytest
import torch
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    INPUTS,
    SEED,
    assert_same,
    linear_encoder,
    run,
    tiny_encoder,
    wide_encoder,
)
from torch import nn
from torch.nn import functional as F

from pfl_lightning.encoders import ByShare
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, LocalOnly
from pfl_lightning.methods._partner import PartnerClient
from pfl_lightning.seeding import derive_seed


class Apart(PartnerClient):
    """Both networks train on the labels, and not on each other."""

    loss_names = ("cross_entropy", "partner_cross_entropy")
    pair_losses = ("partner_cross_entropy",)

    def pair_terms(self, features, partner_features, labels):
        scores = self.partner.head(partner_features)
        return {**self.loss_terms(features, labels), "partner_cross_entropy": F.cross_entropy(scores, labels)}


METHOD = partial(Apart, lr=0.05, epochs=1)


def first_partner(make_encoder):
    torch.manual_seed(derive_seed(SEED, "partner weights"))
    encoder = make_encoder((INPUTS,))
    return {
        **{f"partner.encoder.{name}": tensor for name, tensor in encoder.state_dict().items()},
        **{f"partner.head.{n}": t for n, t in nn.Linear(encoder.out_features, CLASSES).state_dict().items()},
    }


def own_part(model):
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("partner.")}


@pytest.mark.parametrize("encoders", [tiny_encoder, [tiny_encoder, linear_encoder], [wide_encoder, tiny_encoder]])
def test_the_partner_begins_alike_beside_every_architecture(encoders):
    federation = run(partial(METHOD, partner=wide_encoder), 1, cohorts=[[0]], encoder=encoders, limit_train_batches=0)
    for model in federation.models:
        found = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("partner.")}
        assert_same(found, first_partner(wide_encoder))
    assert_same(federation.server.weights.as_state(), first_partner(wide_encoder))


def test_it_leaves_the_first_weights_of_the_own_networks_as_they_are():
    for encoders in (tiny_encoder, [tiny_encoder, wide_encoder]):
        pair = run(partial(METHOD, partner=linear_encoder), 1, encoder=encoders, limit_train_batches=0)
        alone = run(LocalOnly, 1, encoder=encoders, limit_train_batches=0)
        for got, expected in zip(pair.models, alone.models, strict=True):
            assert_same(own_part(got), dict(expected.state_dict()))


def test_one_optimizer_is_two_of_equal_settings():
    """The partners are averaged as in FedAvg, and the own networks train alone."""
    pair = run(partial(METHOD), 2)
    average, alone = run(partial(FedAvg, lr=0.05, epochs=1), 2), run(partial(LocalOnly, lr=0.05, epochs=1), 2)
    sent = {name.removeprefix("partner."): t for name, t in pair.server.weights.as_state().items()}
    assert_same(sent, average.server.weights.as_state())
    for client in range(CLIENTS):
        assert_same(own_part(pair.client_model(client)), dict(alone.client_model(client).state_dict()))
        assert pair.test_scores[client].accuracy == alone.test_scores[client].accuracy
        assert pair.test_scores[client].loss == pytest.approx(alone.test_scores[client].loss)


def test_what_is_handed_out_has_no_partner():
    federation = run(partial(METHOD, partner=wide_encoder), 1)
    client = federation.models[0]
    assert client.shared_names() == [name for name in client.state_dict() if name.startswith("partner.")]
    assert client.exported_names() == [*own_part(client)]


@pytest.mark.parametrize("fine_tune", ["head", "all"])
def test_a_fine_tuning_is_that_of_the_own_network(fine_tune):
    pair = run(partial(METHOD, partner=wide_encoder, fine_tune=fine_tune), 1)
    alone = run(partial(LocalOnly, lr=0.05, epochs=1, fine_tune=fine_tune), 1)
    for client in range(CLIENTS):
        assert pair.test_scores[client].loss == pytest.approx(alone.test_scores[client].loss, abs=1e-6)


def test_what_is_frozen_in_the_partner_neither_trains_nor_travels():
    def half_frozen(input_shape):
        encoder = wide_encoder(input_shape)
        encoder[0].weight.requires_grad_(False)
        return encoder

    federation = run(partial(METHOD, partner=half_frozen), 1)
    assert "partner.encoder.0.weight" not in federation.server.weights.as_state()
    first = first_partner(wide_encoder)
    state = federation.models[0].state_dict()
    assert torch.equal(state["partner.encoder.0.weight"], first["partner.encoder.0.weight"])
    assert not torch.equal(state["partner.encoder.0.bias"], first["partner.encoder.0.bias"])


def test_a_module_is_copied():
    encoder = wide_encoder((INPUTS,))
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    federation = run(partial(METHOD, partner=encoder), 1, encoder=[tiny_encoder, linear_encoder])
    assert_same(dict(encoder.state_dict()), before)
    partners = [model.partner.encoder[0].weight for model in federation.models]
    assert partners[0].data_ptr() != partners[1].data_ptr()
    assert not any(name.startswith("partner_encoder") for name in federation.models[0].state_dict())


def test_a_module_that_does_not_say_its_width_is_tried():
    encoder = nn.Sequential(nn.Linear(INPUTS, 3), nn.Tanh())
    federation = run(partial(METHOD, partner=encoder), 1, encoder=[tiny_encoder, linear_encoder])
    assert federation.models[1].partner.head.in_features == 3
    assert not hasattr(encoder, "out_features")


def test_clients_are_pickled_without_what_made_the_partner():
    federation = run(partial(METHOD, partner=lambda shape: wide_encoder(shape)), 1)
    client = federation.models[0]
    assert client.partner_encoder is None
    again = pickle.loads(pickle.dumps(client))
    assert_same(dict(again.state_dict()), dict(client.state_dict()))


# ---------------------------------------------------------------------- what is refused


def wrong_width(input_shape):
    encoder = wide_encoder(input_shape)
    encoder.out_features = 5
    return encoder


def test_features_of_another_width_than_said():
    expected = (
        r"the encoder of the partner \(wrong_width\) must map inputs of shape \(2, 6\) to features of shape \(2, 5\) "
        r"\(out_features is 5\), it gives \(2, 7\)"
    )
    with pytest.raises(ConfigurationError, match=expected):
        run(partial(METHOD, partner=wrong_width), 1)


def nameless_width(input_shape):
    return nn.Tanh()


def failing(input_shape):
    raise TypeError("no such shape")


def test_a_network_without_a_width_of_its_features():
    expected = (
        r"the encoder of the partner \(nameless_width\) has no integer attribute out_features \(the width of its "
        r"features\): set it where the network is made"
    )
    with pytest.raises(ConfigurationError, match=expected):
        run(partial(METHOD, partner=nameless_width), 1)


def test_a_network_that_cannot_be_made():
    expected = r"the encoder of the partner \(failing\) could not be made for inputs of shape \(6,\): no such shape"
    with pytest.raises(ConfigurationError, match=expected):
        run(partial(METHOD, partner=failing), 1)


def test_different_architectures_need_a_partner_of_their_own():
    expected = r"Apart needs .* partner\.\S+ is .* in tiny_encoder and .* in linear_encoder.*one partner= for all"
    with pytest.raises(ConfigurationError, match=expected):
        run(METHOD, 1, encoder=[tiny_encoder, linear_encoder])


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("no_such_encoder", ValueError, "unknown encoder 'no_such_encoder'"),
        (
            [tiny_encoder],
            ConfigurationError,
            r"partner must be one encoder for all clients, .*, got \[.*a list of encoders belongs",
        ),
        (
            ByShare([tiny_encoder], [1.0]),
            ConfigurationError,
            "partner must be one encoder for all clients, .*, got .*ByShare",
        ),
        (3, ConfigurationError, "a registered name or a callable .*, got 3"),
    ],
    ids=["unknown", "list", "assignment", "number"],
)
def test_what_is_no_encoder(choice, error, message):
    with pytest.raises(error, match=message):
        METHOD(tiny_encoder((INPUTS,)), CLASSES, partner=choice)


def test_a_partner_that_cannot_be_made_is_named():
    with pytest.raises(ConfigurationError, match=r"the encoder of the partner \(small_cnn\) could not be made"):
        run(partial(METHOD, partner="small_cnn"), 1)
