"""Strong augmentation of whole batches: each image its own draws, distributed as torchvision's, one image at a time."""

import itertools

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from pfl_lightning.datamodules import (
    BatchTransform,
    ColorJitter,
    RandomCrop,
    RandomFlip,
    RandomGrayscale,
    RandomResizedCrop,
    RandomRotation,
    StrongAugmentation,
)

NAN, INF = float("nan"), float("inf")
ALL = [
    RandomResizedCrop(),
    RandomRotation(30),
    RandomRotation(30, "bilinear"),
    ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
    RandomGrayscale(0.5),
    StrongAugmentation(),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(side: int = 6) -> torch.Tensor:
    """Smooth colors with some noise: neither flat nor without neighborhood."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    smooth = torch.stack([0.2 + 0.6 * x, 0.8 - 0.5 * y, 0.3 + 0.4 * x * y])
    return (smooth + 0.1 * torch.rand(3, side, side, generator=seeded())).clamp_(0, 1)


def assert_same_distribution(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Means and variances of every column differ by less than 5 standard errors."""

    def moments(draws):
        draws = draws.double().flatten(1)
        centerd = draws - draws.mean(dim=0)
        variance = centerd.square().mean(dim=0)
        return draws.mean(dim=0), variance, variance / len(draws), centerd.square().var(dim=0) / len(draws)

    mean, variance, mean_error, variance_error = moments(ours)
    mean_2, variance_2, mean_error_2, variance_error_2 = moments(theirs)
    assert ((mean - mean_2).abs() <= 5 * (mean_error + mean_error_2).sqrt() + 1e-6).all()
    assert ((variance - variance_2).abs() <= 5 * (variance_error + variance_error_2).sqrt() + 1e-6).all()


def torchvisions(transform, image: torch.Tensor, count: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.stack([transform(image) for _ in range(count)])


@pytest.mark.parametrize("augmentation", ALL, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_alone_decides_and_the_inputs_stay(augmentation, dtype, channels):
    images = torch.rand(16, channels, 8, 10, generator=seeded())
    images = (images * 255).to(dtype) if dtype == torch.uint8 else images
    before = images.clone()
    first = augmentation(images, seeded(5))
    torch.manual_seed(99)
    assert torch.equal(first, augmentation(images, seeded(5)))
    assert first.dtype == torch.float32
    assert first.shape == images.shape
    assert torch.equal(images, before)
    assert first.data_ptr() != images.data_ptr()
    assert 0 <= first.min() <= first.max() <= 1
    if channels == 3:
        assert not torch.equal(first, augmentation(images, seeded(6)))
    if dtype == torch.uint8:
        torch.testing.assert_close(first, augmentation(images.float() / 255, seeded(5)))
    assert augmentation(images[:0], seeded()).shape == (0, channels, 8, 10)


class Inverted(RandomFlip):
    """A user's subclass, which draws by itself."""

    def draw(self, batch, generator=None):
        return torch.rand(batch, generator=generator) > self.p


@pytest.mark.parametrize(
    "augmentation", [*ALL, RandomCrop(2), RandomFlip(), Inverted(0.3)], ids=lambda one: type(one).__name__
)
def test_parts_of_several_generators_are_each_as_alone(augmentation):
    images, sizes = torch.rand(9, 3, 8, 10, generator=seeded()), [4, 2, 3]
    transform = BatchTransform((0.5,) * 3, (0.2,) * 3, (augmentation, RandomFlip()))
    together = transform.augment(images, tuple((seeded(k), size) for k, size in enumerate(sizes)))
    alone = [transform.augment(part, seeded(k)) for k, part in enumerate(images.split(sizes))]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("augmentation", [ALL[0], ALL[2], ALL[3], ALL[5]], ids=lambda one: type(one).__name__)
def test_each_image_has_its_own_draw(augmentation):
    results = augmentation(picture(24).expand(64, 3, 24, 24), seeded()).flatten(1)
    assert len({tuple(row) for row in results.tolist()}) > 40  # about a fifth are not jittered and remain the same


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [(32, 32, (0.08, 1.0), (3 / 4, 4 / 3)), (8, 40, (0.2, 1.0), (3 / 4, 4 / 3)), (24, 17, (0.5, 0.9), (0.5, 0.7))],
)
def test_boxes_are_distributed_as_torchvisions(height, width, scale, ratio):
    own = RandomResizedCrop(scale, ratio).boxes(20000, height, width, seeded()).T
    image = torch.zeros(1, height, width)
    torch.manual_seed(0)
    params = [v2.RandomResizedCrop((height, width), scale, ratio).make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[p["top"], p["left"], p["height"], p["width"]] for p in params])

    def described(boxes):
        top, left, tall, wide = boxes.double().unbind(1)
        return torch.stack([top, left, tall, wide, tall * wide, (wide / tall).log(), top * left], dim=1)

    assert_same_distribution(described(own), described(theirs))
    assert (own[:, 0] + own[:, 2] <= height).all()
    assert (own[:, 1] + own[:, 3] <= width).all()


def test_a_shape_that_never_fits_takes_the_middle():
    for shape, ratio in (((8, 40), (3 / 4, 4 / 3)), ((40, 8), (3 / 4, 4 / 3)), ((9, 9), (1.0, 1.0))):
        crop = RandomResizedCrop((1.0, 1.0), ratio)
        expected = v2.RandomResizedCrop(shape, (1.0, 1.0), ratio).make_params([torch.zeros(1, *shape)])
        assert crop.boxes(1, *shape, seeded())[:, 0].tolist() == [
            expected[key] for key in ("top", "left", "height", "width")
        ]


def test_jitter_is_torchvisions_functions_in_each_images_own_order():
    jitter = ColorJitter(0.8, 0.7, 0.9, 0.3, p=0.7)
    images = torch.rand(200, 3, 5, 4, generator=seeded())
    drawn = jitter.draw(200, seeded(3))
    names = ("brightness", "contrast", "saturation", "hue")
    expected = images.clone()
    for i in range(200):
        for kind in drawn.order[:, i].tolist() if drawn.tones_before[i] >= 0 else []:
            expected[i] = getattr(functional, f"adjust_{names[kind]}")(expected[i], float(drawn.amounts[kind, i]))
    changed = jitter(images, seeded(3))
    torch.testing.assert_close(changed, expected, atol=2e-5, rtol=0)
    untouched = drawn.tones_before < 0
    assert torch.equal(changed[untouched], images[untouched])


def test_orders_and_amounts_of_the_jitter_are_uniform_and_independent():
    drawn = ColorJitter(0.4, 1.5, 0.2, 0.1, p=0.8).draw(24000, seeded())
    orders = list(itertools.permutations(range(4)))
    places = (drawn.order.T[:, None] == torch.tensor(orders)).all(dim=2).double().sum(dim=0)
    assert ((places - 1000).square() / 1000).sum() < 49.7  # chi-square, 23 degrees of freedom, 0.1 per cent
    assert abs(float((drawn.tones_before >= 0).double().mean()) - 0.8) < 5 * (0.16 / 24000) ** 0.5
    bounds = torch.tensor([[0.6, 1.4], [0.0, 2.5], [0.8, 1.2], [-0.1, 0.1]])
    unit = (drawn.amounts - bounds[:, :1]) / (bounds[:, 1:] - bounds[:, :1])
    assert 0 <= unit.min() <= unit.max() <= 1
    for row in unit:
        counts = torch.histc(row, 20, 0, 1)
        assert ((counts - 1200).square() / 1200).sum() < 43.9  # 19 degrees of freedom
    every = torch.cat([unit, drawn.order[:1], drawn.tones_before[None] >= 0])
    neighbors = torch.corrcoef(torch.cat([every[:, :-1], every[:4, 1:]])) - torch.eye(10)
    assert neighbors.abs().max() < 5 / 24000**0.5


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (ColorJitter(0.8, 0.8, 0.8, 0.2), v2.ColorJitter(0.8, 0.8, 0.8, 0.2)),
        (ColorJitter(0.4, p=0.3), v2.RandomApply([v2.ColorJitter(0.4)], 0.3)),
        (RandomGrayscale(0.3), v2.RandomGrayscale(0.3)),
        (RandomRotation(40), v2.RandomRotation(40)),
        (RandomResizedCrop(), v2.RandomResizedCrop(6)),
        (
            StrongAugmentation(),
            v2.Compose(
                [
                    v2.RandomResizedCrop(6, scale=(0.2, 1.0)),
                    v2.RandomHorizontalFlip(),
                    v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
                    v2.RandomGrayscale(0.2),
                ]
            ),
        ),
    ],
    ids=["jitter", "brightness", "gray", "rotation", "crop", "strong"],
)
def test_pixels_are_distributed_as_torchvisions(own, theirs):
    image = picture()
    ours = own(image.expand(10000, 3, 6, 6), seeded())
    reference = torchvisions(theirs, image, 1500)

    def described(draws):
        flat = draws.flatten(1)
        return torch.cat(
            [flat, draws.mean(dim=(2, 3)), draws.var(dim=(2, 3)), draws.amax(1).sub(draws.amin(1))[:, 0]], 1
        )

    assert_same_distribution(described(ours), described(reference))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_strong_augmentation_is_the_chain_of_its_parts(channels):
    strong = StrongAugmentation(scale=(0.1, 0.8), flip=0.4, hue=0.3, jitter=0.6, grayscale=0.5)
    images = torch.randint(0, 256, (50, channels, 9, 7), dtype=torch.uint8, generator=seeded())
    generator, chained = seeded(4), images
    for part in strong.parts:
        chained = part(chained, generator)
    twin = seeded(4)
    torch.testing.assert_close(strong(images, twin), chained, atol=2e-5, rtol=0)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=twin))  # as many draws


