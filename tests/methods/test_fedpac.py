"""FedPAC against methods.md section 1, restated in plain torch with outer products and an exhaustive QP."""

import itertools
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, score, sgd
from _helpers.toy import CLASSES, CLIENTS, FEATURES, SEED, Toy, assert_same, run
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.methods import FedPAC

EPOCHS, LR, HEAD_LR = 2, 0.05, 0.1


@dataclass
class Restated:
    """FedPAC's server and clients."""

    data: Toy
    alignment: float = 1.0
    combination: bool = True
    threshold: float = 1e-3
    seed: int = SEED
    encoder: dict[str, Tensor] = field(init=False)
    heads: list[dict[str, Tensor]] = field(init=False)
    centroids: dict[int, Tensor] = field(default_factory=dict)
    weights: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.net = first_net(self.seed)
        self.encoder = named(self.net, "encoder.")
        self.heads = [named(self.net, "head.") for _ in range(CLIENTS)]

    def model(self, client: int):
        net = copy_of(self.net)
        put(net, self.encoder | self.heads[client])
        return net

    def play(self, round: int, cohort: list[int]) -> None:
        trained, statistics, sums = [], [], {}
        for client in cohort:
            net = self.model(client)
            inputs, labels = self.data.tensors(client)
            with torch.no_grad():
                received = net.encoder(inputs).double()
            statistics.append(moments(received, labels))  # 1
            steps = batches(self.data, client, round, "fit/0", 1, self.seed)
            sgd(net, steps, list(net.head.parameters()), HEAD_LR)  # 2
            targets = self.targets(received, labels)

            def loss(net, x, y, targets=targets):
                features = net.encoder(x)
                value = F.cross_entropy(net.head(features), y)
                if targets:
                    distances = [((f - targets[int(c)]) ** 2).mean() for f, c in zip(features, y, strict=True)]
                    value = value + self.alignment * torch.stack(distances).mean()
                return value

            steps = batches(self.data, client, round, "fit/1", EPOCHS, self.seed)
            sgd(net, steps, list(net.encoder.parameters()), LR, loss)  # 3
            trained.append(named(net))
            with torch.no_grad():
                features = net.encoder(inputs)
            for c in set(labels.tolist()):  # 4, as n_kc times the class mean
                total, count = sums.get(c, (0.0, 0))
                sums[c] = (total + features[labels == c].double().sum(0), count + int((labels == c).sum()))
        sizes = [len(self.data.labels[client]) for client in cohort]
        encoders = [{n: p for n, p in net.items() if n.startswith("encoder.")} for net in trained]
        self.encoder = mean_of(encoders, sizes)  # (18)
        if self.alignment > 0:
            self.centroids = {c: (total / count).float() for c, (total, count) in sums.items()}  # (19)
        heads = [{n: p for n, p in net.items() if n.startswith("head.")} for net in trained]
        if self.combination:
            self.weights = [exhaustive_weights(i, statistics, sizes, self.threshold) for i in range(len(cohort))]
            heads = [mean_of(heads, row) for row in self.weights]  # (4)
        for client, head in zip(cohort, heads, strict=True):
            self.heads[client] = head

    def targets(self, received: Tensor, labels: Tensor) -> dict[int, Tensor]:
        """What the features of each class are pulled to."""
        if self.alignment == 0 or not self.centroids:
            return {}
        own = {c: received[labels == c].mean(0).float() for c in set(labels.tolist())}
        return own | {c: mean for c, mean in self.centroids.items() if c in own}


def moments(features: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """h_k, (C, d), and V_k (44), with d x d outer products and sums over single samples."""
    h, variance = torch.zeros(CLASSES, FEATURES, dtype=torch.float64), 0.0
    for c in range(CLASSES):
        own = [f for f, y in zip(features, labels.tolist(), strict=True) if y == c]
        if own:
            share = len(own) / len(labels)
            mean = sum(own) / len(own)
            second = sum(torch.outer(f, f) for f in own) / len(own)
            h[c] = share * mean
            variance += float(share * second.trace() - share**2 * torch.outer(mean, mean).trace())
    return h, variance


def exhaustive_weights(
    i: int, statistics: list[tuple[Tensor, float]], sizes: list[int], threshold: float
) -> list[float]:
    """Minimise (46) by trying every set of clients with positive weight; then cut and renormalize."""
    m = len(sizes)
    d = torch.zeros(m, m, dtype=torch.float64)
    for j, k in itertools.product(range(m), repeat=2):
        left, right = statistics[i][0] - statistics[j][0], statistics[i][0] - statistics[k][0]
        d[j, k] = sum(torch.outer(a, b).trace() for a, b in zip(left, right, strict=True))
    quadratic = d + torch.diag(torch.tensor([v / n for (_, v), n in zip(statistics, sizes, strict=True)]).double())
    best: tuple[float, list[float]] | None = None
    for size in range(1, m + 1):
        for chosen in map(list, itertools.combinations(range(m), size)):
            system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size] = 2 * quadratic[chosen][:, chosen]
            system[:size, size], system[size, :size] = 1.0, 1.0
            right = torch.zeros(size + 1, dtype=torch.float64)
            right[size] = 1.0
            found = torch.linalg.solve(system, right)[:size]
            if bool((found >= 0).all()):
                a = torch.zeros(m, dtype=torch.float64)
                a[chosen] = found
                value = float(a @ quadratic @ a)
                if best is None or value < best[0]:
                    best = value, a.tolist()
    assert best is not None
    kept = [a if a >= threshold else 0.0 for a in best[1]]
    return [a / sum(kept) for a in kept]


