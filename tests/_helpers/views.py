"""The toy data with two views that differ: images of one pixel, and noise as their augmentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from _helpers.toy import BATCH, FEATURES, INPUTS, SEED, Toy, tiny_encoder
from pfl_lightning.datamodules import Augmentation, Samples
from pfl_lightning.seeding import derive_seed

NOISE = 0.3


class Noise(Augmentation):
    """Noise on every image."""

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return images + NOISE * torch.randn(images.shape, generator=generator, dtype=torch.float32)


class ToyViews(Toy):
    """The toy data as images of one pixel and six channels, with noise."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, augment=[Noise()], **options)

    def load(self) -> Samples:
        samples = super().load()
        inputs = {name: getattr(samples, name)[..., None, None] for name in ("train_inputs", "test_inputs")}
        return dataclasses.replace(samples, **inputs)


class WithUnlabeled(ToyViews):
    """The toy data as images, with further ones without labels."""

    further = 23

    def load(self) -> Samples:
        inputs = torch.randn(self.further, INPUTS, 1, 1, generator=torch.Generator().manual_seed(8))
        return dataclasses.replace(super().load(), unlabeled_inputs=inputs)

    def tensors(self, client: int, part: str = "train") -> tuple[Tensor, Tensor]:
        """Training data of a client, for a restatement."""
        inputs, targets = super().tensors(client, part)
        if part != "train":
            return inputs, targets
        own = self.load().unlabeled_inputs[self.client_data(client).unlabeled.indices]
        return torch.cat([inputs, own]), torch.cat([targets, torch.full((len(own),), -1)])


def flat_encoder(input_shape: Sequence[int]) -> nn.Module:
    """The toy encoder for such images."""
    encoder = nn.Sequential(nn.Flatten(), *tiny_encoder((INPUTS,)))
    encoder.out_features = FEATURES
    return encoder


def pairs_of_views(data: Toy, client: int, round: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both views of every batch of a local fit, in double precision, drawn as the data module's loaders do."""
    inputs, _ = data.tensors(client)
    generator = torch.Generator().manual_seed(derive_seed(SEED, "fit/0", round, client))
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(BATCH):
            twice = inputs[chosen].repeat_interleave(2, 0)
            views = twice + NOISE * torch.randn(twice.shape, generator=generator)
            first, second = views.unflatten(0, (len(chosen), 2)).double().unbind(1)
            yield first, second
