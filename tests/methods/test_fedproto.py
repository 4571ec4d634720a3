"""FedProto (Tan et al. 2022) against plain torch: prototypes in dictionaries, one sample and one class at a time."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, named, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    linear_encoder,
    run,
    tiny_encoder,
)
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedProto
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import derive_seed

EPOCHS, LR = 2, 0.05
ONE, TWO = [tiny_encoder], [tiny_encoder, linear_encoder]
ALL, PARTIAL = [[0, 1, 2, 3, 4]] * 2, [[0, 1, 2], [0, 2, 3]]


@dataclass
class Restated:
    """Everybody's network, and the global prototypes of the classes that have one."""

    data: Toy
    encoders: list
    alignment: float = 1.0
    nets: list[Net] = field(default_factory=list)
    prototypes: dict[int, Tensor] = field(default_factory=dict)
    pulled: int = 0

    def __post_init__(self) -> None:
        first = []
        for index, make in enumerate(self.encoders):
            torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
            first.append(Net(make))
        self.nets = [copy_of(first[client % len(first)]) for client in range(CLIENTS)]

    def play(self, round: int, cohort: list[int]) -> None:
        received = dict(self.prototypes)

        def loss(net, x, y):
            features = net.encoder(x)
            pulls = [
                ((f - received[int(c)]) ** 2).mean() for f, c in zip(features, y, strict=True) if int(c) in received
            ]
            self.pulled += len(pulls)
            return F.cross_entropy(net.head(features), y) + self.alignment * sum(pulls) / len(y)  # (7)

        uploads = []
        for client in cohort:
            net = self.nets[client]
            sgd(net, batches(self.data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR, loss)
            uploads.append(self.class_means(client))
        for c in range(CLASSES):
            held = [means[c] for means in uploads if c in means]
            if held:  # (6), without its further factor 1 / |N_j|
                total = sum(count for _, count in held)
                self.prototypes[c] = sum(mean * count / total for mean, count in held).float()

    def class_means(self, client: int) -> dict[int, tuple[Tensor, int]]:
        """Mean feature of each class of the client (3), and its number of samples."""
        inputs, labels = self.data.tensors(client)
        with torch.no_grad():
            features = self.nets[client].encoder(inputs).double()
        return {c: (features[labels == c].mean(0), int((labels == c).sum())) for c in set(labels.tolist())}

    def distances(self, client: int, inputs: Tensor) -> Tensor:
        """To each global prototype; infinite where there is none (8)."""
        with torch.no_grad():
            features = self.nets[client].encoder(inputs)
        found = torch.full((len(inputs), CLASSES), float("inf"))
        for c, prototype in self.prototypes.items():
            found[:, c] = torch.stack([(f - prototype).square().sum().sqrt() for f in features])
        return found


def play(cohorts, encoders=ONE, **options):
    """Play both."""
    plain = Restated(Toy(), encoders, options.get("alignment", 1.0))
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    method = partial(FedProto, lr=LR, epochs=EPOCHS, **options)
    return run(method, len(cohorts), cohorts=cohorts, encoder=encoders, data=Toy()), plain


@pytest.mark.parametrize("encoders", [ONE, TWO], ids=["one encoder", "two encoders"])
@pytest.mark.parametrize("cohorts", [ALL[:1], ALL, PARTIAL], ids=["one", "two", "partial"])
@pytest.mark.parametrize("alignment", [1.0, 3.0])
def test_rounds_equal_the_restatement(cohorts, encoders, alignment):
    federation, plain = play(cohorts, encoders, alignment=alignment)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), named(plain.nets[client]), atol=1e-6)
    assert federation.server.present.tolist() == [c in plain.prototypes for c in range(CLASSES)]
    for c, prototype in plain.prototypes.items():
        torch.testing.assert_close(federation.server.prototypes[c], prototype, rtol=0, atol=1e-6)
    for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
        assert len(scores) == CLIENTS
        for client, got in scores.items():
            inputs, labels = plain.data.tensors(client, part)
            distances = plain.distances(client, inputs)
            assert got.accuracy == pytest.approx(float((distances.argmin(1) == labels).float().mean()))
            assert got.loss == pytest.approx(float(F.cross_entropy(-distances, labels)), abs=1e-5)
    assert len(federation.architectures) == len(encoders)
    if len(cohorts) > 1:
        assert plain.pulled > 0


