"""Encoders: networks from samples to features, by class and by registered name.

An encoder is a ``torch.nn.Module`` built as ``Encoder(input_shape=(C, H, W), ...)`` with an integer attribute
``out_features`` and a forward from (N, C, H, W) to (N, out_features).

Example:
    >>> import torch
    >>> from pfl_lightning.encoders import build_encoder
    >>> encoder = build_encoder("fedpac_cnn", input_shape=(3, 32, 32))
    >>> encoder.out_features, encoder(torch.rand(4, 3, 32, 32)).shape
    (128, torch.Size([4, 128]))
"""

from pfl_lightning.encoders.assignment import (
    ByClient,
    ByShare,
    EncoderAssignment,
    EncoderFactory,
    RoundRobin,
    encoder_label,
)
from pfl_lightning.encoders.convolutional import DCPFLCNN, FedPACCNN, FedProtoCNN, SmallAlexNet, SmallCNN
from pfl_lightning.encoders.mlp import MLP, WithProjector
from pfl_lightning.encoders.registry import build_encoder, encoder_class, encoder_names, num_parameters, register
from pfl_lightning.encoders.torchvision_nets import GoogLeNet, ResNet18, ShuffleNetV2

__all__ = ["DCPFLCNN", "MLP", "FedPACCNN", "FedProtoCNN", "GoogLeNet", "ResNet18", "ShuffleNetV2", "SmallAlexNet"]
__all__ += ["ByClient", "ByShare", "EncoderAssignment", "EncoderFactory", "RoundRobin", "SmallCNN", "WithProjector"]
__all__ += ["build_encoder", "encoder_class", "encoder_label", "encoder_names", "num_parameters", "register"]
