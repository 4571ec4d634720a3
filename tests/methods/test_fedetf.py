"""FedETF (Li et al. 2023) against plain torch: equiangular directions, and adaptations before an evaluation."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.plain import batches, copy_of, mean_of, named, put, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    normed_encoder,
    own_model,
    run,
    tiny_encoder,
)
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedETF
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, WIDTH = 2, 0.05, 6
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(FedETF, lr=LR, epochs=EPOCHS, width=WIDTH, alternations=0)


class PlainNet(nn.Module):
    """Encoder, projection and scale; the frame is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tiny_encoder((INPUTS,))
        self.projection = nn.Linear(FEATURES, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def scores(self, inputs: Tensor, frame: Tensor) -> Tensor:
        rows = [z / z.square().sum().sqrt() for z in self.projection(self.encoder(inputs))]
        return self.scale * torch.stack(rows) @ frame


def first() -> PlainNet:
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    return PlainNet()


def balanced(frame, own, floor=1):
    """-log(n_y e^(s_y) / sum_c n_c e^(s_c)); a class that the client lacks counts as one sample."""

    def loss(net, inputs, labels):
        losses = []
        for s, y in zip(net.scores(inputs, frame), labels.tolist(), strict=True):
            counts = [max(own.count(c), floor) for c in range(CLASSES)]
            losses.append(-torch.log(counts[y] * s[y].exp() / sum(n * v.exp() for n, v in zip(counts, s, strict=True))))
        return torch.stack(losses).mean()

    return loss


def restate(data, frame, cohorts, floor=1):
    net = first()
    for round, cohort in enumerate(cohorts):
        trained = []
        for client in cohort:
            local, loss = copy_of(net), balanced(frame, data.labels[client], floor)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR, loss, 0.9)
            trained.append(named(local))
        put(net, mean_of(trained, [len(data.labels[client]) for client in cohort]))
    return net


def frame_of(federation):
    return federation.clients.first_state(0)["head.weight"].T


@pytest.mark.parametrize("floor", [1, 0])
def test_two_rounds_equal_the_restatement(floor):
    data = Toy()
    federation = run(partial(METHOD, floor=floor), 2, cohorts=COHORTS, data=data)
    model, frame = federation.client_model(4), frame_of(federation)
    expected = restate(data, frame, COHORTS, floor)
    got = {name: value for name, value in named(model).items() if name != "head.weight"}
    assert_same({name: got[name] for name in named(expected)}, named(expected), atol=1e-6)
    assert torch.equal(model.head.weight.T, frame)
    inputs, labels = data.tensors(4, "test")
    with torch.no_grad():
        loss = float(F.cross_entropy(expected.scores(inputs, frame), labels))
    assert federation.test_scores[4].loss == pytest.approx(loss, abs=1e-5)


def test_the_frame_is_equiangular_and_the_same_for_all():
    frame = frame_of(run(METHOD, 1, limit_val_batches=0))
    cosines = frame.T @ frame  # columns have length one
    torch.testing.assert_close(cosines.diagonal(), torch.ones(CLASSES), rtol=0, atol=1e-5)
    apart = cosines[~torch.eye(CLASSES, dtype=torch.bool)]
    torch.testing.assert_close(apart, torch.full_like(apart, -1 / (CLASSES - 1)), rtol=0, atol=1e-5)
    trained = run(METHOD, 3, cohorts=COHORTS)
    assert all(torch.equal(own_model(trained, client).head.weight.T, frame) for client in range(CLIENTS))


def test_with_equal_counts_the_loss_is_the_cross_entropy():
    client = FedETF(tiny_encoder((INPUTS,)), CLASSES)
    client.class_counts.fill_(3)
    features, labels = torch.randn(8, FEATURES), torch.randint(CLASSES, (8,))
    [loss] = client.loss_terms(features, labels).values()
    torch.testing.assert_close(loss, F.cross_entropy(client.classify(features), labels))


