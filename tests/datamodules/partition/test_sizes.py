"""Numbers of clients and samples that no data set has."""

import numpy as np
import pytest

from pfl_lightning.datamodules import IID, Digits, DirichletOverClients

LABELS = np.arange(40) % 4


@pytest.mark.parametrize("number", [0, -1, 2.5, 10**18, 10**400, float("nan"), float("inf"), "3", None])
def test_clients(number):
    with pytest.raises(ValueError, match="num_clients must be"):
        IID(num_clients=number)


@pytest.mark.parametrize("rule", [IID, lambda *args, **options: DirichletOverClients(*args, alpha=0.5, **options)])
@pytest.mark.parametrize("size", [0, 2**31, 2**62, 10**18, 10**30, [10, 2**62]])
def test_samples_of_a_client(rule, size):
    """Eight times 2^61 samples are no sample at all, in 64 bits."""
    with pytest.raises(ValueError, match="samples_per_client must be"):
        rule(num_clients=2, samples_per_client=size).partition(LABELS)


@pytest.mark.parametrize("option", ["batch_size", "eval_batch_size", "test_samples_per_client"])
@pytest.mark.parametrize("size", [0, -1, 2**31, 10**400])
def test_sizes_of_a_data_module(option, size):
    with pytest.raises(ValueError, match=f"{option} must be at (least 1|most 2147483647), got {size}"):
        Digits(IID(num_clients=2), **{option: size})
