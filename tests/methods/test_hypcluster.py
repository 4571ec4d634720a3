"""HypCluster and IFCA against plain torch, and FedAvg."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, score, sgd
from _helpers.resume import play
from _helpers.toy import CLIENTS, SEED, Toy, assert_same, normed_encoder, own_model, run, tiny_encoder, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import FedAvg, HypCluster
from pfl_lightning.methods._bank import row_of
from pfl_lightning.methods.hypcluster import Choice
from pfl_lightning.seeding import derive_seed

LR, EPOCHS, CLUSTERS = 0.05, 2, 3
COHORTS = [[0, 2, 3], [1, 2, 4], [3, 0]]
FIRST = {}


class Recorded(HypCluster):
    """Keeps the first models of the server."""

    def configure_aggregator(self, num_clients):
        server = super().configure_aggregator(num_clients)
        FIRST["bank"] = {name: tensor.clone() for name, tensor in server.bank.as_state().items()}
        return server


class Forced(Recorded):
    """Even clients choose the first cluster, odd ones the second."""

    def choose(self, context):
        for _, tensor in self.bank.as_state().items():
            assert len(tensor) == self.clusters
        put(self, row_of(self.bank.as_state(), context.client % 2))
        return Choice(context.client % 2)


FIT = partial(Recorded, lr=LR, epochs=EPOCHS, clusters=CLUSTERS)


def best(nets, data, client):
    """The first of the models with the least loss on the client's training samples."""
    losses = [score(net.eval(), data, client, "train")[1] for net in nets]
    return losses.index(min(losses))


def restate(data, choose, by_samples=True, clustered=("encoder.", "head.")):
    """The models after the rounds, from the server's first ones, and who chose which."""
    nets = [first_net() for _ in range(len(FIRST["bank"]["head.bias"]))]
    for j, net in enumerate(nets):
        put(net, row_of(FIRST["bank"], j))
    choices = []
    for round, cohort in enumerate(COHORTS):
        trained, sizes = [], []
        choices.append([choose(nets, data, client) for client in cohort])
        for client, cluster in zip(cohort, choices[-1], strict=True):
            local = copy_of(nets[cluster])
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            trained.append(named(local))
            sizes.append(len(data.labels[client]) if by_samples else 1)
        everywhere = mean_of(trained, sizes)
        for j, net in enumerate(nets):
            mine = [i for i, cluster in enumerate(choices[-1]) if cluster == j]
            own = mean_of([trained[i] for i in mine], [sizes[i] for i in mine]) if mine else named(net)
            put(net, {name: (own if name.startswith(clustered) else everywhere)[name] for name in own})
    return nets, choices


@pytest.mark.parametrize("by_samples", [True, False])
@pytest.mark.parametrize("clustered", [("encoder.*", "head.*"), ("head.*",)], ids=["whole models", "heads"])
def test_rounds_equal_the_restatement(by_samples, clustered):
    data = Toy()
    fit = partial(FIT, by_samples=by_samples, clustered=clustered)
    federation = run(fit, len(COHORTS), cohorts=COHORTS, data=data)
    parts = tuple(pattern.removesuffix("*") for pattern in clustered)
    nets, choices = restate(data, best, by_samples, parts)
    assert len({cluster for chosen in choices for cluster in chosen}) > 1
    for j, net in enumerate(nets):
        got = {**federation.server.weights.as_state(), **row_of(federation.server.bank.as_state(), j)}
        assert_same(dict(sorted(got.items())), dict(sorted(named(net).items())), atol=1e-6)
    for client in range(CLIENTS):
        net = nets[best(nets, data, client)]
        assert_same(named(own_model(federation, client)), named(net), atol=1e-6)
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(net, data, client, "test"), abs=1e-5)
    sizes = [float(choices[-1].count(j)) for j in range(CLUSTERS)]
    assert [float(federation.trainer.callback_metrics[f"cluster/{j}"]) for j in range(CLUSTERS)] == sizes


def test_one_cluster_is_fedavg():
    got = run(partial(FIT, clusters=1), 3, cohorts=COHORTS)
    expected = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 3, cohorts=COHORTS)
    assert_same(row_of(got.server.bank.as_state(), 0), expected.server.weights.as_state())
    assert got.test_scores == expected.test_scores


def test_forced_choices_are_separate_runs_and_a_model_that_nobody_chooses_stays():
    data = Toy()
    federation = run(partial(Forced, lr=LR, epochs=EPOCHS, clusters=3), len(COHORTS), cohorts=COHORTS, data=data)
    nets, _ = restate(data, lambda nets, data, client: client % 2)
    bank = federation.server.bank.as_state()
    for j in (0, 1):
        assert_same(row_of(bank, j), named(nets[j]), atol=1e-6)
    assert_same(row_of(bank, 2), row_of(FIRST["bank"], 2))
    sizes = [float(federation.trainer.callback_metrics[f"cluster/{j}"]) for j in range(3)]
    assert sizes == [sum(client % 2 == j for client in COHORTS[-1]) for j in range(3)]  # logged, the 0, too
    assert sizes[2] == 0
    weights = federation.server.aggregation_weights
    assert weights.clients == (3, 0)
    assert torch.equal(weights.weights, torch.eye(2, dtype=torch.float64))


