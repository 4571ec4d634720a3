"""``by_samples=False``: all clients count the same in the mean of methods whose published code takes the plain one."""

from functools import partial

import pytest
import torch
from _helpers.toy import Toy, run

from pfl_lightning.methods import Ditto, FedBABU, FedBN, FedProto

COUNTS = [len(Toy().labels[client]) for client in (0, 3)]


def server(method, cohort, **options):
    options = {"lr": 0.05, "epochs": 1, **options}
    return run(partial(method, **options), cohorts=[cohort], data=Toy(), limit_val_batches=0).server


@pytest.mark.filterwarnings("ignore:.*no batch normalization")
@pytest.mark.parametrize("method", [Ditto, FedBABU, FedBN])
@pytest.mark.parametrize("by_samples", [True, False])
def test_weights(method, by_samples):
    first, second = (server(method, [client]).weights.as_state() for client in (0, 3))
    both = server(method, [0, 3], by_samples=by_samples).weights.as_state()
    share = COUNTS[0] / sum(COUNTS) if by_samples else 0.5
    assert COUNTS[0] != COUNTS[1]
    assert both
    for name, value in both.items():
        torch.testing.assert_close(value, share * first[name] + (1 - share) * second[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_samples", [True, False])
def test_prototypes(by_samples):
    first, second = (server(FedProto, [client]) for client in (1, 2))
    both = server(FedProto, [1, 2], by_samples=by_samples)
    labels = [torch.as_tensor(Toy().labels[client]) for client in (1, 2)]
    common = (first.present & second.present).nonzero().flatten().tolist()
    assert common
    for c in common:
        counts = [int((own == c).sum()) for own in labels]
        share = counts[0] / sum(counts) if by_samples else 0.5
        mean = share * first.prototypes[c] + (1 - share) * second.prototypes[c]
        torch.testing.assert_close(both.prototypes[c], mean, rtol=0, atol=1e-6)
