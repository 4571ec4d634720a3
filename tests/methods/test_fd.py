"""FD (Jeong et al. 2018) against plain torch: mean scores in dictionaries, one sample and one class at a time."""

from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, named, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    quiet_trainer,
    run,
    tiny_encoder,
    wide_encoder,
)
from torch import nn
from torch.nn import functional as F

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.methods import FD, LocalOnly
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, GAMMA = 2, 0.05, 0.7
METHOD = partial(FD, lr=LR, epochs=EPOCHS, gamma=GAMMA)
PARTIAL = [[0, 1, 2], [0, 2, 3], [1, 3]]


def first_nets(encoders):
    made = []
    for index, make in enumerate(encoders):
        net = Net()
        torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
        net.encoder = make((INPUTS,))
        net.head = nn.Linear(net.encoder.out_features, CLASSES)
        made.append(net)
    return [copy_of(made[client % len(made)]) for client in range(CLIENTS)]


def mean_scores(net, data, client, average):
    """Mean score vector of each class of the client, and its number of samples."""
    inputs, labels = data.tensors(client)
    with torch.no_grad():
        scores = net(inputs)
        scores = scores.softmax(1) if average == "probabilities" else scores
    return {c: (scores[labels == c].double().mean(0), int((labels == c).sum())) for c in set(labels.tolist())}


def left_out(sent, client, by_samples=False):
    """Mean over all senders but the client, class by class."""
    found = {}
    for c in range(CLASSES):
        held = [means[c] for other, means in sent.items() if other != client and c in means]
        if held:
            weights = [count if by_samples else 1 for _, count in held]
            total = sum(mean * weight for (mean, _), weight in zip(held, weights, strict=True))
            found[c] = (total / sum(weights)).float()
    return found


def restate(cohorts, encoders=(tiny_encoder,), average="scores", by_samples=False):
    """Everybody's network after the rounds, what was sent in the last, and how many terms there were."""
    data, nets, sent, terms = Toy(), first_nets(encoders), {}, 0
    for round, cohort in enumerate(cohorts):
        uploads = {}
        for client in cohort:
            received = left_out(sent, client, by_samples)

            def loss(net, x, y, received=received):
                nonlocal terms
                scores = net(x)
                value = F.cross_entropy(scores, y)
                for score, label in zip(scores, y.tolist(), strict=True):
                    if label in received:
                        terms += 1
                        target = received[label] if average == "probabilities" else received[label].softmax(0)
                        value = value - GAMMA * (target * score.log_softmax(0)).sum() / len(y)
                return value

            net = nets[client]
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR, loss)
            uploads[client] = mean_scores(net, data, client, average)
        sent = uploads
    return nets, sent, terms


def received_by(federation, client):
    message = federation.server.broadcast(client, 9)
    return dict(zip(message.classes.tolist(), message.scores, strict=True))


CASES = {
    "one round": (PARTIAL[:1], [tiny_encoder], {}),
    "three rounds": (PARTIAL, [tiny_encoder], {}),
    "widths": (PARTIAL, [tiny_encoder, wide_encoder], {}),
    "probabilities": (PARTIAL[:2], [tiny_encoder], {"average": "probabilities"}),
    "by samples": (PARTIAL[:2], [tiny_encoder], {"by_samples": True}),
}


@pytest.mark.parametrize(("cohorts", "encoders", "options"), CASES.values(), ids=CASES)
def test_rounds_equal_the_restatement(cohorts, encoders, options):
    federation = run(partial(METHOD, **options), len(cohorts), cohorts=cohorts, encoder=encoders)
    nets, sent, terms = restate(cohorts, encoders, **options)
    for client, net in enumerate(nets):
        assert_same(named(federation.client_model(client)), named(net), atol=1e-6)
        inputs, labels = Toy().tensors(client, "test")
        with torch.no_grad():
            expected = float(F.cross_entropy(net(inputs), labels))
        assert federation.test_scores[client].loss == pytest.approx(expected, abs=1e-5)
        own = set(Toy().labels[client]) if any(client in cohort for cohort in cohorts) else set(range(CLASSES))
        targets = left_out(sent, client, options.get("by_samples", False))
        expected = {c: mean for c, mean in targets.items() if c in own}
        found = received_by(federation, client)
        assert found.keys() == expected.keys()
        for c, mean in expected.items():
            torch.testing.assert_close(found[c], mean, rtol=0, atol=1e-6)
    assert (terms > 0) == (len(cohorts) > 1)


