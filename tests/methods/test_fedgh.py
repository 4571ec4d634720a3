"""FedGH (Yi et al. 2023) against plain torch; and what the servers that receive class means refuse."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, named, put, score, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    run,
    tiny_encoder,
)
from torch import Tensor

from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.methods import FedGH, FedProto
from pfl_lightning.methods._class_means import ClassMeansUpdate
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, SERVER_LR = 2, 0.05, 0.3
ONE, TWO = [tiny_encoder], [tiny_encoder, linear_encoder]
ALL, PARTIAL = [[0, 1, 2, 3, 4]] * 2, [[3, 0, 2], [1, 2]]


@dataclass
class Restated:
    """Every client's own network as its last training left it, and the server's head."""

    data: Toy
    encoders: list
    server_lr: float = SERVER_LR
    by_class: bool = False
    nets: list[Net] = field(default_factory=list)
    weight: Tensor = field(init=False)
    bias: Tensor = field(init=False)
    trained: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        first = []
        for index, make in enumerate(self.encoders):
            torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
            first.append(Net(make))
        self.nets = [copy_of(first[client % len(first)]) for client in range(CLIENTS)]
        self.weight, self.bias = first[0].head.weight.detach().clone(), first[0].head.bias.detach().clone()

    def head(self) -> dict[str, Tensor]:
        return {"head.weight": self.weight.clone(), "head.bias": self.bias.clone()}

    def play(self, round: int, cohort: list[int]) -> None:
        received, uploads = self.head(), []
        for client in cohort:
            net = self.nets[client]
            put(net, received)
            sgd(net, batches(self.data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR)
            inputs, labels = self.data.tensors(client)
            with torch.no_grad():
                features = net.encoder(inputs)
            uploads.append({c: features[labels == c].mean(0) for c in sorted(set(labels.tolist()))})
            self.trained.add(client)
        for means in uploads:
            for part in [{c: mean} for c, mean in means.items()] if self.by_class else [means]:
                self.step(part)

    def step(self, means: dict[int, Tensor]) -> None:
        """One step of gradient descent, with the gradient of the cross entropy written out."""
        weight, bias = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        for c, mean in means.items():
            error = torch.softmax(self.weight @ mean + self.bias, 0)
            error[c] -= 1.0  # d CE / d scores = softmax - one-hot
            weight += torch.outer(error, mean) / len(means)
            bias += error / len(means)
        self.weight, self.bias = self.weight - self.server_lr * weight, self.bias - self.server_lr * bias

    def evaluated(self, client: int) -> Net:
        """The network after its own training; before the first, its encoder under the server's head."""
        net = copy_of(self.nets[client])
        if client not in self.trained:
            put(net, self.head())
        return net


def play(cohorts, encoders=ONE, server_lr=SERVER_LR, server_steps="client"):
    """Play both."""
    plain = Restated(Toy(), encoders, server_lr, server_steps == "class")
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    method = partial(FedGH, lr=LR, epochs=EPOCHS, server_lr=server_lr, server_steps=server_steps)
    return run(method, len(cohorts), cohorts=cohorts, encoder=encoders, data=Toy()), plain


@pytest.mark.parametrize("encoders", [ONE, TWO], ids=["one encoder", "two encoders"])
@pytest.mark.parametrize("cohorts", [ALL[:1], ALL, PARTIAL], ids=["one", "two", "partial"])
def test_rounds_equal_the_restatement(cohorts, encoders):
    federation, plain = play(cohorts, encoders)
    got = {f"head.{name}": tensor for name, tensor in federation.server.head.state_dict().items()}
    assert_same(got, plain.head(), atol=1e-6)
    for client in range(CLIENTS):
        expected = plain.evaluated(client)
        assert_same(named(federation.client_model(client)), named(expected), atol=1e-6)
        for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
            found = (scores[client].accuracy, scores[client].loss)
            assert found == pytest.approx(score(expected, plain.data, client, part), abs=1e-5)


def test_the_server_may_take_a_step_for_each_class_mean():
    federation, plain = play(PARTIAL, server_steps="class")
    got = {f"head.{name}": tensor for name, tensor in federation.server.head.state_dict().items()}
    assert_same(got, plain.head(), atol=1e-6)
    _, other = play(PARTIAL)
    assert not torch.allclose(plain.weight, other.weight, atol=1e-2)


def test_the_cases_are_not_trivial():
    """The server's steps count, their order does, and the trained model is not that under the server's head."""
    _, plain = play(PARTIAL)
    _, slow = play(PARTIAL, server_lr=1e-6)
    assert not torch.allclose(plain.weight, slow.weight, atol=1e-2)
    _, turned = play([PARTIAL[0][::-1]])
    _, once = play(PARTIAL[:1])
    assert not torch.allclose(turned.weight, once.weight, atol=1e-5)
    assert not torch.allclose(plain.evaluated(1).head.weight, plain.weight, atol=1e-2)


def test_the_aggregated_model_is_the_own_encoder_under_the_servers_head():
    method = partial(FedGH, lr=LR, epochs=EPOCHS, server_lr=SERVER_LR, eval_model="aggregated")
    federation = run(method, 2, cohorts=PARTIAL)
    _, plain = play(PARTIAL)
    for client in range(CLIENTS):
        expected = copy_of(plain.nets[client])
        put(expected, plain.head())
        assert_same(named(federation.client_model(client)), named(expected), atol=1e-6)


