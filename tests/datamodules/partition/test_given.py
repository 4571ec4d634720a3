"""Clients that the data tell: their names, and the split of what is theirs."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pfl_lightning.datamodules import FromDatasets, Samples
from pfl_lightning.datamodules.clients.division import divide
from pfl_lightning.datamodules.partition.given import AsGiven, checked_client_names, clients_of

SHARES = {"validation_share": 0.25, "test_share": 0.25, "test_samples_per_client": None, "seed": 0}


def samples(owners, test_owners=None, clients=3):
    own = torch.tensor(owners)
    fields = {}
    if test_owners is not None:
        fields = {"test_inputs": torch.rand(len(test_owners), 2), "test_targets": torch.arange(len(test_owners)) % 2}
        fields["test_clients"] = torch.tensor(test_owners)
    return Samples(torch.rand(len(own), 2), torch.arange(len(own)) % 2, ("a", "b"), train_clients=own, **fields)


def test_own_samples_are_split():
    owners = np.random.default_rng(0).integers(0, 3, 90)
    found = divide(AsGiven(3), samples(owners), **SHARES)
    for client in range(3):
        lists = [each[client] for each in (found.train, found.validation, found.test)]
        assert sorted(np.concatenate(lists)) == np.flatnonzero(owners == client).tolist()
        assert abs(len(lists[2]) - 0.25 * (owners == client).sum()) <= 0.5
    again = divide(AsGiven(3), samples(owners), **SHARES)
    assert again.fingerprint == found.fingerprint
    assert divide(AsGiven(3), samples(owners), **{**SHARES, "seed": 1}).fingerprint != found.fingerprint


def test_a_test_set_is_given_or_drawn():
    given = samples([0, 1] * 20, [0] * 6 + [1] * 10, 2)
    found = divide(AsGiven(2), given, **SHARES)
    assert [part.tolist() for part in found.test] == [[*range(6)], [*range(6, 16)]]
    capped = divide(AsGiven(2), given, **{**SHARES, "test_samples_per_client": 4}).test
    assert [len(part) for part in capped] == [4, 4]
    assert set(capped[1]) <= set(range(6, 16))


def test_clients_without_samples_are_named():
    rule = AsGiven(3, ["Lyon", "Nice", "Metz"])
    with pytest.raises(ValueError, match=r"client\(s\) 1 \(Nice\) have no training samples \(1 of 3\)"):
        divide(rule, samples([0, 2] * 9), **SHARES)
    with pytest.warns(UserWarning, match=r"client\(s\) 2 \(Metz\) have no test samples"):
        divide(rule, samples([0, 1, 2] * 9, [0, 1]), **SHARES)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["Lyon"], "for each of 2 clients, got 1"),
        (["Lyon", "Lyon "], "clients 0, 1 are all named 'Lyon'"),
        (["Lyon", " "], "the name of client 1 is ' '"),
        (["Ly\non", "Nice"], "the name of client 0"),
    ],
)
def test_names_that_name_nobody(names, message):
    with pytest.raises(ValueError, match=message):
        checked_client_names(names, 2)


def test_whose_items_are():
    numbers, rule = clients_of(torch.tensor([7, 3, 7]))
    assert (numbers.tolist(), rule.num_clients, rule.client_names) == ([1, 0, 1], 2, ("3", "7"))
    assert clients_of(np.array(["b", "a"]))[1].client_names == ("a", "b")
    for wrong in ([0.5, 1], [True, False], [0, "a"], [None, 1]):
        with pytest.raises(ValueError, match="whole numbers, or strings"):
            clients_of(wrong)
    with pytest.raises(ValueError, match="all 2 items belong to one client"):
        clients_of([4, 4])


def test_datasets_with_clients():
    train = TensorDataset(torch.arange(40.0)[:, None], torch.arange(40) % 2)
    test = TensorDataset(torch.arange(12.0)[:, None], torch.arange(12) % 2)
    data = FromDatasets(train=train, clients=["b", "a"] * 20, validation_share=0.0, public=4)
    data.setup()
    assert data.client_names == ("a", "b")
    own = data.client_data(0)
    assert sorted(own.train.raw_inputs.flatten() % 2) == [1] * len(own.train)
    assert sum(len(data.client_data(k).train) + len(data.client_data(k).test) for k in (0, 1)) == 36
    drawn = FromDatasets(train=train, test=test, clients=[0, 1] * 20)
    drawn.setup()
    assert (drawn.client_names, drawn.num_clients) == (None, 2)
    given = FromDatasets(train=train, test=test, clients=[0, 1] * 20, test_clients=[1] * 6 + [0] * 6)
    given.setup()
    assert given.client_data(1).test.indices.tolist() == [*range(6)]


def test_datasets_with_clients_that_do_not_fit():
    train = TensorDataset(torch.arange(4.0)[:, None], torch.arange(4) % 2)
    with pytest.raises(ValueError, match="either partition"):
        FromDatasets(train=train)
    with pytest.raises(ValueError, match="either partition"):
        FromDatasets(AsGiven(2), train=train, clients=[0, 1, 1, 0])
    with pytest.raises(ValueError, match=r"clients must have an entry for each item .* got 3 for 4 items"):
        FromDatasets(train=train, clients=[0, 1, 1])
    with pytest.raises(ValueError, match=r"test_clients must have .* got 3 for 0 items"):
        FromDatasets(train=train, clients=[0, 1, 1, 0], test_clients=[0, 1, 1])
