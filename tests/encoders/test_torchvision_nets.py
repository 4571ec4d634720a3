import copy
import warnings

import pytest
import torch
import torchvision
from torch import nn

from pfl_lightning.encoders import GoogLeNet, ResNet18, ShuffleNetV2, build_encoder

REFERENCES = {
    ResNet18: torchvision.models.resnet18,
    ShuffleNetV2: torchvision.models.shufflenet_v2_x1_0,
    GoogLeNet: lambda: torchvision.models.googlenet(init_weights=True),
}


def reference(encoder, seed=0):
    """torchvision's own network, with batch statistics as after some training, in evaluation mode."""
    torch.manual_seed(seed)
    network = REFERENCES[encoder]()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def first_weight(network):
    return next(module for module in network.modules() if isinstance(module, nn.Conv2d)).weight


@pytest.fixture(scope="module", params=REFERENCES, ids=lambda encoder: encoder.__name__)
def trained(request, tmp_path_factory):
    """An encoder's class, torchvision's network without its classifier, and a file with torchvision's state dict."""
    network = reference(request.param)
    file = tmp_path_factory.mktemp("weights") / "network.pth"
    torch.save(network.state_dict(), file)
    trunk = copy.deepcopy(network)
    trunk.fc = nn.Identity()
    trunk.double()  # rounding apart from layouts and order of sums
    return request.param, trunk, str(file)


@torch.no_grad()
def test_features_are_those_of_torchvision(trained):
    encoder, trunk, file = trained
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    loaded = encoder((3, 64, 64), out_features=None, weights=file).eval().double()
    expected = trunk(images)
    torch.testing.assert_close(loaded(images), expected, rtol=1e-9, atol=1e-9)
    assert loaded.out_features == expected.shape[1]


@torch.no_grad()
def test_a_linear_layer_follows(trained):
    encoder, trunk, file = trained
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    loaded = encoder((3, 32, 32), out_features=7, weights=file).eval().double()
    expected = trunk(images) @ loaded.fc.weight.T + loaded.fc.bias
    torch.testing.assert_close(loaded(images), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_gray_images_are_seen_as_in_three_equal_channels(trained):
    encoder, trunk, file = trained
    images = torch.randn(2, 1, 40, 40, dtype=torch.float64)
    loaded = encoder((1, 40, 40), out_features=None, weights=file).eval().double()
    expected = trunk(images.expand(-1, 3, -1, -1))
    # The file is in single precision, and so is the sum over the colors.
    torch.testing.assert_close(loaded(images), expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("encoder", REFERENCES, ids=lambda encoder: encoder.__name__)
def test_the_same_seed_draws_torchvisions_initial_weights(encoder):
    torch.manual_seed(5)
    own = encoder((3, 32, 32), out_features=1000).state_dict()
    torch.manual_seed(5)
    other = REFERENCES[encoder]().state_dict() if encoder is not GoogLeNet else _googlenet().state_dict()
    assert list(own) == list(other)
    assert all(torch.equal(own[name], other[name]) for name in own)


def _googlenet():
    return torchvision.models.GoogLeNet(aux_logits=False, init_weights=True)


@pytest.mark.parametrize("encoder", REFERENCES, ids=lambda encoder: encoder.__name__)
def test_one_channel_is_drawn_as_three_are(encoder):
    torch.manual_seed(0)
    gray, color = first_weight(encoder((1, 32, 32))), first_weight(encoder((3, 32, 32)))
    assert gray.shape == (color.shape[0], 1, *color.shape[2:])
    # torchvision draws ResNet's and GoogLeNet's independently of the channels, ShuffleNet's by 1 / sqrt(channels).
    ratio = 3**0.5 if encoder is ShuffleNetV2 else 1
    assert (gray.std() / color.std()).item() == pytest.approx(ratio, rel=0.15)


def test_transformed_input_is_torchvisions():
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    own = GoogLeNet((3, 32, 32), out_features=10, transform_input=True).eval()
    torch.manual_seed(0)
    other = torchvision.models.GoogLeNet(10, aux_logits=False, transform_input=True, init_weights=True).eval()
    torch.testing.assert_close(own(images), other(images), rtol=1e-5, atol=1e-6)


def test_no_warnings():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for encoder in REFERENCES:
            encoder((3, 32, 32))
    assert [str(warning.message) for warning in said] == []


def _sizes(encoder, size):
    """Sides of the images after each stage."""
    sizes = []
    for stage in (encoder.maxpool, encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4):
        stage.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    encoder(torch.empty(2, 3, size, size, device="meta"))
    return sizes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [16, 16, 8, 4, 2]),
        ({"stem": "small"}, [64, 64, 32, 16, 8]),
        ({"strides": (1, 1, 2, 1)}, [16, 16, 16, 8, 8]),
        ({"strides": (2, 2, 2, 2)}, [16, 8, 4, 2, 1]),
        ({"stem_strides": (1, 4)}, [16, 16, 8, 4, 2]),
        ({"stem_strides": (1, 1)}, [64, 64, 32, 16, 8]),
        ({"layers": (1, 1, 1, 1)}, [16, 16, 8, 4, 2]),
    ],
)
def test_strides_of_resnet(options, expected):
    with torch.device("meta"):
        encoder = ResNet18((3, 64, 64), **options)
    assert _sizes(encoder, 64) == expected