def adapted(net, frame, data, client, round, alternations):
    """The local fit, and then frame and projection in turn."""
    frame = nn.Parameter(frame.clone())
    own = list(net.parameters())
    first_fit = batches(data, client, round, "personalize/0", EPOCHS)
    sgd(net, first_fit, own, LR, balanced(frame.detach(), data.labels[client]), 0.9)

    def plain(net, inputs, labels):
        return F.cross_entropy(net.scores(inputs, frame), labels)

    for turn in range(alternations):
        steps = [batches(data, client, round, f"personalize/{1 + 2 * turn + part}", 3) for part in (0, 1)]
        sgd(net, steps[0], [frame], 0.1, plain, 0.0, 0.0)
        sgd(net, steps[1], list(net.projection.parameters()), 0.05, plain, 0.9)
    return frame.detach()


@pytest.mark.parametrize("engine", [None, TrainerEngine, VectorizedEngine])
def test_the_adaptations_equal_the_restatement(engine):
    """Of a client of the last cohort, of one that never trained, and of a novel one; nothing is left behind."""
    data, alternations = Toy(novel_clients=1), 2 if engine is None else 1
    cohorts = [[0, 2], [1, 2]]  # places
    method = partial(METHOD, alternations=alternations)
    federation = run(method, 2, cohorts=cohorts, data=data, engine=engine and engine())
    clients = [[data.participating[place] for place in cohort] for cohort in cohorts]
    frame = frame_of(federation)
    start = restate(data, frame, clients)
    for client in (clients[1][0], data.participating[3], data.novel[0]):
        net = copy_of(start)
        moved = adapted(net, frame, data, client, 1, alternations)
        model = federation.client_model(client)
        torch.testing.assert_close(model.head.weight.detach().T, moved, rtol=0, atol=1e-5)
        got = named(model)
        assert_same({name: got[name] for name in named(net)}, named(net), atol=1e-5)
        if client not in data.novel:
            inputs, labels = data.tensors(client, "test")
            with torch.no_grad():
                loss = float(F.cross_entropy(net.scores(inputs, moved), labels))
            assert federation.test_scores[client].loss == pytest.approx(loss, abs=1e-4)
    assert torch.equal(own_model(federation, 0).head.weight.T, frame)


def test_running_statistics_move_in_the_adaptations_only_if_asked():
    states = {}
    for mode in ("evaluation", "training"):
        method = partial(METHOD, alternations=1, alternation_mode=mode)
        federation = run(method, 1, data=Toy(batch_size=9), encoder=normed_encoder)
        states[mode] = federation.client_model(0).encoder.state_dict()["1.num_batches_tracked"]
    fit = EPOCHS * 2  # batches of client 0
    assert states["training"] == states["evaluation"] + 2 * 3 * 2
    assert states["evaluation"] >= fit


def test_a_personalization_from_outside_takes_the_place_of_the_adaptations():
    client = FedETF(tiny_encoder((INPUTS,)), CLASSES, alternations=2)
    client.personalization = Personalization("head", epochs=2)
    [phase] = client.personalization_phases()
    assert phase.epochs == 2
    client = FedETF(tiny_encoder((INPUTS,)), CLASSES, alternations=0, fine_tune="head")
    assert [phase.name for phase in client.personalization_phases()] == ["fine_tune"]


def test_beta_is_logged():
    callback_metrics = {}

    class Keep(L.Callback):
        def on_fit_end(self, trainer, pl_module):
            callback_metrics.update(trainer.callback_metrics)

    federation = run(METHOD, 2, callbacks=[Keep()])
    assert float(callback_metrics["server/beta"]) == pytest.approx(float(federation.server.weights.as_state()["scale"]))
    assert float(callback_metrics["server/beta"]) != 1.0


def test_what_travels():
    loop = GivenCohorts([0, 3])
    run(METHOD, 1, loop=loop, limit_val_batches=0)
    size = 4 * sum(p.numel() for p in first().parameters())  # with beta, without the frame
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * size}
    assert FedETF(tiny_encoder((INPUTS,)), CLASSES).personal_names() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, "a width of at least the number of classes, got width 4 and 5 classes: leave width out"),
        ({"scale": 0.0}, r"scale \(beta\) must be a finite number above 0"),
        ({"floor": -1}, "floor must be a finite number of at least 0"),
        (
            {"fine_tune": "head"},
            r"by alternations \(alternations=20\) or by fine_tune \('head'\): give fine_tune together",
        ),
        ({"alternations": -1}, "alternations must be at least 0"),
        ({"alternation_mode": "evaluate"}, "alternation_mode must be one of .*; did you mean 'evaluation'"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        FedETF(tiny_encoder((INPUTS,)), CLASSES, **options)