def test_starts_differ_and_come_from_the_seed():
    quick = partial(run, partial(FIT, epochs=1), cohorts=[[0]], limit_val_batches=0)
    quick()
    first = FIRST["bank"]
    assert_same(row_of(first, 0), named(first_net()))
    for one, other in ((0, 1), (1, 2)):
        assert not any(torch.equal(tensor[one], tensor[other]) for tensor in first.values())
    quick()
    assert_same(FIRST["bank"], first)
    quick(seed=3)
    assert not torch.equal(FIRST["bank"]["head.bias"][1], first["head.bias"][1])


def test_encoders_are_made_once_more_for_further_clusters():
    """What an encoder's constructor draws is drawn for each cluster; of a module there is one set of weights."""

    def large(input_shape):
        encoder = tiny_encoder(input_shape)
        nn.init.normal_(encoder[0].weight, mean=5)
        return encoder

    quick = partial(run, partial(FIT, epochs=1), cohorts=[[0]], limit_val_batches=0)
    quick(encoder=large)
    for number in (1, 2):
        torch.manual_seed(derive_seed(SEED, "further weights", 0, number))
        assert_same(
            {n: t for n, t in row_of(FIRST["bank"], number).items() if n.startswith("encoder.")},
            {f"encoder.{n}": t for n, t in large((6,)).state_dict().items()},
        )
    quick(encoder=large((6,)))
    mean = FIRST["bank"]["encoder.0.weight"].mean((1, 2))
    assert mean[0] > 4
    assert mean[1:].abs().max() < 1  # torch's layers draw their usual weights


def test_frozen_normalization_begins_alike_in_all_clusters():
    """A reset would leave pre-trained weights beside first running statistics."""
    encoder = normed_encoder((6,))
    norm = next(layer for layer in encoder.modules() if isinstance(layer, nn.BatchNorm1d))
    norm.requires_grad_(False)
    norm.running_mean.fill_(3)
    aggregator = FIT(encoder, 5).configure_aggregator(CLIENTS)
    means = [value for name, value in aggregator.bank.as_state().items() if name.endswith("running_mean")]
    assert all(bool((value == 3).all()) for value in means)
    assert means


def restate_start(data):
    """The models that the k-means++ start finds, and whose they are."""
    nets, found, first = [], [], first_net()
    for round, cohort in enumerate(COHORTS):
        draws = [
            torch.rand((), generator=torch.Generator().manual_seed(derive_seed(SEED, "first cluster", 0, client)))
            for client in cohort
        ]
        losses = [min((score(net, data, client, "train")[1] for net in nets), default=0) for client in cohort]
        worst = cohort[max(range(len(cohort)), key=(losses if nets else draws).__getitem__)]
        net = copy_of(first)
        sgd(net, batches(data, worst, round, "fit/0", EPOCHS), list(net.parameters()), LR)
        nets.append(net)
        found.append(worst)
    return nets, found


def test_the_kmeans_start_takes_the_models_of_those_served_worst():
    data = Toy()
    federation = run(partial(FIT, start="kmeans++"), 2, cohorts=COHORTS, data=data)
    nets, found = restate_start(data)
    assert len(set(found)) > 1
    bank = federation.server.bank.as_state()
    for j in (0, 1):
        assert_same(row_of(bank, j), named(nets[j]), atol=1e-6)
    assert_same(row_of(bank, 2), named(first_net()))  # not found yet, and nobody's
    assert float(federation.trainer.callback_metrics["cluster/found"]) == 2
    for client in range(CLIENTS):
        assert_same(named(own_model(federation, client)), named(nets[best(nets[:2], data, client)]), atol=1e-6)
    whole = run(partial(FIT, start="kmeans++"), 4, cohorts=[*COHORTS, [0, 1, 2, 3, 4]], data=data)
    chosen = [best(nets, data, client) for client in range(CLIENTS)]
    for j in range(CLUSTERS):
        assert float(whole.trainer.callback_metrics[f"cluster/{j}"]) == chosen.count(j)


def test_who_is_served_by_no_model_is_served_worst():
    """Its loss is infinite, which is no reason to leave it out."""

    class Overflows(HypCluster):
        def _losses(self, context, rows):
            return [math.inf if context.client == 2 else 1.0] * rows

    federation = run(partial(Overflows, lr=LR, epochs=1, clusters=2, start="kmeans++"), 2, cohorts=[[0, 1, 2]])
    data, net = Toy(), first_net()
    sgd(net, batches(data, 2, 1, "fit/0", 1), list(net.parameters()), LR)
    assert_same(row_of(federation.server.bank.as_state(), 1), named(net), atol=1e-6)


