"""Fed-RoD (Chen and Chao 2022) against plain torch: two heads, two losses, each with its own gradient."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, mean_of, named, put, sgd
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, SEED, GivenCohorts, Toy, assert_same, run, tiny_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.methods import FedAvg, FedRoD
from pfl_lightning.seeding import derive_seed

EPOCHS, LR = 2, 0.05
EVERYBODY = list(range(CLIENTS))
COHORTS = {"all": [EVERYBODY, EVERYBODY], "partial": [[0, 2, 3], [1, 2]]}


class TwoHeads(Net):
    """The network with a second head, which sees features and the first head's scores as given numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.personal_head = nn.Linear(FEATURES, CLASSES)


@dataclass
class Restated:
    """What is averaged, and everybody's personal head."""

    data: Toy
    nets: list[TwoHeads] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(derive_seed(SEED, "initial weights"))
        first = TwoHeads()
        self.nets = [copy_of(first) for _ in EVERYBODY]

    def play(self, round: int, cohort: list[int]) -> None:
        uploads = []
        for client in cohort:
            self.train(client, round)
            uploads.append(named(self.nets[client], "encoder.") | named(self.nets[client], "head."))
        mean = mean_of(uploads, [len(self.data.labels[client]) for client in cohort])
        for net in self.nets:
            put(net, mean)

    def train(self, client: int, round: int) -> None:
        net, own = self.nets[client], self.data.labels[client]
        generic = [*net.encoder.parameters(), *net.head.parameters()]
        personal = list(net.personal_head.parameters())
        velocity = [torch.zeros_like(p) for p in generic + personal]
        for inputs, labels in batches(self.data, client, round, "fit/0", EPOCHS):
            gradients = torch.autograd.grad(balanced_loss(net(inputs), labels, own), generic)
            with torch.no_grad():
                features, scores = net.encoder(inputs), net(inputs)
            empirical = F.cross_entropy(scores + net.personal_head(features), labels)
            gradients += torch.autograd.grad(empirical, personal)
            with torch.no_grad():
                for p, g, v in zip(generic + personal, gradients, velocity, strict=True):
                    v.mul_(0.5).add_(g + 5e-4 * p)
                    p.sub_(LR * v)

    def scores(self, client: int, inputs: Tensor, prediction: str = "personal") -> Tensor:
        net = self.nets[client]
        with torch.no_grad():
            generic = net(inputs)
            return generic if prediction == "generic" else generic + net.personal_head(net.encoder(inputs))


def balanced_loss(scores: Tensor, labels: Tensor, own: list[int]) -> Tensor:
    """-log(n_y exp(g_y) / sum_c n_c exp(g_c)), over the classes that the client has."""
    counts = {c: own.count(c) for c in set(own)}
    losses = []
    for g, y in zip(scores, labels.tolist(), strict=True):
        total = sum(n * g[c].exp() for c, n in counts.items())
        losses.append(-torch.log(counts[y] * g[y].exp() / total))
    return torch.stack(losses).mean()


def replay(cohorts, data):
    plain = Restated(data)
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    return plain


@pytest.mark.parametrize("prediction", ["personal", "generic"])
@pytest.mark.parametrize("cohorts", COHORTS.values(), ids=COHORTS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_equal_the_restatement(rounds, cohorts, prediction):
    data = Toy()
    method = partial(FedRoD, lr=LR, epochs=EPOCHS, prediction=prediction)
    federation = run(method, rounds, cohorts=cohorts, data=data)
    plain = replay(cohorts[:rounds], data)
    for client in EVERYBODY:
        assert_same(named(federation.client_model(client)), named(plain.nets[client]), atol=1e-6)
        for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
            inputs, labels = data.tensors(client, part)
            expected = plain.scores(client, inputs, prediction)
            assert scores[client].accuracy == pytest.approx(float((expected.argmax(1) == labels).float().mean()))
            assert scores[client].loss == pytest.approx(float(F.cross_entropy(expected, labels)), abs=1e-5)


def test_the_cases_are_not_trivial():
    """The loss is not FedAvg's, the two predictions differ, and personal heads are personal."""
    data = Toy()
    plain = replay(COHORTS["partial"], data)
    average = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2, cohorts=COHORTS["partial"])
    assert not torch.allclose(average.client_model(0).head.weight, plain.nets[0].head.weight, atol=1e-2)
    inputs, _ = data.tensors(0, "test")
    assert not torch.allclose(plain.scores(0, inputs), plain.scores(0, inputs, "generic"), atol=1e-2)
    heads = [net.personal_head.weight for net in plain.nets]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    assert torch.equal(heads[4], TwoHeads().personal_head.weight)  # never trained


def test_the_score_of_a_class_that_a_client_lacks_is_not_pushed_down():
    """That is what the balanced loss is for; only the weight decay acts on it."""
    federation = run(partial(FedRoD, lr=LR, epochs=EPOCHS, weight_decay=0.0), cohorts=[[0]])
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    first, got = TwoHeads(), federation.client_model(1)
    assert torch.equal(got.head.weight[2:], first.head.weight[2:])
    assert torch.equal(got.head.bias[2:], first.head.bias[2:])
    assert not torch.allclose(got.head.bias[:2], first.head.bias[:2], atol=1e-4)


def test_the_personal_head_stays():
    client = FedRoD(tiny_encoder((INPUTS,)), CLASSES)
    assert client.personal_names() == ["personal_head.weight", "personal_head.bias"]
    loop = GivenCohorts([0, 3])
    run(partial(FedRoD, epochs=1), loop=loop, limit_val_batches=0)
    size = sum(tensor.numel() * 4 for tensor in FedAvg(tiny_encoder((INPUTS,)), CLASSES).state_dict().values())
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * size}


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_fine_tuning_is_on_the_plain_loss_of_what_predicts(engine):
    """It knows nothing of who trained before, such as another client's class counts."""
    data = Toy()
    method = partial(FedRoD, lr=LR, epochs=EPOCHS, fine_tune="all", fine_tune_epochs=2)
    federation = run(method, 2, cohorts=COHORTS["partial"], data=data, engine=engine())
    plain = replay(COHORTS["partial"], data)

    def loss(net, x, y):
        features = net.encoder(x)
        return F.cross_entropy(net.head(features) + net.personal_head(features), y)

    for client in (4, 0, 2):
        net = copy_of(plain.nets[client])
        sgd(net, batches(data, client, 1, "personalize/0", 2), list(net.parameters()), LR, loss)
        assert_same(named(federation.client_model(client)), named(net), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": "sum"}, "prediction must be one of .* got 'sum'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"fine_tune": "personal_head"}, "fine_tune must be one of"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedRoD(tiny_encoder((INPUTS,)), CLASSES, **options)
