"""Small objectives, a stand-in for a client's data, and views to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from _helpers.toy import tiny_encoder
from pfl_lightning.client import FitContext
from pfl_lightning.self_supervised import BYOL, MoCoV2, SimCLR, SimSiam, SMoG, SwAV

HIDDEN, OUT, BATCH = 7, 5, 6
BANK, PROTOTYPES, GROUPS = 20, 9, 4
WIDTHS = {"hidden": HIDDEN, "out": OUT}
SMALL = {
    "simclr": partial(SimCLR, **WIDTHS),
    "simclr, views apart": partial(SimCLR, **WIDTHS, separate_views=True),
    "byol": partial(BYOL, **WIDTHS, momentum=0.9),
    "byol without normalization": partial(BYOL, **WIDTHS, momentum=0.9, batch_norm=False),
    "byol by distances": partial(BYOL, **WIDTHS, momentum=0.9, squared_distances=True),
    "simsiam": partial(SimSiam, **WIDTHS),
    "mocov2": partial(MoCoV2, **WIDTHS, bank=BANK, momentum=0.9),
    "swav": partial(SwAV, **WIDTHS, prototypes=PROTOTYPES),
    "smog": partial(SMoG, **WIDTHS, groups=GROUPS, beta=0.8, momentum=0.9),
}


@dataclass
class Samples:
    """Data of a client, as far as an objective needs it."""

    inputs: torch.Tensor

    @property
    def num_samples(self):
        return len(self.inputs)

    def features(self, encoder):
        with torch.no_grad():
            found = encoder.eval()(self.inputs)
        encoder.train()
        return found, None

    forward_context = staticmethod(torch.no_grad)


def context(samples=40, seed=3):
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return FitContext(client=4, round=2, data=Samples(inputs))


def built(make, encoder=tiny_encoder):
    torch.manual_seed(0)
    network = encoder((6,)).double()
    return network, make(network).double()


def views(steps, batch=BATCH):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(2, batch, 6, generator=generator, dtype=torch.float64).unbind(0)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
