"""Every client of a stack sees its own batches, in the order of every other engine."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, FEATURES, Toy, assert_same, run, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.client import FitContext, Phase
from pfl_lightning.datamodules import Augmentation, BatchLoader, RandomCrop, RandomFlip, RandomRotation
from pfl_lightning.engines.vectorized.phase import StackedBatches, Stream
from pfl_lightning.engines.vectorized.stack import Member
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment
from pfl_lightning.methods import DualFed, FedAvg, FedClassAvg, FedPAC
from pfl_lightning.seeding import seeded_generator


class Noise(Augmentation):
    """Noise on every image."""

    def __call__(self, images, generator=None):
        return images + 0.3 * torch.randn(images.shape, generator=generator)


class ToyImages(Toy):
    """The toy data as images of one channel, two pixels wide and three high."""

    def load(self):
        samples = super().load()
        inputs = {name: getattr(samples, name).view(-1, 1, 3, 2) for name in ("train_inputs", "test_inputs")}
        return dataclasses.replace(samples, **inputs)


def convolution(input_shape):
    """A convolution in the channels-last layout, batch normalization, and a linear layer."""
    convolution = nn.Conv2d(1, 4, 2, padding=1, bias=False).to(memory_format=torch.channels_last)
    norm, pool = nn.BatchNorm2d(4), nn.MaxPool2d(2)
    encoder = nn.Sequential(convolution, norm, nn.LeakyReLU(), pool, nn.Flatten(), nn.Linear(8, FEATURES))
    encoder.out_features = FEATURES
    return encoder


@pytest.mark.repeated
@pytest.mark.parametrize(
    "augment",
    [[], [Noise()], [RandomCrop(1), RandomFlip()], [RandomFlip(), Noise()]],
    ids=["no", "noise", "crop, flip", "flip, noise"],
)
@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedClassAvg, partial(DualFed, projector_batch_norm=False)])
def test_images_with_one_view_or_two_agree(method, augment):
    def go(engine):
        data = ToyImages(augment=augment, batch_size=9)
        fit = partial(method, lr=0.01, epochs=2)
        return run(fit, 2, engine=engine, data=data, encoder=convolution, precision="64-true")

    got, expected = go(VectorizedEngine(forward="vmap")), go(SequentialEngine())
    assert not got.engine._warned
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)


@pytest.mark.parametrize("own", [[RandomFlip(), RandomRotation(30)], [RandomCrop(1), Noise()]], ids=["built in", "own"])
def test_a_stack_is_augmented_at_once_and_each_client_as_alone(own, monkeypatch):
    """Bit for bit: the stacked batches are those that the client's loader gives."""
    data, calls = ToyImages(augment=own, batch_size=5), []
    data.setup()
    client = run(FedAvg, 0, data=data, encoder=convolution).clients.models[0]
    environment, phase = FitEnvironment(seed=3), Phase("all", epochs=2)
    client.phase = phase
    contexts = [FitContext(k, 1, FitData(data.client_data(k).train, 5, augment=True, views=2)) for k in range(CLIENTS)]
    streams = [Stream(client, Member(None, context), phase, environment, "fit/0") for context in contexts]
    monkeypatch.setattr(
        BatchLoader, "transformed", lambda *args, own=BatchLoader.transformed: calls.append(1) or own(*args)
    )
    batches = StackedBatches(streams, environment, by_index=False)
    seeds = [seeded_generator(3, "fit/0", 1, k) for k in range(CLIENTS)]
    loaders = [context.data.loader(generator) for context, generator in zip(contexts, seeds, strict=True)]
    expected = [iter([*loader, *loader]) for loader in loaders]
    for number in range(min(stream.steps for stream in streams)):
        calls.clear()
        stacks = list(batches.next(streams))
        assert len(calls) == len(stacks)
        rows = [row for which, _, _, _ in stacks for row in (range(CLIENTS) if which is None else which.tolist())]
        found = dict(zip(rows, [pair for _, _, batch, _ in stacks for pair in zip(*batch, strict=True)], strict=True))
        for row, batch in enumerate(expected):
            for one, other in zip(found[row], next(batch), strict=True):
                assert torch.equal(one, other), (number, row)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_positions_are_those_of_the_batches(views, drop_last):
    data = Toy()
    data.setup()
    for client in range(CLIENTS):
        fit = FitData(data.client_data(client).train, data.batch_size, drop_last, views=views)
        first, second = torch.Generator().manual_seed(client), torch.Generator().manual_seed(client)
        loader, (inputs, labels) = fit.loader(first), fit.tensors()
        for _ in range(3):  # one epoch after the other, from the same generator
            batches, positions = list(loader), list(fit.positions(second))
            assert len(batches) == len(positions) == len(loader)
            for (batch, own), index in zip(batches, positions, strict=True):
                assert torch.equal(batch, inputs[index])
                assert torch.equal(own, labels[index if views == 1 else index[:, 0]])


class Widths(Toy):
    """Samples whose width differs between clients."""

    def client_data(self, client):
        data = super().client_data(client)
        parts = {name: copy.copy(getattr(data, name)) for name in ("train", "validation", "test")}
        for part in parts.values():
            part._inputs = part._inputs[:, : 3 + client % 3]
        return dataclasses.replace(data, **parts)


class AnyWidth(nn.Module):
    """Takes samples of any width."""

    out_features = FEATURES

    def __init__(self, input_shape):
        super().__init__()
        self.layer = nn.Linear(1, FEATURES)

    def forward(self, inputs):
        return torch.tanh(self.layer(inputs.mean(1, keepdim=True)))


def test_clients_whose_samples_have_other_shapes_agree():
    def go(engine):
        options = {"data": Widths(), "encoder": AnyWidth, "precision": "64-true"}
        return run(partial(FedAvg, lr=0.05, epochs=2), 2, engine=engine, **options)

    assert_same(whole_state(go(VectorizedEngine(forward="vmap"))), whole_state(go(SequentialEngine())), atol=1e-9)
