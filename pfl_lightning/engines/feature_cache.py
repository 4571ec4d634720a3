"""Whether features may be computed once, in place of in every batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl_lightning.client import FitContext
from pfl_lightning.engines.generators import GeneratorStates
from pfl_lightning.seeding import torch_seed

__all__ = ["is_as_in_evaluation"]

SAMPLES = 16
"""Samples with which an encoder is tried."""


@torch.no_grad()
def is_as_in_evaluation(encoder: nn.Module, context: FitContext) -> bool:
    """Whether the encoder gives now what it gives in evaluation mode, for each sample by itself.

    No dropout, no batch statistics, no noise, nothing random, and no buffer that a pass changes. The encoder and all
    random generators are left as they were.

    Args:
        encoder: The encoder, in the modes of the fit.
        context: Client and data of the fit.
    """
    modes = {module: module.training for module in encoder.modules()}
    buffers = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    sample = context.data.convert_input(context.data.tensors()[0][:SAMPLES])
    with torch_seed(0, python=True), context.data.forward_context():
        drawn = GeneratorStates.read(sample.device)
        now = encoder(sample)
        steady = GeneratorStates.read(sample.device).is_as(drawn)
        for name, buffer in encoder.named_buffers():
            steady = steady and name in buffers and torch.equal(buffer, buffers[name])
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
        alike = steady and torch.equal(now, encoder.eval()(sample)) and _is_by_sample(encoder, sample, now)
    for module, mode in modes.items():
        module.training = mode
    return alike


def _is_by_sample(encoder: nn.Module, sample: Tensor, features: Tensor) -> bool:
    """Whether the features of the others stay as they are when one sample becomes another."""
    if len(sample) == 1:
        return True
    changed = sample.clone()
    changed[-1] = 1 - sample[0] if sample.is_floating_point() else sample[0]
    return torch.equal(encoder(changed)[:-1], features[:-1])