def test_the_cases_are_not_trivial():
    """The prototypes pull, their weights count, and in the second round of the partial cohorts class 4 has none yet."""
    _, first = play(PARTIAL[:1])
    assert first.pulled == 0
    assert sorted(first.prototypes) == [0, 1, 2, 3]
    with_pull, without = play(PARTIAL)[1], play(PARTIAL, alignment=0.0)[1]
    assert sorted(with_pull.prototypes) == [0, 1, 2, 3, 4]
    assert not torch.allclose(named(with_pull.nets[0])["head.weight"], named(without.nets[0])["head.weight"], atol=1e-3)
    means = [first.class_means(client)[3] for client in (1, 2)]
    assert not torch.allclose(first.prototypes[3], sum(mean for mean, _ in means).float() / 2, atol=1e-3)


def test_by_the_classifier_it_trains_in_the_same_way_and_predicts_by_the_head():
    nearest, plain = play(ALL)
    classifier, _ = play(ALL, prediction="classifier")
    assert_same(dict(classifier.server.state_dict()), dict(nearest.server.state_dict()))
    for client in range(CLIENTS):
        assert_same(named(classifier.client_model(client)), named(nearest.client_model(client)))
        inputs, labels = plain.data.tensors(client, "test")
        with torch.no_grad():
            scores = plain.nets[client](inputs)
        got = classifier.test_scores[client]
        assert got.accuracy == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
        assert got.loss == pytest.approx(float(F.cross_entropy(scores, labels)), abs=1e-5)
        assert got.loss != pytest.approx(nearest.test_scores[client].loss, abs=1e-3)


def test_before_any_prototype_the_head_predicts():
    client = FedProto(tiny_encoder((6,)), CLASSES).eval()
    inputs = torch.randn(3, 6)
    assert torch.equal(client(inputs), client.head(client.encoder(inputs)))


def test_a_class_that_one_client_has_is_its_mean_and_nobody_elses_matter():
    federation, plain = play(ALL[:1])
    torch.testing.assert_close(federation.server.prototypes[4], plain.class_means(3)[4][0].float(), rtol=0, atol=1e-6)


def test_a_class_that_nobody_in_the_cohort_has_keeps_its_prototype():
    before, _ = play([[1, 3]])
    after, _ = play([[1, 3], [0, 4]])  # classes 0 and 1 only
    for c in (2, 3, 4):
        assert torch.equal(after.server.prototypes[c], before.server.prototypes[c])
    assert not torch.equal(after.server.prototypes[1], before.server.prototypes[1])
    assert before.server.present.tolist() == [False, True, True, True, True]
    assert after.server.present.all()


def test_a_class_without_a_prototype_is_never_predicted_and_its_loss_is_finite():
    cohorts = [[0, 1, 2]]
    federation = run(partial(FedProto, epochs=1), cohorts=cohorts, data=Toy(validation=40))
    inputs, labels = Toy(validation=40).tensors(3, "validation")
    with torch.no_grad():
        scores = federation.client_model(3)(1000 * inputs)
    assert 4 not in scores.argmax(1).tolist()
    assert int((labels == 4).sum()) > 5
    others = scores[:, :4]
    torch.testing.assert_close(scores[:, 4], others.min(dim=1).values - 1)  # after the farthest of the others
    assert 0 < federation.validation_scores[3].loss < 100


