"""Crops and flips of whole batches: valid, a draw for each sample, distributed as torchvision's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import functional, v2

from pfl_lightning.datamodules import RandomCrop, RandomFlip
from pfl_lightning.datamodules.clients.batches import BatchTransform, channel_statistics


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def offsets_of(crops: torch.Tensor, padding: int) -> torch.Tensor:
    """Position of each crop of the picture ``1, 2, 3, ...`` begins, found by looking for it in the padded picture."""
    side = crops.shape[-1]
    picture = torch.arange(1, side * side + 1, dtype=crops.dtype).view(1, 1, side, side)
    windows = F.pad(picture, (padding,) * 4).unfold(2, side, 1).unfold(3, side, 1)[0, 0]
    same = (windows[None] == crops[:, 0, None, None]).flatten(3).all(dim=3)
    assert (same.flatten(1).sum(dim=1) == 1).all(), "not a crop of the padded picture"
    return same.flatten(1).int().argmax(dim=1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 6),
    channels=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 5),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.int64]),
)
def test_crops_equal_a_loop_over_the_samples(batch, channels, height, width, padding, seed, dtype):
    images = torch.randint(0, 256, (batch, channels, height, width), generator=seeded(seed)).to(dtype)
    cropped = RandomCrop(padding)(images, seeded(seed))
    rows, columns = torch.randint(0, 2 * padding + 1, (2, batch), generator=seeded(seed))
    padded = F.pad(images, (padding,) * 4)
    slow = [padded[i, :, r : r + height, c : c + width] for i, (r, c) in enumerate(zip(rows, columns, strict=True))]
    assert cropped.dtype == dtype
    assert cropped.shape == images.shape
    assert all(torch.equal(one, two) for one, two in zip(cropped, slow, strict=True))


def test_crop_offsets_are_uniform_and_independent_as_in_torchvision():
    picture = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8)
    ours = offsets_of(RandomCrop(2)(picture.expand(5000, 1, 8, 8), seeded(0)), 2)
    counts = torch.bincount(ours, minlength=25).double()
    assert ((counts - 200).square() / 200).sum() < 52.6  # chi-square, 24 degrees of freedom, 0.1 per cent
    # A sample's draw tells nothing about its neighbor's.
    pairs = np.corrcoef(ours[:-1].numpy(), ours[1:].numpy())[0, 1]
    assert abs(pairs) < 0.06
    crop = v2.RandomCrop(8, padding=2)
    theirs = offsets_of(torch.cat([crop(picture) for _ in range(1000)]), 2)
    assert set(theirs.tolist()) == set(ours.tolist())


def test_flips_are_drawn_for_each_sample():
    picture = torch.arange(1, 13, dtype=torch.uint8).view(1, 1, 3, 4)
    images = picture.expand(4000, 1, 3, 4)
    flipped = RandomFlip(0.3)(images, seeded(1))
    same = (flipped == picture).flatten(1).all(dim=1)
    turned = (flipped == v2.functional.horizontal_flip(picture)).flatten(1).all(dim=1)
    assert (same ^ turned).all()
    assert 0.27 < turned.double().mean() < 0.33
    assert torch.equal(RandomFlip(1.0)(images, seeded(0)), images.flip(-1))
    assert torch.equal(RandomFlip(0.0)(images, seeded(0)), images)


def test_the_generator_alone_decides():
    images = torch.randint(0, 256, (9, 3, 6, 6), dtype=torch.uint8)
    before = images.clone()
    transform = BatchTransform(augmentations=(RandomCrop(2), RandomFlip()))
    first = transform.augment(images, seeded(5))
    torch.manual_seed(99)
    assert torch.equal(first, transform.augment(images, seeded(5)))
    assert not torch.equal(first, transform.augment(images, seeded(6)))
    assert torch.equal(images, before)


def test_normalization_is_bit_for_bit_torchvisions():
    images = torch.randint(0, 256, (7, 3, 5, 4), dtype=torch.uint8)
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    arrays = images.permute(0, 2, 3, 1).numpy()
    reference = torch.stack([functional.normalize(functional.to_tensor(array), mean, std) for array in arrays])
    assert torch.equal(BatchTransform(mean, std).normalize(images), reference)
    assert torch.equal(BatchTransform().normalize(images), images.float() / 255)


def test_floats_and_token_ids_stay_as_they_are():
    values = torch.randn(4, 5)
    assert BatchTransform().normalize(values) is values
    tokens = torch.arange(6).view(2, 3)
    assert BatchTransform().normalize(tokens) is tokens
    before, shift = values.clone(), BatchTransform((1.0,) * 5, (2.0,) * 5)
    shifted = shift.normalize(values)
    assert torch.equal(values, before)
    assert torch.equal(shifted, (values - 1) / 2)
    assert torch.equal(shift.normalize(values, in_place=True), shifted)
    assert torch.equal(values, shifted)


def test_channel_statistics_are_exact():
    images = torch.randint(0, 256, (37, 3, 6, 5), dtype=torch.uint8)
    images[:, 2] = 7
    mean, std = channel_statistics(images, chunk=10)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean(dim=(0, 2, 3)).tolist(), abs=1e-12)
    assert std[:2] == pytest.approx(scaled.std(dim=(0, 2, 3), correction=0).tolist()[:2], abs=1e-12)
    assert std[2] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(-1), "padding"),
        (lambda: RandomFlip(1.1), "between 0 and 1"),
        (lambda: RandomCrop()(torch.zeros(3, 8)), r"shape \(B, C, H, W\), got \(3, 8\)"),
        (lambda: BatchTransform(mean=(0.5,)), "together"),
        (lambda: BatchTransform((0.5,), (0.0,)), "std must be above 0"),
        (lambda: BatchTransform((0.5,), (1.0, 1.0)), "mean has 1 channels, std has 2"),
        (lambda: BatchTransform((0.5,), (1.0,)).normalize(torch.zeros(2, 3, 4, 4)), "have 1 channels"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
