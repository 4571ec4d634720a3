"""Changes by given amounts, one for each image, against torchvision's functions on each image alone."""

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from pfl_lightning.datamodules.augmentation.ops import (
    blend_,
    luma,
    resize_boxes,
    rotate,
    shift_hue_,
    to_gray_,
    unit_floats,
)

COUNT = 30


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images() -> torch.Tensor:
    """Random colors, and the cases in which channels are equal, at their bounds, or nearly gray."""
    images = torch.rand(COUNT, 3, 9, 13, generator=seeded())
    images[1] = images[1].round()
    images[2] = 0.5
    images[3, 0] = images[3, 1]
    images[4, 1] = images[4, 2]
    images[5, 2] = images[5, 0]
    images[6, 1:] = images[6, :1] + 1e-7
    return images.clamp_(0, 1)


def each(function, images, *amounts):
    return torch.stack(
        [function(image, *(float(a) for a in own)) for image, *own in zip(images, *amounts, strict=True)]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_tones(images, kind, channels):
    images, factors = images[:, :channels], 2 * torch.rand(COUNT, generator=seeded(1))
    zero, rest = torch.zeros(COUNT), 1 - factors
    weights = (factors, rest if kind == "contrast" else zero, rest if kind == "saturation" else zero)
    expected = each(getattr(functional, f"adjust_{kind}"), images, factors)
    torch.testing.assert_close(blend_(images.clone(), *weights), expected, atol=1e-6, rtol=0)


def test_hue(images):
    shifts = torch.rand(COUNT, generator=seeded(1)) - 0.5
    shifts[:3] = torch.tensor([-0.5, 0.5, 0.0])
    expected = each(functional.adjust_hue, images, shifts)
    # Where channels are nearly equal both sides round differences of 1e-7.
    torch.testing.assert_close(shift_hue_(images.clone(), shifts), expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(shift_hue_(images.clone(), torch.zeros(COUNT)), images, atol=5e-6, rtol=0)


def test_gray(images):
    torch.testing.assert_close(luma(images), functional.rgb_to_grayscale(images, 1), atol=1e-6, rtol=0)
    chosen = torch.arange(COUNT) % 3 == 0
    gray = to_gray_(images.clone(), chosen)
    torch.testing.assert_close(gray[chosen], functional.rgb_to_grayscale(images[chosen], 3), atol=1e-6, rtol=0)
    assert torch.equal(gray[~chosen], images[~chosen])
    assert torch.equal(to_gray_(images[:, :1].clone(), chosen), images[:, :1])


def test_boxes(images):
    height, width = images.shape[2:]
    tall = torch.randint(1, height + 1, (COUNT,), generator=seeded(1))
    wide = torch.randint(1, width + 1, (COUNT,), generator=seeded(2))
    tall[0], wide[0] = height, width
    top = (torch.rand(COUNT, generator=seeded(3)) * (height - tall + 1)).long()
    left = (torch.rand(COUNT, generator=seeded(4)) * (width - wide + 1)).long()
    boxes, flipped = torch.stack([top, left, tall, wide]), torch.arange(COUNT) % 2 == 0
    expected = torch.stack(
        [
            functional.resized_crop(image, *box, size=[height, width], antialias=True)
            for image, box in zip(images, boxes.T.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(resize_boxes(images, boxes), expected, atol=1e-5, rtol=0)
    expected[flipped] = expected[flipped].flip(-1)
    torch.testing.assert_close(resize_boxes(images, boxes, flipped), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_turns(images, mode):
    angles = 360 * torch.rand(COUNT, generator=seeded(1)) - 180
    turned = rotate(images, angles, mode)
    expected = each(lambda x, a: functional.rotate(x, a, interpolation=InterpolationMode(mode)), images, angles)
    # A coordinate midway between two pixels may fall to either.
    assert ((turned - expected).abs() > 1e-4).double().mean() < 0.001
    torch.testing.assert_close(rotate(images, torch.full((COUNT,), 180.0), mode), images.flip(2, 3), atol=1e-4, rtol=0)


def test_bytes_become_floats_and_floats_stay():
    pixels = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    assert torch.equal(unit_floats(pixels), pixels.float() / 255)
    floats = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert unit_floats(floats) is floats
    with pytest.raises(ValueError, match=r"unsigned bytes or floats, got torch\.int64"):
        unit_floats(pixels.long())
