"""Every client of a stack sees its own batches, in the order of every other engine."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, FEATURES, Toy, assert_same, run, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.datamodules import Augmentation
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import DualFed, FedAvg, FedClassAvg, FedPAC


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
@pytest.mark.parametrize("augment", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("method", [FedAvg, FedPAC, FedClassAvg, partial(DualFed, projector_batch_norm=False)])
def test_images_with_one_view_or_two_agree(method, augment):
    def go(engine):
        data = ToyImages(augment=[Noise()] if augment else False, batch_size=9)
        fit = partial(method, lr=0.01, epochs=2)
        return run(fit, 2, engine=engine, data=data, encoder=convolution, precision="64-true")

    got, expected = go(VectorizedEngine(forward="vmap")), go(SequentialEngine())
    assert not got.engine._warned
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)


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
