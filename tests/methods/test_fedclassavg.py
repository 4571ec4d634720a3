"""FedClassAvg against a restatement in plain torch: contrast in double loops, Adam and the averaging written out."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from _helpers.plain import Net, copy_of, mean_of, named, put, score
from _helpers.toy import BATCH, CLIENTS, FEATURES, SEED, Toy, assert_same, run, tiny_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.datamodules import Augmentation
from pfl_lightning.methods import FedClassAvg
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, RHO = 2, 0.01, 0.5
EVERYBODY = list(range(CLIENTS))
TWO_ROUNDS = [[0, 2, 3], [1, 2]]  # client 4 never takes part
NOISE = 0.3


def other_encoder(input_shape):
    """Another architecture, features of the same width."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 7), nn.ReLU(), nn.Linear(7, FEATURES))
    encoder.out_features = FEATURES
    return encoder


def flat_encoder(input_shape):
    """The first, for inputs of shape (6, 1, 1)."""
    encoder = nn.Sequential(nn.Flatten(), *tiny_encoder(input_shape))
    encoder.out_features = FEATURES
    return encoder


HETEROGENEOUS = [tiny_encoder, other_encoder]


class ReluNet(Net):
    """Its head is a ReLU and a linear layer."""

    relu = True

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.encoder(inputs)
        scores: Tensor = self.head(torch.relu(features) if self.relu else features)
        return scores


