"""FedFomo against plain torch, and local training."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, named, put, score, sgd
from _helpers.toy import CLASSES, CLIENTS, Toy, assert_same, normed_encoder, own_model, run, tiny_encoder, whole_state

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedFomo, LocalOnly
from pfl_lightning.methods.fedfomo import FedFomoAggregator, FedFomoUpdate

LR, EPOCHS = 0.05, 2
COHORTS = [[0, 2, 3], [1, 2, 4], [2, 0, 1]]
FIT = partial(FedFomo, lr=LR, epochs=EPOCHS)


def restate(data, fallback="own", normalized=False):
    """Own models, and P, after rounds in which everybody gets all other models of the last cohort."""
    own, base = ([named(first_net()) for _ in range(CLIENTS)] for _ in range(2))
    server, preferences, last, moved, lost = {}, torch.eye(CLIENTS, dtype=torch.float64), [], 0, 0
    for round, cohort in enumerate(COHORTS):
        uploads = {}
        for client in cohort:
            net = first_net()

            def loss(state, net=net, client=client):
                put(net, state)
                return score(net, data, client, "validation")[1]

            candidates = {client: own[client], **{j: server[j] for j in last if j != client}}
            gains = {}
            for j, state in candidates.items():
                distance = sum(((state[n] - base[client][n]) ** 2).sum() for n in state).sqrt()
                gains[j] = (loss(base[client]) - loss(state)) / float(distance + 1e-5)
            weights = {j: max(0.0, gain) for j, gain in gains.items()}
            total, summed = sum(weights.values()), abs(sum(gains.values()))
            lost += len([gain for gain in gains.values() if gain < 0])
            start = own[client] if fallback == "own" else base[client]
            if total > 0:
                moved += len([w for w in weights.values() if w > 0])
                start = {
                    name: b + sum(w / total * (candidates[j][name] - b) for j, w in weights.items())
                    for name, b in base[client].items()
                }
            for j, gain in gains.items():  # a loss counts, too
                preferences[client, j] += gain / (summed + (1e-9 if summed < 1e-9 else 0)) if normalized else gain
            base[client] = start
            put(net, start)
            local = copy_of(net)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            uploads[client] = own[client] = named(local)
        server |= uploads
        last = cohort
    assert moved > 5
    assert lost > 2
    return own, base, preferences


def dense(aggregator):
    """P, (m, m)."""
    found = torch.eye(aggregator.num_clients, dtype=aggregator.preferences.as_state()["sums"].dtype)
    for client, row in enumerate(found):
        for other, value in aggregator.gained_by(client).items():
            row[other] = value
    return found


@pytest.mark.parametrize(("fallback", "preference"), [("own", "raw"), ("base", "normalized")])
def test_rounds_equal_the_restatement(fallback, preference):
    data = Toy(validation=12)
    fit = partial(FIT, models=9, fallback=fallback, preference=preference)
    federation = run(fit, len(COHORTS), cohorts=COHORTS, data=data)
    own, base, preferences = restate(data, fallback, preference == "normalized")
    for client in range(CLIENTS):
        model = own_model(federation, client)
        assert_same(named(model), own[client], atol=1e-5)
        assert_same(model.base.as_state(), base[client], atol=1e-5)
        put(net := first_net(), own[client])
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(net, data, client, "test"), abs=1e-4)
    torch.testing.assert_close(dense(federation.server).double(), preferences, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("distance", "expected"), [("euclidean", 0.5 / 5), ("l1", 0.5 / 7)])
def test_a_gain_is_divided_by_the_distance(distance, expected):
    client = FedFomo(tiny_encoder((6,)), CLASSES, distance=distance)
    state = {name: value.clone() for name, value in client.base.as_state().items()}
    state["head.bias"][:2] += torch.tensor([3.0, -4.0])
    assert client.gain(1.0, 0.5, state) == pytest.approx(expected, rel=1e-4)
    assert client.gain(0.5, 1.0, state) == pytest.approx(-expected, rel=1e-4)
    assert client.gain(0.5, float("inf"), state) == client.gain(0.5, float("nan"), state) == 0


def test_the_own_model_alone_is_local_training():
    got, expected = (run(partial(method, lr=LR, epochs=1), 3, cohorts=COHORTS) for method in (One, LocalOnly))
    for client in range(CLIENTS):
        assert_same(named(own_model(got, client)), named(own_model(expected, client)))
    assert got.test_scores == expected.test_scores


class One(FedFomo):
    """Compares nobody."""

    def __init__(self, *args, **options):
        super().__init__(*args, models=1, **options)


def test_equal_models_move_nothing():
    class Still(FedFomo):
        def make_update(self, context, before):
            assert before[1].tolist() == [0.0] * len(before[0])
            return super().make_update(context, before)

    federation = run(partial(Still, lr=1e-12, weight_decay=0.0, epochs=1), 3, cohorts=COHORTS)
    first = named(first_net())
    for client in range(CLIENTS):
        assert_same(named(own_model(federation, client)), first)
    assert torch.equal(dense(federation.server), torch.eye(CLIENTS))


def server(**options):
    module = run(partial(FIT, **options), cohorts=[[0]], limit_val_batches=0).clients.models[0]
    return FedFomoAggregator(module, 6)


def updates(aggregator, cohort):
    for client in cohort:
        weights = {name: tensor + client for name, tensor in aggregator.models.initial.items()}
        gains = torch.tensor([1.0, 0.5])
        members = torch.tensor([client, (client + 1) % aggregator.num_clients])
        aggregator.receive(
            FedFomoUpdate(client=client, round=0, num_samples=3, weights=weights, members=members, gains=gains)
        )


def test_the_server_sends_those_that_have_helped():
    aggregator = server(models=3, exploration=0.0)
    assert aggregator.broadcast(0, 0).bank == {}
    updates(aggregator, [0, 1, 2, 4])
    assert aggregator.broadcast(0, 0).bank == {}  # until the round is over
    aggregator.aggregate()
    preferences = dense(aggregator)
    assert preferences[0].tolist() == [2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert not any(preferences[3, [0, 1, 2, 4, 5]])
    firsts, seconds = set(), set()
    for round in range(30):
        sent = aggregator.broadcast(0, round)
        assert len(set(sent.members.tolist())) == 2
        firsts.add(int(sent.members[0]))
        seconds.add(int(sent.members[1]))
        for row, member in enumerate(sent.members.tolist()):
            expected = aggregator.models.initial["head.bias"] + member
            assert torch.equal(sent.bank["head.bias"][row], expected)
    assert firsts == {1}  # which helped
    assert seconds == {2, 4}  # of the last cohort, and not itself; ties at random


@pytest.mark.parametrize("preference", ["raw", "normalized"])
def test_sums_equal_those_of_a_dense_matrix_bit_by_bit(preference):
    aggregator, generator = server(preference=preference), torch.Generator().manual_seed(0)
    expected = torch.eye(6)
    for round in range(20):
        for client in torch.randperm(6, generator=generator)[:4].tolist():
            others = [other for other in torch.randperm(6, generator=generator).tolist() if other != client]
            members = torch.tensor([client, *others[:2]])
            gains = torch.randn(3, generator=generator) * (torch.rand(3, generator=generator) > 0.4)
            aggregator.receive(
                FedFomoUpdate(
                    client=client,
                    round=round,
                    num_samples=3,
                    weights=aggregator.models.initial,
                    members=members,
                    gains=gains,
                )
            )
            total = gains.sum().abs()
            total = total + 1e-9 if total < 1e-9 else total
            expected[client, members] += gains / total if preference == "normalized" else gains
        aggregator.aggregate()
    assert torch.equal(dense(aggregator), expected)


def test_memory_grows_with_comparisons_and_not_with_pairs_of_clients():
    aggregator = FedFomoAggregator(FIT(tiny_encoder((6,)), CLASSES), 10**6)  # P would have 4 TB
    for _ in range(3):
        updates(aggregator, [0, 1, 10**6 - 1])
        aggregator.aggregate()
    state = aggregator.preferences.as_state()
    assert len(state["places"]) == len(state["sums"]) == 6
    assert aggregator.gained_by(10**6 - 1) == {0: 1.5, 10**6 - 1: 4.0}
    assert aggregator.gained_by(7) == {}


def test_exploration_ends():
    aggregator = server(models=2, exploration=0.5, exploration_decay=0.1)
    updates(aggregator, [0, 1, 2, 4])
    aggregator.aggregate()
    first = [set() for _ in range(8)]
    for round in range(8):
        for seed in range(20):
            aggregator.seed = seed
            first[round] |= set(aggregator.choose(0, round))
    assert first[0] == {1, 2, 4}
    assert first[5] == first[7] == {1}


def test_engines_agree():
    engine = VectorizedEngine(forward="vmap")
    options = {"data": Toy(batch_size=9), "encoder": normed_encoder, "cohorts": COHORTS}
    got, expected = (run(FIT, 3, engine=e, **options) for e in (engine, SequentialEngine()))
    assert_same(whole_state(got), whole_state(expected), atol=1e-4)


def test_an_evaluation_takes_no_models_of_others(monkeypatch):
    federation = run(FIT, 2, limit_val_batches=0)
    monkeypatch.setattr(FedFomoAggregator, "broadcast", None)
    federation.trainer.test(federation, federation.data, verbose=False)
    assert len(federation.models[0].bank) == 0


def test_what_is_refused():
    with pytest.raises(ConfigurationError, match="client 1 has none: set the data module's validation_share"):
        run(FIT, data=Toy(validation=[5, 0, 5, 5, 5]), cohorts=[[0, 2]])
    with pytest.raises(ValueError, match=r"must be between 0 and 1, got 1\.5"):
        run(partial(FIT, exploration=1.5))
    with pytest.raises(ConfigurationError, match="eval_model of FedFomo must be one of"):
        run(partial(FIT, eval_model="aggregated"))
    with pytest.raises(ValueError, match="models"):
        run(partial(FIT, models=0))
