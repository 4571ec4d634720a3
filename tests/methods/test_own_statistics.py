"""``batch_norm`` of any method: running statistics stay and weights are averaged, against plain torch."""

import copy
from functools import partial

import pytest
import torch
from _helpers.plain import cross_entropy, mean_of, named, put, sgd
from _helpers.toy import CLASSES, CLIENTS, FEATURES, SEED, Toy, assert_same, normed_encoder, own_model, run
from torch import nn

from pfl_lightning.encoders import WithProjector
from pfl_lightning.methods import METHODS, Ditto, DualFed, FedAvg, FedBN, FedPer, FedProx, FedRep, FedRoD
from pfl_lightning.seeding import derive_seed

BATCH, LR = 9, 0.05  # leaves no batch of one sample, whichever the client
COHORTS = [[0, 2, 3], [1, 2]]
WITH_PROJECTOR = partial(WithProjector, encoder=normed_encoder, hidden=6)


class Plain(nn.Module):
    """Encoder and head; with a projector between them, which belongs to the encoder."""

    def __init__(self, projector: bool) -> None:
        super().__init__()
        layers = [*normed_encoder((6,))]
        if projector:
            first, last = nn.Linear(FEATURES, 6), nn.Linear(6, FEATURES)
            layers += [first, nn.ReLU(), nn.BatchNorm1d(6), last, nn.BatchNorm1d(FEATURES)]
        self.encoder = nn.Sequential(*layers)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def restate(projector, prefix):
    """Every client's model after the rounds; ``mean_of`` and ``put`` know parameters alone, no running statistics."""
    data = Toy(batch_size=BATCH)
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    start = Plain(projector)
    models = [copy.deepcopy(start) for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            inputs, labels = data.tensors(client)
            generator = torch.Generator().manual_seed(derive_seed(SEED, "fit/0", round, client))
            chosen = torch.randperm(len(labels), generator=generator).split(BATCH)
            steps = iter([[inputs[rows], labels[rows]] for rows in chosen])
            sgd(models[client], steps, list(models[client].parameters()), LR, cross_entropy)
        mean = mean_of([named(models[k], prefix) for k in cohort], [len(data.labels[k]) for k in cohort])
        for net in models:
            put(net, mean)
    return models


@pytest.mark.parametrize("projector", [False, True], ids=["encoder", "encoder and projector"])
@pytest.mark.parametrize(("method", "prefix"), [(FedAvg, ""), (FedPer, "encoder."), (partial(FedProx, mu=0.0), "")])
def test_rounds_equal_the_restatement(method, prefix, projector):
    fit = partial(method, lr=LR, epochs=1, batch_norm="own_statistics")
    encoder = WITH_PROJECTOR if projector else normed_encoder
    federation = run(fit, 2, cohorts=COHORTS, data=Toy(batch_size=BATCH), encoder=encoder)
    for client, plain in enumerate(restate(projector, prefix)):
        got, expected = federation.client_model(client).state_dict(), plain.state_dict()
        for value, (name, tensor) in zip(got.values(), expected.items(), strict=True):
            torch.testing.assert_close(value, tensor, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedPer, FedRep, FedRoD, FedBN, Ditto], ids=lambda m: m.__name__)
def test_the_rule_says_what_clients_have_in_common(method):
    """The same weights and other statistics; and with the other rules the same of both, or none."""
    prefix = "global_model." if method is Ditto else ""
    for rule, same in {"shared": (True, True), "own_statistics": (True, False), "own": (False, False)}.items():
        fit = partial(method, lr=LR, epochs=1, batch_norm=rule)
        federation = run(fit, 1, data=Toy(batch_size=BATCH), encoder=WITH_PROJECTOR)
        one, other = (own_model(federation, client).state_dict() for client in (0, 2))
        for norm in ("encoder.encoder.1", "encoder.projector.2", "encoder.projector.4"):
            found = [
                torch.equal(one[f"{prefix}{norm}.{n}"], other[f"{prefix}{norm}.{n}"])
                for n in ("weight", "running_mean")
            ]
            assert tuple(found) == same, (rule, norm)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_without_the_option_the_rule_is_the_methods(method):
    made = method(normed_encoder((6,)), 3)
    assert made.batch_norm == method.batch_norm
    assert method(normed_encoder((6,)), 3, batch_norm="own_statistics").batch_norm == "own_statistics"
    assert DualFed.batch_norm == "own_statistics"


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="batch_norm must be one of"):
        FedAvg(normed_encoder((6,)), 3, batch_norm="local")


def test_the_default_is_as_without_the_option():
    given, default = (
        run(partial(FedPer, lr=LR, **more), 2, cohorts=COHORTS, data=Toy(batch_size=BATCH), encoder=normed_encoder)
        for more in ({"batch_norm": "shared"}, {})
    )
    for client in range(CLIENTS):
        assert_same(given.client_model(client).state_dict(), default.client_model(client).state_dict())