@dataclass
class Restated:
    """Clients and server."""

    data: Toy
    encoders: list[Any]
    proximal: float = RHO
    objective: str = "paper"
    squared_proximal: Any = False
    contrastive: bool = True
    normalize: bool = True
    temperature: float = 0.07
    base_temperature: float | None = None
    head_relu: bool = True
    share_encoder: bool = False
    warm_up_epochs: int = 0
    weight_decay: float = 0.0
    eval_model: str = "trained"
    noise: float = 0.0
    shared: dict[str, Tensor] = field(init=False)
    trained: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.objective == "published":
            self.normalize, self.temperature, self.base_temperature = False, 100.0, 0.07
            self.squared_proximal = "published"
        starts = []
        for index, encoder in enumerate(self.encoders):
            torch.manual_seed(derive_seed(SEED, "initial weights", *([index] if index else [])))
            starts.append(ReluNet(encoder))
            starts[-1].relu = self.head_relu
        self.models = [copy_of(starts[client % len(starts)]) for client in EVERYBODY]
        self.shared = named(starts[0], "" if self.share_encoder else "head.")

    def play(self, round: int, cohort: list[int]) -> None:
        for client in cohort:
            net = self.models[client]
            put(net, self.shared)
            phases = [EPOCHS]
            if self.warm_up_epochs and client not in self.trained:
                phases = [self.warm_up_epochs, EPOCHS]
            for index, epochs in enumerate(phases):
                self.adam(net, self.pairs(client, round, f"fit/{index}", epochs))
            self.trained.add(client)
        states = [named(self.models[client], "" if self.share_encoder else "head.") for client in cohort]
        self.shared = mean_of(states, [len(self.data.labels[client]) for client in cohort])  # (3)

    def model(self, client: int) -> ReluNet:
        """As the local training left it; the server's head comes to those that never trained."""
        net = copy_of(self.models[client])
        if client not in self.trained or self.eval_model == "aggregated":
            put(net, self.shared)
        return net

    def pairs(self, client: int, round: int, purpose: str, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (B, 2, ...): the same sample twice, each with noise of its own if there is any."""
        inputs, labels = self.data.tensors(client)
        generator = torch.Generator().manual_seed(derive_seed(SEED, purpose, round, client))
        for _ in range(epochs):
            for chosen in torch.randperm(len(labels), generator=generator).split(BATCH):
                views = torch.stack([inputs[chosen], inputs[chosen]], dim=1)
                if self.noise:
                    drawn = torch.randn(2 * len(chosen), *inputs.shape[1:], generator=generator)
                    views = views + self.noise * drawn.view_as(views)
                yield views, labels[chosen]

    def adam(self, net: ReluNet, steps: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Adam with betas 0.5 and 0.999, written out."""
        parameters = list(net.parameters())
        first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
        for t, (views, labels) in enumerate(steps, start=1):
            gradients = torch.autograd.grad(self.loss(net, views, labels), parameters)
            with torch.no_grad():
                for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                    g = g + self.weight_decay * p
                    m.mul_(0.5).add_(0.5 * g)
                    v.mul_(0.999).add_(0.001 * g * g)
                    p.sub_(LR * (m / (1 - 0.5**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))

    def loss(self, net: ReluNet, views: Tensor, labels: Tensor) -> Tensor:
        """(4)."""
        value = F.cross_entropy(net(views[:, 0]), labels)
        if self.contrastive:
            value = value + self.contrast(net.encoder(views[:, 0]), net.encoder(views[:, 1]), labels.tolist())
        difference = torch.cat([(p - self.shared[f"head.{n}"]).flatten() for n, p in net.head.named_parameters()])
        if self.squared_proximal == "published":
            pairs = [(p, self.shared[f"head.{n}"]) for n, p in net.head.named_parameters()]
            value = value + self.proximal / 2 * sum(F.mse_loss(p, received) for p, received in pairs)
        elif self.squared_proximal:
            value = value + self.proximal * sum(d * d for d in difference) / len(difference)
        elif bool(difference.any()):
            value = value + self.proximal * sum(d * d for d in difference).sqrt()  # (5)
        return value

    def contrast(self, first: Tensor, second: Tensor, labels: list[int]) -> Tensor:
        """SupCon: all views are anchors and contrast."""
        rows = [f / f.square().sum().sqrt() if self.normalize else f for f in (*first, *second)]
        labels = labels * 2
        losses = []
        for i, anchor in enumerate(rows):
            others = {j: anchor @ rows[j] / self.temperature for j in range(len(rows)) if j != i}
            everything = torch.stack(list(others.values())).exp().sum()
            own = [-(s.exp() / everything).log() for j, s in others.items() if labels[j] == labels[i]]
            losses.append(sum(own) / len(own))
        scale = 1.0 if self.base_temperature is None else self.temperature / self.base_temperature
        return scale * sum(losses) / len(losses)


def assert_equals_restatement(cohorts, encoder=HETEROGENEOUS, data=None, noise=0.0, **options) -> Restated:
    """Play both; compare every client's parameters and scores, and what the server sends."""
    data = data or Toy()
    method = partial(FedClassAvg, lr=LR, epochs=EPOCHS, **({"proximal": RHO} | options))
    federation = run(method, len(cohorts), cohorts=cohorts, data=data, encoder=encoder)
    plain = Restated(data, encoder if isinstance(encoder, list) else [encoder], noise=noise, **options)
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    assert_same(dict(federation.server.broadcast(0, 9).weights), plain.shared, atol=1e-5)
    for client in EVERYBODY:
        net = plain.model(client)
        assert_same(named(federation.client_model(client)), named(net), atol=1e-5)
        for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
            got = scores[client]
            assert (got.accuracy, got.loss) == pytest.approx(score(net, data, client, part), abs=1e-5)
    return plain


OPTIONS = {
    "paper": {},
    "published": {"normalize": False, "temperature": 100.0, "base_temperature": 0.07},
    "temperature": {"temperature": 0.5, "base_temperature": 0.2},
    "squared": {"squared_proximal": True, "proximal": 20.0},
    "squared a tensor": {"squared_proximal": "published", "proximal": 20.0},
    "published objective": {"objective": "published", "proximal": 2000.0},
    "averaging": {"proximal": 0.0, "contrastive": False},
    "averaging and proximal": {"contrastive": False},
    "averaging and contrastive": {"proximal": 0.0},
    "linear head": {"head_relu": False},
    "warm-up": {"warm_up_epochs": 1},
    "weight decay": {"weight_decay": 0.05},
    "evaluated after averaging": {"eval_model": "aggregated"},
}


@pytest.mark.parametrize("name", ["paper", "published", "squared", "warm-up"])
def test_one_round_equals_the_restatement(name):
    assert_equals_restatement([EVERYBODY], **OPTIONS[name])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_rounds_of_some_equal_the_restatement(options):
    assert_equals_restatement(TWO_ROUNDS, **options)


def test_two_rounds_of_everybody():
    assert_equals_restatement([EVERYBODY, EVERYBODY])


@pytest.mark.parametrize("options", [{}, {"contrastive": False}], ids=["both", "proximal"])
def test_with_weights_the_encoder_is_averaged_too(options):
    plain = assert_equals_restatement(TWO_ROUNDS, tiny_encoder, share_encoder=True, **options)
    assert set(plain.shared) == set(named(plain.models[0]))


class Noise(Augmentation):
    """Noise on every image."""

    def __call__(self, images, generator=None):
        return images + NOISE * torch.randn(images.shape, generator=generator)


class ToyImages(Toy):
    """The toy data as images of one pixel and six channels."""

    def load(self):
        samples = super().load()
        inputs = {name: getattr(samples, name)[..., None, None] for name in ("train_inputs", "test_inputs")}
        return dataclasses.replace(samples, **inputs)


@pytest.mark.parametrize("options", [{}, OPTIONS["published"]], ids=["paper", "published"])
def test_two_views_that_differ(options):
    data = ToyImages(augment=[Noise()])
    noisy = assert_equals_restatement(TWO_ROUNDS, [flat_encoder, other_encoder], data=data, noise=NOISE, **options)
    quiet = assert_equals_restatement(TWO_ROUNDS, [flat_encoder, other_encoder], data=ToyImages(), **options)
    assert not torch.allclose(noisy.shared["head.weight"], quiet.shared["head.weight"], atol=1e-3)


def test_no_option_is_idle():
    """Each leads to other models, and a client that never took part has the server's head."""
    found = {}
    for name, options in OPTIONS.items():
        plain = Restated(Toy(), HETEROGENEOUS, **options)
        plain.play(0, [0, 2])
        plain.play(1, [2])
        found[name] = torch.cat([p.flatten() for client in (0, 2) for p in named(plain.model(client)).values()])
        assert_same(named(plain.model(4), "head."), plain.shared)
    names = list(found)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert not torch.allclose(found[name], found[other], atol=1e-3), (name, other)
