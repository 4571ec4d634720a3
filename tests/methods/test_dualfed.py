"""DualFed against a restatement in plain torch: two stages, contrast in double loops, and the plain mean.

Both in double precision: with the paper's lambda of 40, rounding grows a hundredfold in a few steps.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from _helpers.plain import copy_of, mean_of, named, put, sgd
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, SEED, Toy, assert_same, normed_encoder, run, tiny_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.methods import DualFed
from pfl_lightning.seeding import derive_seed

EPOCHS, LR, HIDDEN = 2, 0.01, 6
BATCH = 9  # leaves no batch of one sample, whichever the client
EVERYBODY = list(range(CLIENTS))
TWO_ROUNDS = [[0, 2, 3], [1, 2]]
PARTS = ["encoder", "head", "projector", "global_head"]


class PlainNet(nn.Module):
    """Encoder, projector, and both classifiers."""

    def __init__(self, encoder: Any, depth: int, norm: bool) -> None:
        super().__init__()
        self.encoder = encoder((INPUTS,))
        self.head = nn.Linear(FEATURES, CLASSES)
        layers: list[nn.Module] = []
        for layer in range(depth):
            inside, outside = (FEATURES if layer == 0 else HIDDEN), (FEATURES if layer == depth - 1 else HIDDEN)
            layers += [nn.Linear(inside, outside)]
            layers += [nn.ReLU()] if layer < depth - 1 else []
            layers += [nn.BatchNorm1d(outside)] if norm else []
        self.projector = nn.Sequential(*layers)
        self.global_head = nn.Linear(FEATURES, CLASSES)

    def scores(self, inputs: Tensor, behind: str) -> tuple[Tensor, Tensor, Tensor]:
        """u, and the scores of the personal and of the global classifier."""
        z = self.encoder(inputs)
        u = self.projector(z)
        return u, self.head(u), self.global_head(z if behind == "encoder" else u)


@dataclass
class Restated:
    """Clients and server."""

    data: Toy
    encoder: Any = normed_encoder
    contrastive: float = 40.0
    temperature: float = 0.2
    stages: str = "stage-wise"
    stage2_mode: str = "evaluation"
    prediction: str = "probabilities"
    projector_depth: int = 2
    projector_batch_norm: bool = True
    personal: tuple[str, ...] = ("projector", "head")
    global_on: str = "encoder"

    def __post_init__(self) -> None:
        torch.manual_seed(derive_seed(SEED, "initial weights"))
        start = PlainNet(self.encoder, self.projector_depth, self.projector_batch_norm).double()
        self.models = [copy_of(start) for _ in EVERYBODY]

    def play(self, round: int, cohort: list[int]) -> None:
        for client in cohort:
            net = self.models[client]
            if self.stages == "stage-wise":
                self.stage(net, client, round, 0, ["encoder", "projector", "head"], self.main)  # (8)
                self.stage(net, client, round, 1, ["global_head"], self.general)  # (10)
            else:
                self.stage(net, client, round, 0, PARTS, self.everything)
        shared = [part for part in PARTS if part not in self.personal]
        states = [{n: p for n, p in named(self.models[k]).items() if n.split(".")[0] in shared} for k in cohort]
        mean = mean_of(states, [1] * len(cohort))  # (11), of parameters: running statistics stay where they are
        for net in self.models:
            put(net, mean)

    def stage(self, net: PlainNet, client: int, round: int, index: int, parts: list[str], loss: Any) -> None:
        """What does not train is as in evaluation, or as in training in the second stage."""
        net.train(index == 1 and self.stage2_mode == "training")
        for part in parts:
            getattr(net, part).train()
        train = [p for part in parts for p in getattr(net, part).parameters()]
        sgd(net, self.batches(client, round, f"fit/{index}"), train, LR, loss)

    def batches(self, client: int, round: int, purpose: str) -> Iterator[list[Tensor]]:
        inputs, labels = self.data.tensors(client)
        generator = torch.Generator().manual_seed(derive_seed(SEED, purpose, round, client))
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(labels), generator=generator).split(BATCH):
                yield [inputs[chosen].double(), labels[chosen]]

    def main(self, net: PlainNet, inputs: Tensor, labels: Tensor) -> Tensor:
        """(6) and (7)."""
        u, personal, _ = net.scores(inputs, self.global_on)
        return F.cross_entropy(personal, labels) + self.contrastive * contrast(u, labels, self.temperature)

    def general(self, net: PlainNet, inputs: Tensor, labels: Tensor) -> Tensor:
        """(9)."""
        return F.cross_entropy(net.scores(inputs, self.global_on)[2], labels)

    def everything(self, net: PlainNet, inputs: Tensor, labels: Tensor) -> Tensor:
        """(6), (7) and (9) of one pass."""
        u, personal, general = net.scores(inputs, self.global_on)
        both = F.cross_entropy(personal, labels) + F.cross_entropy(general, labels)
        return both + self.contrastive * contrast(u, labels, self.temperature)

    @torch.no_grad()
    def score(self, client: int, part: str) -> tuple[float, float]:
        """Accuracy and mean cross entropy of both classifiers together (5)."""
        inputs, labels = self.data.tensors(client, part)
        _, personal, general = self.models[client].eval().scores(inputs.double(), self.global_on)
        if self.prediction == "probabilities":
            both = (personal.softmax(1) + general.softmax(1)) / 2
        else:
            both = (personal + general).softmax(1)
        right = sum(int(row.argmax()) == int(y) for row, y in zip(both, labels, strict=True))
        loss = -sum(float(row[y].log()) for row, y in zip(both, labels, strict=True))
        return right / len(labels), loss / len(labels)


def contrast(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """One view, cosine similarity; an anchor without positives is zero, and counts in the mean."""
    rows = [f / f.square().sum().sqrt() for f in features]
    total = features.new_zeros(())
    for i, anchor in enumerate(rows):
        others = {j: (anchor @ rows[j] / temperature).exp() for j in range(len(rows)) if j != i}
        own = [j for j in others if int(labels[j]) == int(labels[i])]
        for j in own:
            total = total - (others[j] / sum(others.values())).log() / len(own)
    return total / len(rows)


def assert_equals_restatement(cohorts, encoder=normed_encoder, **options) -> Restated:
    """Play both; compare every client's whole state and scores."""
    data = Toy(batch_size=BATCH)
    method = partial(DualFed, lr=LR, weight_decay=5e-4, epochs=EPOCHS, projector_hidden=HIDDEN, **options)
    federation = run(method, len(cohorts), cohorts=cohorts, data=data, encoder=encoder, precision="64-true")
    plain = Restated(data, encoder, **options)
    for round, cohort in enumerate(cohorts):
        plain.play(round, cohort)
    for client in EVERYBODY:
        got, expected = federation.client_model(client).state_dict(), plain.models[client].state_dict()
        assert_same({name: got[name] for name in sorted(got)}, dict(expected), atol=1e-8)
        for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
            found = scores[client]
            assert (found.accuracy, found.loss) == pytest.approx(plain.score(client, part), abs=1e-5)
    return plain


