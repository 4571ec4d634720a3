import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from pfl_lightning.encoders import MLP, FedPACCNN, SmallCNN, build_encoder, encoder_names, register, registry


def conv(before, after, kernel):
    return before * after * kernel**2 + after


def linear(before, after):
    return before * after + after


# Counted by hand from the papers' descriptions: weights and biases of each layer.
CASES = [
    ("fedpac_cnn", (1, 28, 28), {}, 128, conv(1, 16, 5) + conv(16, 32, 5) + linear(32 * 5 * 5, 128)),
    (
        "fedpac_cnn",
        (3, 32, 32),
        {},
        128,
        conv(3, 16, 5) + conv(16, 32, 5) + conv(32, 64, 3) + linear(64 * 3 * 3, 128),
    ),
    ("fedpac_cnn", (3, 32, 32), {"convolutions": 2}, 128, conv(3, 16, 5) + conv(16, 32, 5) + linear(32 * 6 * 6, 128)),
    (
        "fedpac_cnn",
        (1, 28, 40),
        {"convolutions": 3, "paddings": [2, 2, 1], "out_features": 50},
        50,
        conv(1, 16, 5) + conv(16, 32, 5) + conv(32, 64, 3) + linear(64 * 3 * 5, 50),
    ),
    ("small_cnn", (1, 8, 8), {}, 64, conv(1, 16, 3) + conv(16, 32, 3) + linear(32 * 2 * 2, 64)),
    # With a layer to ten classes the 1,663,370 parameters that the FedAvg paper counts.
    ("fedavg_cnn", (1, 28, 28), {}, 512, 1_663_370 - linear(512, 10)),
    ("fedavg_cnn", (3, 32, 32), {}, 512, conv(3, 32, 5) + conv(32, 64, 5) + linear(64 * 8 * 8, 512)),
    ("small_cnn", (3, 16, 9), {"channels": [4], "out_features": 7}, 7, conv(3, 4, 3) + linear(4 * 8 * 4, 7)),
    ("mlp", (1, 8, 8), {}, 64, linear(64, 128) + linear(128, 64)),
    ("mlp", (30,), {"hidden": [20, 10], "out_features": 5}, 5, linear(30, 20) + linear(20, 10) + linear(10, 5)),
    ("mlp", (2, 3), {"hidden": []}, 64, linear(6, 64)),
]


@pytest.mark.parametrize(("name", "shape", "options", "width", "parameters"), CASES)
def test_shapes_and_parameter_counts(name, shape, options, width, parameters):
    encoder = build_encoder(name, list(shape), **options)
    assert encoder.out_features == width
    assert encoder(torch.randn(3, *shape)).shape == (3, width)
    assert encoder(torch.randn(1, *shape)).shape == (1, width)
    assert sum(p.numel() for p in encoder.parameters()) == parameters


@pytest.mark.parametrize(("convolutions", "shape"), [(2, (1, 28, 28)), (3, (3, 32, 32))])
def test_pooling_first_equals_the_papers_order(convolutions, shape):
    torch.manual_seed(0)
    encoder = FedPACCNN(shape)
    images = torch.randn(4, *shape)
    x = images
    layers = [layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d)]
    assert len(layers) == convolutions
    for layer in layers:
        x = nn.functional.max_pool2d(nn.functional.leaky_relu(layer(x)), 2)  # LeakyReLU, then pooling
    expected = nn.functional.leaky_relu(encoder.features[1](x.flatten(1)))
    assert torch.equal(encoder(images), expected)


