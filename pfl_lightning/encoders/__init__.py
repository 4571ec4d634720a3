"""Encoders: networks from samples to features, by class and by registered name.

An encoder is a `torch.nn.Module` built as `Encoder(input_shape=(C, H, W), ...)` with an integer attribute
`out_features` and a forward from (N, C, H, W) to (N, out_features).
"""

from pfl_lightning.encoders.fedpac import FedPACCNN
from pfl_lightning.encoders.mlp import MLP
from pfl_lightning.encoders.registry import build_encoder, encoder_names, register
from pfl_lightning.encoders.small import SmallCNN

__all__ = ["MLP", "FedPACCNN", "SmallCNN", "build_encoder", "encoder_names", "register"]
