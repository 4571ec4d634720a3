"""FedClassAvg: what travels, the warm-up, batch normalization of a shared encoder, and refused arguments."""

import dataclasses
from functools import partial

import pytest
import torch
from _helpers.toy import FEATURES, GivenCohorts, Toy, normed_encoder, run, tiny_encoder
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedClassAvg


def other_encoder(input_shape):
    encoder = nn.Sequential(nn.Linear(input_shape[0], 7), nn.ReLU(), nn.Linear(7, FEATURES))
    encoder.out_features = FEATURES
    return encoder


def wide_encoder(input_shape):
    encoder = nn.Sequential(nn.Linear(input_shape[0], 512), nn.ReLU())
    encoder.out_features = 512
    return encoder


class TenClasses(Toy):
    """Five of them are never seen."""

    def load(self):
        return dataclasses.replace(super().load(), class_names=tuple("abcdefghij"))


@pytest.mark.parametrize("contrastive", [True, False])
def test_a_head_of_512_features_is_20_520_bytes_a_client_and_round(contrastive):
    """The paper says 22 KB."""
    loop = GivenCohorts([0, 2, 3], [1, 2])
    method = partial(FedClassAvg, contrastive=contrastive)
    run(method, 2, loop=loop, data=TenClasses(), encoder=wide_encoder, limit_val_batches=0)
    assert loop.traffic.up == loop.traffic.down == {"weights": 5 * 20_520}


def test_a_shared_encoder_travels_with_its_batch_normalization():
    """Weights and running statistics are averaged by samples; each client is evaluated with its own."""
    data = Toy(batch_size=9)
    federation = run(
        partial(FedClassAvg, share_encoder=True, lr=0.01), cohorts=[[0, 1]], encoder=normed_encoder, data=data
    )
    sent = federation.server.broadcast(0, 1).weights
    n = [len(data.labels[client]) for client in (0, 1)]
    for name in ("encoder.1.weight", "encoder.1.running_mean", "encoder.1.running_var"):
        first, second = (federation.client_model(client).state_dict()[name] for client in (0, 1))
        assert not torch.equal(first, second)
        torch.testing.assert_close(sent[name], (n[0] * first + n[1] * second) / sum(n))
    never = federation.client_model(4).state_dict()
    assert torch.equal(never["encoder.1.running_mean"], sent["encoder.1.running_mean"])


def test_the_warm_up_comes_once():
    """In each client's first round, whichever it is."""
    federation = run(partial(FedClassAvg, warm_up_epochs=1), 3, cohorts=[[0, 1], [1, 2], [1]])
    assert [int(federation.personal.get(client)["rounds_trained"]) for client in range(5)] == [1, 3, 1, 0, 0]


def test_the_optimizer_can_be_chosen():
    sgd = run(partial(FedClassAvg, optimizer=partial(torch.optim.SGD, lr=0.1)), cohorts=[[0]])
    adam = run(FedClassAvg, cohorts=[[0]])
    assert not torch.equal(sgd.client_model(0).head.weight, adam.client_model(0).head.weight)


def test_different_encoders_cannot_be_averaged():
    with pytest.raises(ConfigurationError, match="FedClassAvg needs the same shapes"):
        run(partial(FedClassAvg, share_encoder=True), encoder=[tiny_encoder, other_encoder])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proximal": -1.0}, r"proximal \(rho\) must be a finite number of at least 0"),
        ({"proximal": float("nan")}, r"proximal \(rho\) must be a finite number of at least 0"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number above 0"),
        ({"base_temperature": -0.07}, "base_temperature must be a finite number above 0"),
        ({"warm_up_epochs": -1}, "warm_up_epochs must be at least 0, got -1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedClassAvg(tiny_encoder((6,)), 5, **options)