@pytest.mark.parametrize("engine", [TrainerEngine, partial(VectorizedEngine, forward="vmap")])
def test_every_engine_gives_the_same(engine):
    federation = run(METHOD, len(PARTIAL), cohorts=PARTIAL, encoder=[tiny_encoder, linear_encoder], engine=engine())
    nets, _, _ = restate(PARTIAL, [tiny_encoder, linear_encoder])
    for client, net in enumerate(nets):
        assert_same(named(federation.client_model(client)), named(net), atol=1e-5)


def test_without_gamma_it_is_local_training_bit_by_bit():
    got = run(partial(FD, lr=LR, epochs=1, gamma=0.0), 2)
    expected = run(partial(LocalOnly, lr=LR, epochs=1), 2)
    for client in range(CLIENTS):
        assert_same(named(got.client_model(client)), named(expected.client_model(client)))


def test_of_two_clients_each_gets_what_the_other_sent():
    federation = run(METHOD, 1, cohorts=[[1, 2]])
    _, sent, _ = restate([[1, 2]])
    assert received_by(federation, 1).keys() == {2, 3}  # of 1, 2, 3 the other has 0, 2, 3
    for client, other in ((1, 2), (2, 1)):
        for c, scores in received_by(federation, client).items():
            torch.testing.assert_close(scores, sent[other][c][0].float(), rtol=0, atol=1e-6)


def test_a_client_alone_in_its_cohort_has_no_targets_and_others_have_its():
    federation = run(METHOD, 1, cohorts=[[3]])
    assert received_by(federation, 3) == {}
    assert received_by(federation, 0).keys() == {3, 4}
    alone, local = run(METHOD, 2, cohorts=[[3]]), run(partial(LocalOnly, lr=LR, epochs=EPOCHS), 2, cohorts=[[3]])
    assert_same(named(alone.client_model(3)), named(local.client_model(3)), atol=1e-7)


def test_a_class_of_one_client_gives_it_no_target():
    federation = run(METHOD, 1)
    assert 4 not in received_by(federation, 3)
    assert 3 in received_by(federation, 3)


def test_who_was_in_the_last_cohort_is_known_in_another_fit():
    """Its rounds begin at 0 again: client 0 was in round 1 of the first fit, and not in round 1 of the second."""
    federation = run(METHOD, 2, cohorts=[[0, 1, 2]])
    quiet_trainer(2, GivenCohorts([3, 4], [1, 2, 4])).fit(federation, datamodule=Toy())
    server = federation.server
    total, sent = server.total.get(0), server.broadcast(0, 2)
    expected = (total["sums"] / total["weights"][:, None])[sent.classes]
    assert sent.classes.tolist() == [0, 1]
    torch.testing.assert_close(sent.scores, expected.float(), rtol=0, atol=1e-6)


def test_a_round_without_updates_changes_nothing():
    server = run(METHOD, 1).server
    before = server.broadcast(1, 1).scores
    server.aggregate()
    assert torch.equal(server.broadcast(1, 1).scores, before)


@pytest.mark.parametrize(("by_samples", "count"), [(False, 0), (True, 8)])
def test_bytes(by_samples, count):
    """A class costs C scores and its number; two of five classes each way, and nothing down in the first round."""
    loop = GivenCohorts([0, 4])  # classes 0, 1 and 0, 1
    run(partial(METHOD, by_samples=by_samples), 1, loop=loop, limit_val_batches=0)
    assert loop.traffic.up == {"statistics": 2 * 2 * (4 * CLASSES + 8 + count)}
    assert loop.traffic.down == {"statistics": 0}
    loop = GivenCohorts([0, 4])
    run(METHOD, 2, loop=loop, limit_val_batches=0)
    assert loop.traffic.down == {"statistics": 2 * 2 * (4 * CLASSES + 8)}


def test_novel_clients_are_evaluated_on_their_first_model():
    data = Toy(novel_clients=1)
    federation = run(METHOD, 1, data=data, cohorts=[range(CLIENTS - 1)])
    assert not any(name.startswith("others") for name in federation.models[0].state_dict())
    [novel] = data.novel
    assert_same(named(federation.client_model(novel)), named(first_nets([tiny_encoder])[novel]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1.0}, "gamma must be"),
        ({"gamma": float("nan")}, "gamma must be"),
        ({"average": "logits"}, "average must be one of"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FD(tiny_encoder((INPUTS,)), CLASSES, **options)