def test_novel_clients_take_what_the_kmeans_start_has_found():
    data = Toy(novel_clients=1)
    federation = run(partial(HypCluster, lr=LR, epochs=1, start="kmeans++"), 1, cohorts=[[0, 1, 2]], data=data)
    found = row_of(federation.server.bank.as_state(), 0)
    assert_same(named(federation.client_model(data.novel[0])), found)
    assert not torch.equal(found["head.bias"], first_net().head.bias)


def test_permuted_labels_separate_by_the_kmeans_start():
    def change(inputs, targets):
        targets[24:48] = 1 - targets[24:48]  # the training samples of clients 2 and 3

    group = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0, 1.0]] * 2, dtype=torch.float64) / 2
    fit = partial(HypCluster, lr=0.1, epochs=2, clusters=2, start="kmeans++")
    for seed in range(3):
        data = Toy([[0] * 6 + [1] * 6] * 4, change=change)
        federation = run(fit, 4, cohorts=[range(4)], data=data, limit_val_batches=0, seed=seed)
        assert torch.equal(federation.server.aggregation_weights.weights, group)


def test_permuted_labels_separate():
    def change(inputs, targets):
        targets[24:48] = 1 - targets[24:48]  # the training samples of clients 2 and 3

    data = Toy([[0] * 6 + [1] * 6] * 4, change=change)
    fit = partial(HypCluster, lr=0.1, epochs=2, clusters=2)
    federation = run(fit, 5, cohorts=[range(4)], data=data, limit_val_batches=0, seed=3)
    weights = federation.server.aggregation_weights.weights
    group = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0, 1.0]] * 2, dtype=torch.float64) / 2
    assert torch.equal(weights, group)


def test_clients_that_never_train_choose_too():
    data = Toy(novel_clients=2)
    federation = run(FIT, 2, data=data, loop=FederatedLoop())
    bank = federation.server.bank.as_state()
    for client in data.novel:
        nets = [first_net() for _ in range(CLUSTERS)]
        for j, net in enumerate(nets):
            put(net, row_of(bank, j))
        assert_same(named(own_model(federation, client)), row_of(bank, best(nets, data, client)))


def test_the_bank_does_not_outlast_an_evaluation():
    federation = run(FIT, 1, limit_val_batches=0)
    federation.trainer.test(federation, federation.data, verbose=False)
    assert len(federation.models[0].bank) == 0


@pytest.mark.parametrize("start", ["draws", "kmeans++"])
def test_engines_agree(start):
    engine = VectorizedEngine(forward="vmap")
    options = {"data": Toy(batch_size=9), "encoder": normed_encoder, "cohorts": COHORTS}
    fit, rounds = partial(FIT, start=start, clusters=2), 2 if start == "draws" else 3
    got, expected = (run(fit, rounds, engine=e, **options) for e in (engine, SequentialEngine()))
    assert_same(whole_state(got), whole_state(expected), atol=5e-5)
    assert len(got.clients.models[0].bank) == 0


def test_what_is_refused():
    class Constant(nn.Module):
        out_features = 4

        def __init__(self, shape):
            super().__init__()
            self.weight = nn.Parameter(torch.full((shape[0], 4), 0.1))

        def forward(self, inputs):
            return inputs @ self.weight

    with pytest.raises(
        ConfigurationError, match=r"cluster 2 of Recorded would begin with the weights of the first one"
    ):
        run(partial(FIT, clustered=("encoder.*",)), encoder=Constant)
    with pytest.warns(UserWarning, match=r"cluster 2 of Recorded begins with the encoder of the first one"):
        run(FIT, encoder=Constant, limit_val_batches=0)
    with pytest.raises(ConfigurationError, match=r"start='kmeans\+\+' compares whole models"):
        run(partial(FIT, clustered=("head.*",), start="kmeans++"))
    with pytest.raises(ValueError, match="start must be one of"):
        run(partial(FIT, start="kmeans"))
    with pytest.raises(ConfigurationError, match="eval_model of Recorded must be one of"):
        run(partial(FIT, eval_model="trained"))
    with pytest.raises(ValueError, match="clusters"):
        run(partial(FIT, clusters=0))
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        run(partial(FIT, clustered=("trunk.*",)), encoder=tiny_encoder)


def test_a_checkpoint_of_another_number_of_clusters_is_refused(tmp_path):
    """One of them would be left out without a word."""
    play(tmp_path, 1, FIT)
    with pytest.raises(CheckpointError, match=f"has {CLUSTERS} clusters, this run 2: set clusters={CLUSTERS}"):
        play(tmp_path, 2, partial(FIT, clusters=2), ckpt_path=str(tmp_path / "last.ckpt"))


def test_more_clusters_than_clients_cannot_begin_at_clients():
    with pytest.raises(ConfigurationError, match=rf"{CLIENTS} clients for 9 clusters"):
        run(partial(HypCluster, clusters=9, start="kmeans++"), 1)