def test_resnet_10_is_torchvisions():
    torch.manual_seed(1)
    own = ResNet18((3, 32, 32), layers=(1, 1, 1, 1), out_features=5).eval()
    torch.manual_seed(1)
    block = torchvision.models.resnet.BasicBlock
    other = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(own(images), other(images), rtol=1e-5, atol=1e-5)


def test_the_registered_variants():
    with torch.device("meta"):
        built = {name: build_encoder(name, (3, 32, 32)) for name in ("resnet18", "resnet18_512", "resnet18_small")}
        a, b = build_encoder("fedproto_resnet18_a", (3, 32, 32)), build_encoder("fedproto_resnet18_b", (3, 32, 32))
        both = build_encoder("resnet18_512", (3, 32, 32), stem="small")
    assert isinstance(built["resnet18"].fc, nn.Identity)
    assert built["resnet18_512"].fc.weight.shape == (512, 512)
    assert built["resnet18_small"].conv1.kernel_size == (3, 3)
    assert (a.conv1.stride, a.maxpool.stride) == ((1, 1), 4)
    assert (b.conv1.stride, b.maxpool.stride) == ((2, 2), 2)
    assert both.conv1.kernel_size == (3, 3)
    assert both.fc.weight.shape == (512, 512)


@pytest.mark.parametrize(
    ("name", "side", "channels_last"),
    [("resnet18", 32, False), ("resnet18", 64, True), ("resnet18_small", 28, True), ("shufflenet_v2", 28, True)],
)
def test_layouts(name, side, channels_last):
    weight = first_weight(build_encoder(name, (3, side, side)))
    assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResNet18((3, 32, 32), stem="tiny"), r"one of \('imagenet', 'small'\), got 'tiny'"),
        (
            lambda: ResNet18((3, 32, 32), layers=(2, 2, 2)),
            r"layers of ResNet18 are 4 positive .* \(2, 2, 2\)",
        ),
        (lambda: ResNet18((3, 32, 32), strides=(1, 0, 2, 2)), "strides of ResNet18 are 4 positive"),
        (lambda: ResNet18((3, 32, 32), stem_strides=(1,)), "stem_strides of ResNet18 are 2 positive"),
        (lambda: ResNet18((3, 32, 32), stem="small", stem_strides=(1, 4)), "the small stem has none"),
        (lambda: ResNet18((3, 32, 32), out_features=0), "out_features must be at least 1"),
        (lambda: ResNet18((32, 32)), r"input_shape=\(channels, height, width\)"),
        (lambda: ShuffleNetV2((3, 32, 32), out_features=-1), "out_features must be at least 1"),
        (lambda: GoogLeNet((3, 14, 32)), r"\(3, 14, 32\) is too small for GoogLeNet.* 15 x 15"),
        (lambda: GoogLeNet((1, 32, 32), transform_input=True), "images of 3 channels, got 1"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