OPTIONS = {
    "stage-wise": {},
    "simultaneous": {"stages": "simultaneous"},
    "second stage in training mode": {"stage2_mode": "training"},
    "logits": {"prediction": "logits"},
    "Office-Home": {"contrastive": 2.0, "temperature": 0.05},
    "without contrast": {"contrastive": 0.0},
    # Table 5
    "one layer": {"projector_depth": 1},
    "three layers": {"projector_depth": 3},
    "no batch norm": {"projector_batch_norm": False},
    # Table 6
    "DualFed-P": {"global_on": "projector"},
    "DualFed-G": {"global_on": "projector", "personal": ("head",)},
    "DualFed-P, simultaneous": {"global_on": "projector", "stages": "simultaneous"},
    # Table 7, in its order; the second row is the method
    "personal: all but the encoder": {"personal": ("projector", "head", "global_head")},
    "personal: nothing": {"personal": ()},
    "personal: the personal classifier": {"personal": ("head",)},
    "personal: everything": {"personal": tuple(PARTS)},
}


@pytest.mark.parametrize("name", ["stage-wise", "simultaneous", "DualFed-P", "DualFed-G"])
def test_one_round_equals_the_restatement(name):
    assert_equals_restatement([EVERYBODY], **OPTIONS[name])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_rounds_of_some_equal_the_restatement(options):
    assert_equals_restatement(TWO_ROUNDS, **options)


@pytest.mark.parametrize("options", [{}, {"projector_batch_norm": False}, {"stages": "simultaneous"}])
def test_an_encoder_without_batch_normalization(options):
    assert_equals_restatement(TWO_ROUNDS, tiny_encoder, **options)


def test_two_rounds_of_everybody():
    assert_equals_restatement([EVERYBODY, EVERYBODY])


def test_no_option_is_idle():
    """Options lead to other models or, for the prediction, to other scores; batches have anchors without positives."""
    found = {}
    for name, options in OPTIONS.items():
        plain = Restated(Toy(batch_size=BATCH), **options)
        plain.play(0, [0, 2])
        plain.play(1, [2])
        state = plain.models[2].state_dict().values()
        scores = torch.tensor([plain.score(client, "test")[1] for client in EVERYBODY])
        found[name] = torch.cat([scores, *(tensor.flatten().float() for tensor in state)])
    for (name, one), (other, two) in itertools.combinations(found.items(), 2):
        assert one.shape != two.shape or not torch.allclose(one, two, atol=1e-3), (name, other)
    batches = Restated(Toy(batch_size=BATCH)).batches(0, 0, "fit/0")
    assert any(labels.tolist().count(int(y)) == 1 for _, labels in batches for y in labels)
