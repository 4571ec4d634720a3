import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.encoders import DCPFLCNN, FedProtoCNN, SmallAlexNet, build_encoder, encoder_names, num_parameters

SIDES = (28, 32, 64, 224)
FEATURES = {"resnet": 512, "fedproto_resnet": 512, "dcpfl": 500, "fedproto_cnn": 50, "small_alexnet": 512}
FEATURES |= {"shufflenet_v2": 512, "googlenet": 512, "fedpac_cnn": 128, "mlp": 64, "small_cnn": 64, "fedavg_cnn": 512}


@pytest.mark.repeated
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_name_takes_every_size(side, channels):
    for name in encoder_names():
        with torch.device("meta"):
            encoder = build_encoder(name, (channels, side, side))
            features = encoder(torch.empty(2, channels, side, side))
        assert features.shape == (2, encoder.out_features), name
        assert encoder.out_features == next(width for start, width in FEATURES.items() if name.startswith(start))


@pytest.mark.parametrize("name", ["resnet18_512", "shufflenet_v2", "googlenet", "small_alexnet", "dcpfl_cnn2"])
def test_every_parameter_learns(name):
    torch.manual_seed(0)
    encoder = build_encoder(name, (1, 28, 28))
    encoder(torch.randn(4, 1, 28, 28)).pow(2).sum().backward()
    without = [n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def dcpfl_parameters(channels, side, filters=(16, 32), hidden=2000):
    left = ((side - 4) // 2 - 4) // 2
    convolutions = 25 * channels * filters[0] + filters[0] + 25 * filters[0] * filters[1] + filters[1]
    return convolutions + filters[1] * left**2 * hidden + hidden + hidden * 500 + 500


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 64)])
@pytest.mark.parametrize(
    ("number", "options"),
    [(1, {}), (2, {"filters": (16, 16)}), (3, {"hidden": 1000}), (4, {"hidden": 800}), (5, {"hidden": 500})],
)
def test_parameters_of_the_five_networks_of_dcpfl(number, options, channels, side):
    with torch.device("meta"):
        encoder = build_encoder(f"dcpfl_cnn{number}", (channels, side, side))
    assert num_parameters(encoder) == dcpfl_parameters(channels, side, **options)


@torch.no_grad()
def test_dcpfl_in_the_papers_order():
    torch.manual_seed(0)
    encoder, linear = DCPFLCNN((3, 32, 32), hidden=30), DCPFLCNN((3, 32, 32), hidden=30, final_relu=False)
    linear.load_state_dict(encoder.state_dict())
    first, second = (layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d))
    x = images = torch.randn(2, 3, 32, 32)
    for layer in (first, second):
        x = F.max_pool2d(F.relu(layer(x)), 2)
    x = encoder.features[3](F.relu(encoder.features[1](x.flatten(1))))
    torch.testing.assert_close(linear(images), x)
    torch.testing.assert_close(encoder(images), F.relu(x))


@torch.no_grad()
def test_fedproto_in_the_order_of_its_code():
    torch.manual_seed(0)
    encoder = FedProtoCNN((1, 28, 28), channels=18).eval()
    first, second = (layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d))
    images = torch.randn(2, 1, 28, 28)
    x = F.relu(F.max_pool2d(second(F.relu(F.max_pool2d(first(images), 2))), 2))
    assert x.shape[1:] == (18, 4, 4)
    torch.testing.assert_close(encoder(images), F.relu(encoder.features[1](x.flatten(1))))


@pytest.mark.parametrize("channels", [18, 20, 22])
def test_widths_of_fedproto(channels):
    encoder = build_encoder(f"fedproto_cnn_{channels}", (1, 28, 28))
    assert num_parameters(encoder) == (25 + 1) * 10 + (250 + 1) * channels + (16 * channels + 1) * 50
    assert encoder.out_features == 50
    encoder.train()
    torch.manual_seed(0)
    dropped = encoder.convolutions(torch.randn(1, 1, 28, 28)).flatten(2).sum(2) == 0
    assert 0 < dropped.sum() < channels


@pytest.mark.parametrize(
    ("side", "options", "sides"),
    [
        (28, {}, [14, 7, 3]),
        (32, {}, [16, 8, 4]),
        (8, {}, [4, 4, 4]),
        (20, {}, [10, 5, 5]),
        (2, {}, [2, 2, 2]),
        (28, {"pooling": "published"}, [29, 15, 15]),
    ],
)
def test_pooling_of_the_small_alexnet(side, options, sides):
    encoder = SmallAlexNet((1, side, side), out_features=8, **options).eval()
    x = torch.randn(2, 1, side, side)
    found = []
    for layer in encoder.convolutions:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            found.append(x.shape[-1])
    assert found == sides
    assert encoder.features(x).shape == (2, 8)


@torch.no_grad()
@pytest.mark.parametrize("hidden", [512, None])
def test_layers_of_the_small_alexnet(hidden):
    """As published: three convolutions, then dropout, two linear layers and ReLU between them; or one linear layer."""
    torch.manual_seed(0)
    encoder = SmallAlexNet((3, 32, 32), hidden=hidden).eval()
    convolutions = 28 * 64 + (9 * 64 + 1) * 128 + (9 * 128 + 1) * 256
    linear = (9 * 256 + 1) * 512
    assert num_parameters(encoder) == convolutions + linear + (513 * 512 if hidden else 0)
    behind = [nn.Linear, nn.ReLU, nn.Linear] if hidden else [nn.Linear]
    assert [type(layer) for layer in encoder.features] == [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Dropout, *behind]
    x = images = torch.randn(2, 3, 32, 32)
    for layer in encoder.convolutions:
        if isinstance(layer, nn.Conv2d):
            x = F.max_pool2d(F.relu(layer(x)), 2)
    x = F.adaptive_avg_pool2d(x, 3).flatten(1)
    expected = F.linear(x, encoder.features[3].weight, encoder.features[3].bias)
    if hidden:
        expected = F.linear(F.relu(expected), encoder.features[5].weight, encoder.features[5].bias)
    torch.testing.assert_close(encoder(images), expected)


def test_the_small_alexnet_by_its_name_is_the_published_one():
    kinds = [str(layer).split("(")[0] for layer in build_encoder("small_alexnet", (3, 32, 32)).features]
    assert kinds == ["AdaptiveAvgPool2d", "Flatten", "Dropout", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DCPFLCNN((3, 15, 32)),
            r"\(3, 15, 32\) is too small for DCPFLCNN.*0 x 5 pixels; use larger images",
        ),
        (lambda: DCPFLCNN((3, 32, 32), filters=(16,)), r"two convolutions, got filters=\(16,\)"),
        (lambda: DCPFLCNN((3, 32, 32), hidden=0), r"positive widths, got .* layers \[0, 500\]"),
        (lambda: FedProtoCNN((1, 8, 8)), "too small for FedProtoCNN"),
        (lambda: FedProtoCNN((1, 28, 28), kernels=(5, 5, 5)), "two kernel sizes"),
        (lambda: FedProtoCNN((1, 28, 28), channels=0), r"\(0, 5\)"),
        (lambda: SmallAlexNet((1, 28, 28), out_features=0), "out_features must be at least 1, got 0"),
        (lambda: SmallAlexNet((1, 28, 28), hidden=0), "hidden must be at least 1"),
        (
            lambda: SmallAlexNet((1, 28, 28), pooling="none"),
            "pooling must be one of .*'published'.*got 'none'",
        ),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