def assert_equals_restatement(cohorts: list[list[int]], **options: float | bool) -> Restated:
    """Play both and compare every tensor."""
    method = partial(FedPAC, lr=LR, epochs=EPOCHS, head_lr=HEAD_LR, **options)
    federation = run(method, len(cohorts), cohorts=cohorts, data=Toy())
    plain = Restated(Toy(), **options)
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    assert (
        federation.server.has_client_weights()
        == plain.combination
        == (federation.server.aggregation_weights is not None)
    )
    if plain.combination:
        mixture = federation.server.aggregation_weights
        assert mixture.clients == tuple(cohorts[-1])
        torch.testing.assert_close(mixture.weights, torch.tensor(plain.weights).double(), rtol=0, atol=1e-5)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(plain.model(client)), atol=1e-6)
    server = federation.server
    if plain.alignment > 0:
        assert server.present.tolist() == [c in plain.centroids for c in range(CLASSES)]
        for c, mean in plain.centroids.items():
            torch.testing.assert_close(server.centroids[c], mean, rtol=0, atol=1e-6)
    for client, got in federation.validation_scores.items():
        assert (got.accuracy, got.loss) == pytest.approx(score(plain.model(client), plain.data, client, "validation"))
    return plain


ONE_ROUND = [[0, 1, 2, 3, 4]]
# Client 3 alone holds class 4: in its first round, the second, that class has no global centroid. Client 4 stays out.
TWO_ROUNDS = [[0, 1, 2], [0, 2, 3]]


@pytest.mark.parametrize("cohorts", [ONE_ROUND, TWO_ROUNDS, [[0, 1, 2, 3, 4]] * 2], ids=["one", "partial", "two"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"combination": False},
        {"alignment": 0.0},
        {"alignment": 0.0, "combination": False},
        {"alignment": 2.5},
        {"threshold": 0.2},
    ],
    ids=["both", "alignment", "combination", "neither", "lambda", "threshold"],
)
def test_rounds_equal_the_restatement(cohorts, options):
    assert_equals_restatement(cohorts, **options)


def test_the_case_is_not_trivial():
    """The heads are really mixed, the weights really differ, and a centroid is really missing."""
    plain = Restated(Toy())
    plain.play(0, TWO_ROUNDS[0])
    assert 4 not in plain.centroids
    assert set(plain.centroids) == {0, 1, 2, 3}
    plain.play(1, TWO_ROUNDS[1])
    assert any(0.05 < a < 0.95 for row in plain.weights for a in row)
    assert plain.weights[0] != pytest.approx(plain.weights[1], abs=1e-2)


def test_a_client_outside_the_cohort_keeps_its_head_and_takes_the_new_encoder():
    start = first_net()
    federation = run(partial(FedPAC, lr=LR, epochs=1), 2, cohorts=TWO_ROUNDS)
    outside = federation.client_model(4)
    assert_same(named(outside, "head."), named(start, "head."))
    assert not torch.equal(outside.encoder[0].weight, start.encoder[0].weight)


def test_a_class_that_nobody_of_the_cohort_holds_has_no_centroid():
    federation = run(partial(FedPAC, lr=LR, epochs=1), 2, cohorts=[[1, 2, 3], [0, 4]])
    assert federation.server.present.tolist() == [True, True, False, False, False]
    assert all(bool(tensor.isfinite().all()) for tensor in federation.server.buffers())


@pytest.mark.parametrize(
    ("options", "message"), [({"alignment": -1.0}, "alignment"), ({"epochs": 0}, "epochs must be at least 1")]
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(partial(FedPAC, **options))
