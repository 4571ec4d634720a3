"""Mechanisms of privacy on the toy's shapes, without a Trainer."""

from functools import partial

import torch

from _helpers.toy import CLASSES, FEATURES, INPUTS, for_toy, tiny_encoder
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods import DCPFL, FedAvg, FedPAC, FedProto
from pfl_lightning.methods._class_means import ClassMeansUpdate
from pfl_lightning.methods.dcpfl import DCPFLUpdate
from pfl_lightning.methods.fedpac import FedPACUpdate
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.privacy.mechanism import PrivacyMechanism

CLIENTS = 20
METHODS = {
    "FedAvg": FedAvg,
    "FedProto": FedProto,
    "FedPAC": partial(FedPAC, combination=False),
    "DCPFL": DCPFL,
    "DCPFL matrices": partial(DCPFL, factors=False),
}


def make(name="FedAvg", **options):
    """A mechanism and its server."""
    method = METHODS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cls, own = (method.func, method.keywords) if isinstance(method, partial) else (method, {})
        client = for_toy(cls, **own)(tiny_encoder((INPUTS,)), CLASSES)
        server = client.configure_aggregator(CLIENTS)
    return PrivacyMechanism(ClientPrivacy(**{"noise_multiplier": 1.0, **options}), server, client, CLIENTS), server


def an_update(name, server, seed, scale=1.0):
    """A client's update of random content."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return scale * torch.randn(shape, generator=draw)

    weights = {
        n: w + numbers(*w.shape) for n, w in server.broadcast(0, 0).weights.items() if n in server.expected_weights
    }
    given = {"client": 0, "round": 0, "num_samples": 10**6, "weights": weights}
    if name == "FedAvg":
        return ClientUpdate(**given)
    classes = (torch.rand(CLASSES, generator=draw) < 0.6).nonzero().flatten()
    counts = torch.randint(2, 1000, (len(classes),), generator=draw)
    if name == "FedPAC":
        every = torch.zeros(CLASSES, dtype=torch.int64).index_copy_(0, classes, counts)
        return FedPACUpdate(**given, centroids=numbers(CLASSES, FEATURES), counts=every)
    given |= {"classes": classes, "means": numbers(len(classes), FEATURES), "counts": counts}
    if name == "FedProto":
        return ClassMeansUpdate(**given)
    factors = numbers(len(classes), 2, FEATURES)
    if name == "DCPFL":
        ranks = torch.full((len(classes),), 2)
        return DCPFLUpdate(**given, factors=factors.flatten(0, 1), ranks=ranks)
    return DCPFLUpdate(**given, covariances=factors.mT @ factors)
