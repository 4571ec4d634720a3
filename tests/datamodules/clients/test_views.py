"""Rotations against torch and torchvision, and permutations with their inverses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.functional import InterpolationMode, rotate

from pfl_lightning.datamodules import ClientView
from pfl_lightning.datamodules.clients.views import describe_views, rotate_images, views_to_bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_quarter_turns_are_exact(dtype, turns):
    images = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = rotate_images(images, 90 * turns)
    assert turned.dtype == dtype
    assert torch.equal(turned, torch.rot90(images, turns, (2, 3)))
    assert torch.equal(turned, rotate(images, 90.0 * turns, InterpolationMode.NEAREST))
    back = rotate_images(turned, 360 - 90 * turns)
    assert torch.equal(back, images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("degrees", [15.0, 45.0, 300.0])
def test_other_angles_are_torchvisions(dtype, degrees):
    images = torch.randint(0, 256, (5, 1, 9, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.cat([rotate(image[None], degrees, InterpolationMode.BILINEAR) for image in images])
    turned = rotate_images(images, degrees, chunk=2)
    assert turned.dtype == dtype
    assert torch.equal(turned, expected)


@pytest.mark.parametrize("degrees", [0.0, 30.0, 90.0])
def test_no_images_stay_none(degrees):
    assert rotate_images(torch.zeros(0, 3, 4, 4), degrees).shape == (0, 3, 4, 4)


def test_a_small_angle_turns_the_way_a_quarter_turn_does():
    image = torch.zeros(1, 1, 21, 21)
    image[..., 10, 18] = 1  # to the right of the middle
    for degrees in (60.0, 90.0):
        row, _ = divmod(int(rotate_images(image, degrees).argmax()), 21)
        assert row < 10  # counter-clockwise, upwards


@settings(max_examples=60, deadline=None, derandomize=True)
@given(permutation=st.permutations(range(7)), labels=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_a_permutation_is_undone_by_its_inverse(permutation, labels):
    stored = torch.tensor(labels)
    view, inverse = ClientView(label_map=permutation), ClientView(label_map=np.argsort(permutation))
    seen = view.targets(stored)
    assert seen.tolist() == [permutation[label] for label in labels]
    assert torch.equal(inverse.targets(seen), stored)
    counts = np.bincount(labels, minlength=7)
    assert np.array_equal(view.counts(counts), np.bincount(seen.numpy(), minlength=7))
    assert np.array_equal(inverse.counts(view.counts(counts)), counts)


def test_equal_views_are_equal():
    assert ClientView(360.0, (0, 1, 2)) == ClientView() == ClientView(-0.0)
    assert ClientView(-90) == ClientView(270.0)
    assert ClientView().is_identity
    assert not ClientView(label_map=(1, 0)).is_identity
    assert views_to_bytes([ClientView()] * 3) == b""
    assert views_to_bytes([ClientView(90), ClientView()]) != views_to_bytes([ClientView(), ClientView(90)])
    with pytest.raises(ValueError, match=r"every class from 0 to 2 once, got \[0, 2, 2\]"):
        ClientView(label_map=(0, 2, 2))


def test_views_in_words():
    views = [ClientView(), ClientView(22.5), ClientView(0, (1, 0)), ClientView(90, (2, 1, 0)), ClientView(0, (1, 0))]
    assert describe_views(views) == ["", "22.5°", "labels 1", "90°, labels 2", "labels 1"]
