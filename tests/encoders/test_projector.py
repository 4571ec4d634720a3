"""An encoder with a projector behind it: its layers, and where it is named."""

from functools import partial

import pytest
import torch
from torch import nn

from pfl_lightning.encoders import ResNet18, SmallCNN, WithProjector, build_encoder, num_parameters
from pfl_lightning.methods import DualFed


def test_the_layers_are_those_of_the_paper():
    encoder = build_encoder("resnet18_projector", (3, 32, 32))
    assert isinstance(encoder.encoder, ResNet18)
    kinds = [type(layer) for layer in encoder.projector]
    assert kinds == [
        nn.Linear,
        nn.ReLU,
        nn.BatchNorm1d,
        nn.Linear,
        nn.BatchNorm1d,
    ]
    assert [p.shape for p in encoder.projector.parameters() if p.ndim == 2] == [(256, 512), (512, 256)]
    projector = 512 * 256 + 256 + 2 * 256 + 256 * 512 + 512 + 2 * 512
    assert num_parameters(encoder) == num_parameters(encoder.encoder) + projector


def test_the_features_are_the_projection():
    encoder = WithProjector((1, 12, 12), SmallCNN, hidden=7, depth=3, batch_norm=False).eval()
    images = torch.rand(4, 1, 12, 12)
    features = encoder.encoder(images)
    for layer in encoder.projector:
        features = features @ layer.weight.T + layer.bias if isinstance(layer, nn.Linear) else features.clamp(min=0)
    torch.testing.assert_close(encoder(images), features)
    assert encoder(images).shape == (4, encoder.out_features)


def test_it_is_the_projector_of_dualfed():
    torch.manual_seed(0)
    dualfed = DualFed(SmallCNN((1, 12, 12)), 3, projector_hidden=8)
    assert str(dualfed.projector) == str(WithProjector((1, 12, 12), partial(SmallCNN), hidden=8).projector)


@pytest.mark.parametrize("options", [{"hidden": 0}, {"depth": 0}])
def test_numbers_below_one_are_refused(options):
    with pytest.raises(ValueError, match="of WithProjector must be at least 1, got 0"):
        WithProjector((1, 12, 12), "small_cnn", **options)
