"""CFL against plain torch, its splits against all bipartitions and scipy's clustering."""

import itertools
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, tiny_encoder, whole_state
from scipy.cluster.hierarchy import cut_tree
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import squareform

from pfl_lightning import FederatedLoop, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import CFL, FedAvg
from pfl_lightning.methods.cfl import bipartition, cosines

LR, EPOCHS = 0.05, 2
COHORTS = [[0, 1, 2, 3], [3, 1, 0, 2], [4, 0, 2], [4, 1, 3, 0], [0, 1, 2, 3, 4]]  # client 4 is late: split in round 1
METHOD = partial(CFL, lr=LR, epochs=EPOCHS)
SPLITS = partial(METHOD, eps_1=1e3, eps_2=0.0, first_split=1)


def vector(state):
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def cosine(one, other):
    return float(one @ other / (one.norm() * other.norm()))


def best_bipartition(updates):
    """Of all ways to split, that with the least largest cosine similarity between the parts; the first client's."""
    found = []
    for size in range(1, len(updates)):
        for rest in itertools.combinations(range(1, len(updates)), size - 1):
            first = {0, *rest}
            pairs = itertools.product(first, set(range(len(updates))) - first)
            found.append((max(cosine(updates[i], updates[j]) for i, j in pairs), sorted(first)))
    return min(found)[1]


def restate(data, cohorts, first_split=1):
    """Every client's model after the rounds, and who shares one; each cluster of more than two is split when it may."""
    start = named(first_net())
    model_of = dict.fromkeys(range(CLIENTS), "")  # names of nodes: a part is its parent's name and a letter
    models, directions = {"": start}, {}
    for round, cohort in enumerate(cohorts):
        trained = {}
        for client in cohort:
            net = copy_of(first_net())
            put(net, models[model_of[client]])
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR)
            trained[client] = named(net)
        change = {k: vector(trained[k]) - vector(models[model_of[k]]) for k in cohort}
        groups = {node: [k for k in cohort if model_of[k] == node] for node in model_of.values()}
        for node, members in groups.items():
            if not members:
                continue
            if node + "a" in models:  # it was split before
                for k in members:
                    near = max("ab", key=lambda part, k=k, node=node: cosine(change[k], directions[node + part]))
                    model_of[k] = node + near
                continue
            parts = {node: members}
            if round >= first_split and len(members) > 2:
                first = best_bipartition([change[k] for k in members])
                parts = {node + "a": [members[i] for i in first]}
                parts[node + "b"] = [k for k in members if k not in parts[node + "a"]]
            for name, own in parts.items():
                sizes = [len(data.tensors(k)[1]) for k in own]
                mean = mean_of([trained[k] for k in own], sizes)
                directions[name] = vector(mean) - vector(models[node])
                models[name] = mean
                model_of |= dict.fromkeys(own, name)
    return [models[model_of[client]] for client in range(CLIENTS)], model_of


@pytest.mark.parametrize("rounds", range(1, len(COHORTS) + 1))
def test_rounds_equal_the_restatement(rounds):
    data = Toy()
    federation = run(SPLITS, rounds, cohorts=COHORTS, data=data)
    models, names = restate(data, COHORTS[:rounds])
    for client, model in enumerate(models):
        assert_same(named(federation.client_model(client)), model, atol=2e-6)
    places = [int(federation.server.places.get(client)["node"]) for client in range(len(data.labels))]
    for one, other in itertools.combinations(range(CLIENTS), 2):
        assert (places[one] == places[other]) == (names[one] == names[other])


def test_the_case_has_late_clients_and_several_splits():
    data = Toy()
    before, after = (restate(data, COHORTS[:rounds])[1] for rounds in (2, 3))
    assert before[4] == ""
    assert len(set(before.values())) == 3
    assert after[4] in ("a", "b")
    assert max(map(len, restate(data, COHORTS)[1].values())) == 2  # a part was split again


@pytest.mark.parametrize(
    "options",
    [{}, {"eps_1": 0.0}, {"eps_2": 1e3}, {"gamma_max": 1.0}, {"first_split": 9}],
    ids=["default", "mean", "longest", "gamma", "round"],
)
def test_without_a_split_it_is_fedavg(options):
    split = {"eps_1": 1e3, "eps_2": 0.0, "first_split": 0, **options} if options else {}
    got = run(partial(METHOD, **split), 3, cohorts=COHORTS)
    expected = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 3, cohorts=COHORTS)
    assert float(got.trainer.callback_metrics["clusters"]) == 1
    for client in range(CLIENTS):
        assert_same(got.client_model(client).state_dict(), expected.client_model(client).state_dict())