def test_same_seed_same_weights():
    torch.manual_seed(3)
    first = build_encoder("small_cnn", (1, 8, 8)).state_dict()
    torch.manual_seed(3)
    second = build_encoder("small_cnn", (1, 8, 8)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedPACCNN((3, 8, 8)), r"\(3, 8, 8\) is too small for FedPACCNN with 3 convolutions.*0 x 0 pixels"),
        (lambda: FedPACCNN((1, 4, 28)), r"\(1, 4, 28\) is too small.*0 x 5 pixels"),
        (lambda: FedPACCNN((28, 28)), r"input_shape=\(channels, height, width\)"),
        (lambda: FedPACCNN((1, 28, 28), convolutions=4), "2 or 3 convolutions, got convolutions=4"),
        (lambda: FedPACCNN((3, 32, 32), paddings=(0, 1)), "needs 3 paddings"),
        (lambda: FedPACCNN((3, 32, 32), out_features=0), "needs positive widths"),
        (lambda: SmallCNN((1, 3, 8)), r"\(1, 3, 8\) is too small for SmallCNN with 2 convolutions.*0 x 2 pixels"),
        (lambda: SmallCNN((1, 0, 8)), "positive integers"),
        (lambda: SmallCNN((1, 8, 8), channels=()), "at least one convolution"),
        (lambda: SmallCNN((1, 8, 8), kernel_size=4), "odd, positive kernel_size, got .*kernel_size=4"),
        (lambda: MLP(()), "positive integers"),
        (lambda: MLP((4,), hidden=(0,)), "positive integers"),
    ],
)
def test_bad_shapes_and_widths(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_names_are_listed_and_the_nearest_suggested():
    assert {"fedpac_cnn", "mlp", "small_cnn"} <= set(encoder_names())
    assert list(encoder_names()) == sorted(encoder_names())
    with pytest.raises(ValueError, match=r"unknown encoder 'fedpac_cn'; did you mean 'fedpac_cnn'\?; known: .*mlp"):
        build_encoder("fedpac_cn", (1, 28, 28))
    with pytest.raises(ValueError, match=r"unknown encoder 'zzz'; known: "):
        build_encoder("zzz", (1, 28, 28))
    with pytest.raises(TypeError, match=r"'mlp' has no option 'hiden'; did you mean 'hidden'\?; known: hidden"):
        build_encoder("mlp", (4,), hiden=(3,))


@pytest.fixture
def _clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODERS", dict(registry._ENCODERS))


@pytest.mark.usefixtures("_clean_registry")
def test_registering_a_user_defined_encoder():
    @register("identity")
    class Identity(nn.Module):
        def __init__(self, input_shape, **options):
            super().__init__()
            self.out_features = options.get("width", input_shape[0])

        def forward(self, x):
            return x

    assert build_encoder("identity", (4,)).out_features == 4
    assert build_encoder("identity", (4,), width=2).out_features == 2
    assert register("identity")(Identity) is Identity
    with pytest.raises(ValueError, match="'mlp' is already used by MLP"):
        register("mlp")(Identity)


@pytest.mark.usefixtures("_clean_registry")
def test_a_class_without_out_features_is_refused():
    @register("broken")
    class Broken(nn.Module):
        def __init__(self, input_shape):
            super().__init__()

    with pytest.raises(TypeError, match="'broken' must set an integer attribute `out_features`"):
        build_encoder("broken", (4,))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("FedPACCNN", {"input_shape": [3, 32, 32], "convolutions": 3}),
        ("SmallCNN", {"input_shape": [1, 8, 8], "channels": [8, 8]}),
        ("MLP", {"input_shape": [1, 8, 8], "hidden": [32]}),
    ],
)
def test_buildable_by_class_path(path, options):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--encoder", type=nn.Module)
    parsed = parser.parse_object({"encoder": {"class_path": f"pfl_lightning.encoders.{path}", "init_args": options}})
    instantiate = (
        getattr(parser, "instantiate", None) or parser.instantiate_classes
    )  # the latter before jsonargparse 4.49
    encoder = instantiate(parsed).encoder
    assert type(encoder).__name__ == path
    assert encoder(torch.randn(2, *options["input_shape"])).shape == (2, encoder.out_features)


def test_a_name_with_options(monkeypatch):
    monkeypatch.setattr(registry, "_ENCODERS", dict(registry._ENCODERS))

    def decorate(**options):
        @register("thin", **options)
        class Thin(nn.Module):
            def __init__(self, input_shape, width=3):
                super().__init__()
                self.out_features = width

        return Thin

    decorate(width=5)
    assert build_encoder("thin", (4,)).out_features == 5
    assert build_encoder("thin", (4,), width=6).out_features == 6
    with pytest.raises(TypeError, match="has no option 'wdth'; did you mean 'width'"):
        decorate(wdth=5)