def test_settings_at_their_bounds_change_nothing():
    images = torch.rand(10, 3, 8, 8, generator=seeded())
    for none in (ColorJitter(), ColorJitter(1, 1, 1, 0.5, p=0.0), RandomGrayscale(0.0)):
        assert torch.equal(none(images, seeded()), images)
    whole = RandomResizedCrop((1.0, 1.0), (1.0, 1.0))
    torch.testing.assert_close(whole(images, seeded()), images, atol=1e-5, rtol=0)
    torch.testing.assert_close(RandomRotation(0)(images, seeded()), images, atol=1e-5, rtol=0)
    gray = RandomGrayscale(1.0)(images, seeded())
    assert torch.equal(gray[:, 0], gray[:, 2])
    only_hue = ColorJitter(hue=0.5)(images, seeded())
    torch.testing.assert_close(only_hue.amax(1), images.amax(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop((0.0, 1.0)), "scale must be two increasing shares"),
        (lambda: RandomResizedCrop((0.5, 1.1)), "scale must be two increasing shares"),
        (lambda: RandomResizedCrop((NAN, 1.0)), r"scale must be two increasing shares .*, got \(nan, 1.0\)"),
        (lambda: RandomResizedCrop(ratio=(2.0, 1.0)), "ratio must be two increasing finite values"),
        (
            lambda: RandomResizedCrop(ratio=(1.0, INF)),
            r"ratio must be two increasing finite values .*, got \(1.0, inf\)",
        ),
        (
            lambda: RandomResizedCrop(ratio=(NAN, 1.0)),
            r"ratio must be two increasing finite values .*, got \(nan, 1.0\)",
        ),
        (lambda: RandomCrop(-1), "padding must be at least 0, got -1"),
        (lambda: RandomCrop(2.5), "padding must be a whole number of at least 0, got 2.5"),
        (lambda: RandomCrop(NAN), "padding must be a whole number of at least 0, got nan"),
        (lambda: RandomFlip(NAN), "p must be between 0 and 1, got nan"),
        (lambda: RandomRotation(-1), "degrees must be between 0 and 360, got -1"),
        (lambda: RandomRotation(NAN), "degrees must be between 0 and 360, got nan"),
        (lambda: RandomRotation(INF), "degrees must be between 0 and 360, got inf"),
        (lambda: RandomRotation(10, "cubic"), "interpolation must be one of .'nearest', 'bilinear'., got 'cubic'"),
        (lambda: ColorJitter(-0.1), "brightness must be a finite number of at least 0"),
        (lambda: ColorJitter(NAN), "brightness must be a finite number of at least 0, got nan"),
        (lambda: ColorJitter(contrast=INF), "contrast must be a finite number of at least 0, got inf"),
        (lambda: ColorJitter(saturation=-0.1), "saturation must be a finite number of at least 0"),
        (lambda: ColorJitter(hue=0.6), "hue must be between 0 and 0.5"),
        (lambda: ColorJitter(hue=NAN), "hue must be between 0 and 0.5, got nan"),
        (lambda: ColorJitter(p=2), "p must be between 0 and 1, got 2"),
        (lambda: RandomGrayscale(-1), "p must be between 0 and 1"),
        (lambda: StrongAugmentation(brightness=NAN), "brightness must be a finite number of at least 0, got nan"),
        (lambda: StrongAugmentation(flip=1.5), "p must be between 0 and 1, got 1.5"),
        (lambda: StrongAugmentation()(torch.zeros(2, 4, 8, 8)), r"1 or 3 channels, got shape \(2, 4, 8, 8\)"),
        (lambda: ColorJitter(0.4)(torch.zeros(3, 8, 8)), r"shape \(B, C, H, W\), got \(3, 8, 8\)"),
        (lambda: RandomGrayscale()(torch.zeros(2, 2, 8, 8)), "1 or 3 channels"),
        (lambda: RandomResizedCrop()(torch.zeros(2, 3, 8, 8, dtype=torch.int64)), "got torch.int64"),
        (lambda: RandomFlip(0.5)(torch.zeros(2, 3)), r"shape \(B, C, H, W\), got \(2, 3\)"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
