"""A client whose loss clusters its features is trained by VectorizedEngine as by SequentialEngine."""

import pytest
import torch
from _helpers.toy import assert_same, for_toy, run, whole_state

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.functional import kmeans, prototype_contrastive_loss, prototype_meta_loss
from pfl_lightning.methods import FedAvg


class Clustered(FedAvg):
    """Clusters a batch, and takes its features for one view and half of them for the other."""

    noise: float | None = 0.37

    def loss_terms(self, features, labels):
        clusters = min(2, len(features))
        noise = None if self.noise is None else torch.full((4, clusters, 2), self.noise)
        found = kmeans(features, clusters, noise=noise).assignment
        views = features, features[::2], found, found[::2], clusters
        terms = {"meta": prototype_meta_loss(*views), "contrastive": prototype_contrastive_loss(*views)}
        return super().loss_terms(features, labels) | terms


class Drawing(Clustered):
    """From torch's default generator."""

    noise = None


def train(method, engine):
    return run(for_toy(method, lr=0.1, epochs=2), 2, engine=engine, cohorts=[[0, 2, 3], [1, 2]], precision="64-true")


@pytest.mark.parametrize("method", [Clustered, Drawing])
def test_is_vectorized(method):
    federation = train(method, VectorizedEngine(forward="vmap"))
    assert not federation.engine.groups.reasons
    assert not federation.engine._warned
    assert all(value.isfinite().all() for value in whole_state(federation).values())


def test_engines_agree():
    trained = [
        whole_state(train(Clustered, engine)) for engine in (VectorizedEngine(forward="vmap"), SequentialEngine())
    ]
    assert_same(*trained, atol=1e-8)