def test_predictions_are_in_single_precision_under_autocast():
    federation = run(partial(FedProto, epochs=1), precision="bf16-mixed")
    with torch.autocast("cpu", torch.bfloat16):
        scores = federation.client_model(0)(Toy().tensors(0)[0])
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("encoders", [ONE, TWO], ids=["one encoder", "two encoders"])
def test_only_prototypes_travel(encoders):
    loop = GivenCohorts([0, 3], [1, 2, 3])
    run(partial(FedProto, epochs=1), 2, loop=loop, encoder=encoders, limit_val_batches=0)
    held = [len({*Toy().labels[client]}) for client in (0, 3, 1, 2, 3)]
    assert loop.traffic.up == {"statistics": sum(k * (FEATURES * 4 + 8 + 8) for k in held)}
    # At first there is nothing to send; then the prototypes of 0, 1, 3 and 4, to three clients.
    assert loop.traffic.down == {"statistics": 3 * 4 * (FEATURES * 4 + 8)}
    client = FedProto(tiny_encoder((6,)), CLASSES)
    assert client.shared_names() == []
    assert sorted(client.personal_names()) == sorted(client.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": -0.1}, r"alignment \(lambda\) must be a finite number of at least 0, got -0.1"),
        ({"alignment": float("nan")}, r"alignment \(lambda\) must be a finite number of at least 0, got nan"),
        ({"prediction": "head"}, "prediction must be one of .* got 'head'"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedProto(tiny_encoder((6,)), CLASSES, **options)


# ---------------------------------------------------------------------------------------- local prototypes


def test_with_local_prototypes_a_client_is_alone_in_its_federation():
    local, _ = play([*ALL, ALL[0]], prediction="classifier", local_prototypes=True)
    for client in (0, 3):
        alone, plain = play([[client]] * 3, prediction="classifier")
        assert plain.pulled > 0
        assert_same(named(local.client_model(client)), named(plain.nets[client]), atol=1e-6)
        assert local.test_scores[client].loss == pytest.approx(alone.test_scores[client].loss, abs=1e-5)


def test_local_prototypes_are_stored_and_nothing_travels():
    loop = GivenCohorts([0, 3], [0, 3])
    federation = run(partial(FedProto, local_prototypes=True), 2, loop=loop, data=Toy(), limit_val_batches=0)
    assert not any(loop.traffic.up.values())
    assert not any(loop.traffic.down.values())
    stored = federation.client_model(3).state_dict()
    assert stored["prototypes.present"].tolist() == [c in Toy().labels[3] for c in range(CLASSES)]
    with pytest.warns(UserWarning, match="but the federation by the nearest"):
        assert not any(name.startswith("prototypes.") for name in federation.client_model(3).exported_names())


def test_a_head_alone_is_not_tuned_where_prototypes_predict():
    with pytest.raises(ConfigurationError, match="a head does not change, got fine_tune='head': use fine_tune='all'"):
        FedProto(tiny_encoder((INPUTS,)), CLASSES, fine_tune="head")
    FedProto(tiny_encoder((INPUTS,)), CLASSES, fine_tune="head", prediction="classifier")
    client = FedProto(tiny_encoder((INPUTS,)), CLASSES)
    client.check_personalization(Personalization("linear"))
    with pytest.raises(ConfigurationError, match="got a personalization with train='head': use train='all', or"):
        client.check_personalization(Personalization("head"))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_prediction_does_not_depend_on_the_batch(offset):
    encoder, generator = torch.nn.Identity(), torch.Generator().manual_seed(0)
    encoder.out_features = 128
    client, prototypes = FedProto(encoder, 10).eval(), offset + 0.3 * torch.randn(9, 128, generator=generator)
    client.prototypes.take(prototypes, torch.arange(9))
    inputs = prototypes.repeat(20, 1) + 0.2 * torch.randn(180, 128, generator=generator)
    exact = (inputs.double()[:, None] - prototypes.double()).square().sum(2).argmin(1)
    assert torch.equal(client(inputs).argmax(1), exact)
    assert torch.equal(torch.cat([client(piece) for piece in inputs.split(20)]).argmax(1), exact)