def updates_of(seed, clients):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(clients, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("clients", [2, 3, 6, 8])
def test_a_bipartition_is_the_best_of_all_and_scipys(clients):
    for seed in range(10):
        updates = updates_of(seed, clients)
        alpha = cosines(updates @ updates.T)
        torch.testing.assert_close(alpha, cosines_in_loops(updates))
        assert bipartition(alpha, "single").nonzero().flatten().tolist() == best_bipartition(list(updates))
        distances = squareform((1 - alpha).fill_diagonal_(0).numpy(), checks=False)
        for linkage in ("single", "complete"):
            labels = torch.from_numpy(cut_tree(scipy_linkage(distances, linkage), n_clusters=2)[:, 0])
            assert torch.equal(bipartition(alpha, linkage), labels == labels[0])


def cosines_in_loops(updates):
    return torch.tensor([[cosine(one, other) for other in updates] for one in updates], dtype=torch.float64)


def permuted(inputs, targets):
    """Clients 2 and 3 name the two classes the other way round."""
    targets[24:48] = 1 - targets[24:48]


@pytest.mark.parametrize("options", [{}, {"linkage": "complete", "by_samples": False}], ids=["paper", "published code"])
def test_groups_that_disagree_separate_and_then_each_learns(options):
    data = Toy([[0] * 6 + [1] * 6] * 4, change=permuted)
    method = partial(CFL, lr=0.1, epochs=2, eps_1=0.4, eps_2=0.3, first_split=2, gamma_max=0.5, **options)
    federation = run(method, 8, cohorts=[range(4)], data=data, limit_val_batches=0)
    places = [int(federation.server.places.get(client)["node"]) for client in range(len(data.labels))]
    assert places[0] == places[1] != places[2] == places[3]
    group = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0, 1.0]] * 2, dtype=torch.float64) / 2
    assert torch.equal(federation.server.aggregation_weights.weights, group)
    for client in range(4):
        inputs, labels = data.tensors(client)
        right = federation.client_model(client)(inputs).argmax(1) == labels
        assert float(right.double().mean()) > 0.9


def test_novel_clients_get_the_model_from_before_the_first_split():
    data = Toy(novel_clients=1)
    until = run(SPLITS, 1, data=data, loop=FederatedLoop(), limit_val_batches=0)
    federation = run(SPLITS, 4, data=Toy(novel_clients=1), loop=FederatedLoop(), limit_val_batches=0)
    assert float(federation.trainer.callback_metrics["clusters"]) > 1
    client = data.novel[0]
    assert_same(named(federation.client_model(client)), named(until.client_model(client)))


def test_engines_agree():
    one, many = (run(SPLITS, 4, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_running_statistics_are_averaged_and_do_not_count_in_norms():
    data = Toy([[0] * 6 + [1] * 6] * 4, batch_size=4)
    federation = run(partial(SPLITS, lr=1e-6), 2, cohorts=[range(4)], data=data, encoder=normed_encoder)
    assert 0 < float(federation.trainer.callback_metrics["cluster/0/longest"]) < 1e-3
    models = federation.server.models.as_state()
    assert models["encoder.1.running_mean"].shape[0] == 3
    assert int(models["encoder.1.num_batches_tracked"][1]) == 2 * 2 * 3  # rounds, epochs, batches


def test_logged_norms_are_those_of_the_updates():
    data = Toy()
    federation = run(METHOD, 1, cohorts=COHORTS, data=data)
    start = first_net()
    changes = []
    for client in COHORTS[0]:
        net = copy_of(start)
        sgd(net, batches(data, client, 0, "fit/0", EPOCHS), list(net.parameters()), LR)
        changes.append(vector(named(net)) - vector(named(start)))
    sizes = torch.tensor([len(data.tensors(k)[1]) for k in COHORTS[0]]).double()
    mean = (torch.stack(changes) * (sizes / sizes.sum())[:, None]).sum(0).norm()
    logged = federation.trainer.callback_metrics
    assert float(logged["cluster/0/mean"]) == pytest.approx(float(mean), rel=1e-4)
    assert float(logged["cluster/0/longest"]) == pytest.approx(max(float(c.norm()) for c in changes), rel=1e-4)


def test_equal_updates_of_length_zero_are_no_numbers_apart():
    assert torch.equal(cosines(torch.zeros(3, 3).double()), torch.zeros(3, 3).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps_1": -1.0}, "eps_1 must be"),
        ({"eps_2": float("nan")}, "eps_2 must be"),
        ({"gamma_max": 2.0}, "gamma_max must be between 0 and 1"),
        ({"first_split": -1}, "first_split must be"),
        ({"linkage": "ward"}, "linkage must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        CFL(tiny_encoder((6,)), 5, **options)