def test_head_down_and_class_means_up():
    loop = GivenCohorts([0, 3], [1, 2, 3])
    run(partial(FedGH, epochs=1), 2, loop=loop, encoder=TWO, limit_val_batches=0)
    held = [len({*Toy().labels[client]}) for client in (0, 3, 1, 2, 3)]
    assert loop.traffic.up == {"statistics": sum(k * (FEATURES * 4 + 8 + 8) for k in held)}
    assert loop.traffic.down == {"weights": 5 * (FEATURES + 1) * CLASSES * 4}


def test_the_head_that_is_sent_changes_between_rounds_only():
    server = FedGH(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    sent = {name: tensor.clone() for name, tensor in server.broadcast(0, 0).weights.items()}
    server.receive(upload())
    assert_same(server.broadcast(1, 0).weights, sent)
    server.aggregate()
    assert not torch.equal(server.broadcast(1, 1).weights["head.bias"], sent["head.bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": -1.0}, "server_lr must be a finite number of at least 0"),
        ({"server_lr": float("inf")}, "server_lr must be a finite number of at least 0"),
        ({"server_steps": "classes"}, "server_steps must be one of .* did you mean 'class'"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedGH(tiny_encoder((6,)), CLASSES, **options)


# ---------------------------------------------------------------------- uploads of class means


def upload(client=7, **changes):
    """Means of classes 1 and 3."""
    means = torch.arange(2.0 * FEATURES).reshape(2, FEATURES)
    content = {"means": means, "classes": torch.tensor([1, 3]), "counts": torch.tensor([2, 6])}
    return ClassMeansUpdate(client=client, round=3, **{"num_samples": 8, **content, **changes})


BAD = {
    "nan": ({"means": torch.full((2, FEATURES), float("nan"))}, "means holds 8 non-finite values of 8"),
    "infinity": ({"means": torch.full((2, FEATURES), float("inf"))}, "means holds 8 non-finite"),
    "width": ({"means": torch.zeros(2, 3)}, r"means has shape \(2, 3\), expected \(2, 4\)"),
    "number": ({"means": torch.zeros(3, FEATURES)}, r"means has shape \(3, 4\), expected \(2, 4\)"),
    "counts": ({"counts": torch.tensor([8])}, r"counts has shape \(1,\), expected \(2,\)"),
    "column": ({"classes": torch.tensor([[1], [3]])}, r"classes has shape \(2, 1\), expected \(K,\)"),
    "scalar": ({"classes": torch.tensor(1), "means": torch.zeros(1, FEATURES), "counts": torch.ones(1)}, "classes has"),
    "unordered": ({"classes": torch.tensor([3, 1])}, r"classes is \[3, 1\], expected ascending"),
    "twice": ({"classes": torch.tensor([1, 1])}, r"classes is \[1, 1\], expected ascending"),
    "too large": (
        {"classes": torch.tensor([1, 5])},
        r"classes is \[1, 5\], expected ascending numbers, at least 0, below 5",
    ),
    "negative": ({"classes": torch.tensor([-1, 3])}, r"classes is \[-1, 3\]"),
    "fractions": ({"classes": torch.tensor([1.0, 3.0])}, "classes has dtype torch.float32, expected torch.int64"),
    "half a sample": ({"counts": torch.tensor([0.5, 2.0])}, "counts has dtype torch.float32"),
    "no samples": ({"counts": torch.tensor([0, 8])}, r"counts is \[0, 8\], expected at least 1"),
    "no sample at all": ({"num_samples": 0}, "num_samples is 0"),
    "none": (
        {"means": torch.zeros(0, FEATURES), "classes": torch.zeros(0).long(), "counts": torch.zeros(0).long()},
        r"classes is \[\]",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("method", [FedProto, FedGH])
def test_bad_uploads_are_refused_and_leave_the_server_as_it_was(method, changes, message):
    client = method(tiny_encoder((6,)), CLASSES)
    server, undisturbed = client.configure_aggregator(CLIENTS), client.configure_aggregator(CLIENTS)
    before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
    for bad_first in (True, False):
        if not bad_first:
            server.receive(upload(0))
        with pytest.raises(InvalidMessageError, match=rf"client 7, round 4: .*{message}") as caught:
            server.check(upload(**changes))
        assert (caught.value.client, caught.value.round) == (7, 3)
        assert_same(dict(server.state_dict()), before)
    server.aggregate()
    undisturbed.receive(upload(0))
    undisturbed.aggregate()
    assert_same(dict(server.state_dict()), dict(undisturbed.state_dict()))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in server.state_dict().items())


@pytest.mark.parametrize("method", [FedProto, FedGH])
def test_a_round_without_uploads_changes_nothing(method):
    server = method(tiny_encoder((6,)), CLASSES).configure_aggregator(CLIENTS)
    before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
    server.aggregate()
    assert_same(dict(server.state_dict()), before)


def test_a_head_that_became_non_finite_is_not_taken_over():
    client = FedGH(tiny_encoder((6,)), CLASSES, server_lr=1e38)
    server = client.configure_aggregator(CLIENTS)
    before = server.broadcast(0, 0).weights
    server.receive(upload(means=torch.full((2, FEATURES), 1e30)))
    with pytest.warns(
        UserWarning, match="the server's head is kept as it was, since its new values are not finite; lower server_lr"
    ):
        server.aggregate()
    assert_same(server.broadcast(0, 0).weights, before)


def test_the_published_server_leaves_the_head_as_it_was():
    """Its clients' heads train in each round, from the same start."""
    federation, plain = play(PARTIAL, TWO, server_lr=0.0)
    first = Restated(Toy(), TWO).head()
    assert_same(dict(federation.server.broadcast(0, 2).weights), first)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(plain.evaluated(client)), atol=1e-6)
