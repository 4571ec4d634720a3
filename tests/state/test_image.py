"""A server returns to what it held: tensors, Python attributes, clients' states."""

import gc
from collections import deque

import numpy as np
import torch
from torch import nn

from pfl_lightning.functional import RunningAverage
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.image import Snapshot
from pfl_lightning.state.tensors import TensorDict


class Everything(nn.Module):
    """Holds content of every kind."""

    def __init__(self):
        super().__init__()
        self.weights = TensorDict({"encoder.weight": torch.ones(3)})
        self.head = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))
        self.average = RunningAverage()
        self.average.update({"w": torch.ones(2)}, 3)
        self.by_client, self.cohort, self.window = {1: torch.ones(2)}, [torch.ones(1)], deque([1, 2], maxlen=2)
        self.seen, self.pair, self.array = {1, 2}, (torch.ones(1), [5]), np.arange(3)
        self.noise = torch.Generator().manual_seed(3)
        self.count, self.nothing = 0, None
        self.states = ClientStates({"head": torch.zeros(2)}, num_clients=4)
        self.states.set(2, {"head": torch.ones(2)})


def change(server):
    """Change everything, by replacing it or in place."""
    server.weights.assign({"encoder.weight": torch.full((3,), 2.0), "new": torch.ones(1)})
    with torch.no_grad():
        server.head.weight.mul_(3)
    server.head = nn.Linear(2, 2)
    server.total.add_(1)
    server.average.update({"w": torch.full((2,), 9.0)}, 5)
    server.by_client[1].mul_(7)
    server.by_client[2] = torch.ones(3)
    server.cohort.append(torch.ones(1))
    server.cohort[0].add_(1)
    server.window.append(3)
    server.seen.add(3)
    server.pair[0].zero_()
    server.pair[1].append(6)
    server.array[0] = 9
    torch.rand(1, generator=server.noise)
    server.count, server.nothing, server.further = 1, [1], "text"
    server.states.set(2, {"head": torch.full((2,), 5.0)})
    server.states.set(0, {"head": torch.full((2,), 6.0)})


def content(server):
    states = [server.states.get(client)["head"].tolist() for client in range(4)]
    return {
        "state": {name: tensor.tolist() for name, tensor in server.state_dict().items()},
        "average": (server.average.result()["w"].tolist(), server.average.total_weight),
        "python": [str(server.by_client), str(server.cohort), server.window, server.seen, str(server.pair)],
        "others": [server.array.tolist(), server.noise.get_state().tolist(), server.count, server.nothing],
        "attributes": sorted(vars(server)),
        "states": (states, [server.states.written(client) for client in range(4)], server.states.num_bytes),
    }


def copied(server):
    import copy

    return copy.deepcopy(content(server))


def test_everything_is_restored():
    server = Everything()
    before = copied(server)
    snapshot = Snapshot(server)
    change(server)
    assert content(server) != before
    snapshot.restore()
    assert content(server) == before
    change(server)  # and again
    snapshot.restore()
    assert content(server)["state"] == before["state"]


def test_a_later_snapshot_and_then_the_earlier():
    server = Everything()
    first, before = Snapshot(server), copied(server)
    server.states.set(3, {"head": torch.full((2,), 4.0)})
    server.total.add_(5)
    between, second = copied(server), Snapshot(server)
    change(server)
    second.restore()
    assert content(server) == between
    first.restore()
    assert content(server) == before


def test_copies_of_what_has_not_changed_are_used_again():
    server = Everything()
    first = Snapshot(server)
    server.total.add_(1)
    second = Snapshot(server)
    copies = [{id(kept.copy) for kept in snapshot._tensors.values()} for snapshot in (first, second)]
    assert len(copies[1] - copies[0]) == 1


def test_copies_that_nobody_holds_are_gone():
    server = Everything()
    first = Snapshot(server)
    held = len(Snapshot.newest)
    assert held >= len(first._tensors) > 0
    number = len(first._tensors)
    del first
    gc.collect()
    assert len(Snapshot.newest) <= held - number


def test_tensors_of_inference_mode_are_copied_again():
    """They have no version that would say whether they have changed."""
    with torch.inference_mode():
        server = nn.Module()
        server.register_buffer("total", torch.ones(2))
        first = Snapshot(server)
        server.total.add_(1)
        second = Snapshot(server)
        server.total.add_(1)
        second.restore()
        assert server.total.tolist() == [2, 2]
        first.restore()
        assert server.total.tolist() == [1, 1]


def test_what_changes_without_a_new_version_is_restored():
    """A fused step of an optimizer leaves the version as it was."""
    layer = nn.Linear(2, 1)
    layer.shapes = {"weight": torch.empty(3, device="meta"), "other": torch.zeros(2, 2).to_sparse()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    snapshot = Snapshot(layer)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before["weight"])
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_store_forgets_journals_that_nobody_holds():
    server = Everything()
    snapshot = Snapshot(server)
    assert len(server.states._journals) == 1
    del snapshot
    assert len(server.states._journals) == 0


def test_states_on_disk_are_restored():
    store = ClientStates({"head": torch.zeros(2)}, num_clients=5)
    store.move_to_disk()
    for client in (4, 1):
        store.set(client, {"head": torch.full((2,), float(client))})
    journal = store.journal()
    for client in (0, 1, 3):
        store.set(client, {"head": torch.full((2,), 9.0)})
    store.undo(journal)
    assert [store.get(client)["head"].tolist() for client in range(5)] == [[0, 0], [1, 1], [0, 0], [0, 0], [4, 4]]
    assert store.state_dict()["written"].tolist() == [4, 1]


def test_growth():
    server = Everything()
    snapshot = Snapshot(server)
    assert snapshot.growth(server).fault is None
    server.weights.assign({"encoder.weight": torch.full((3,), 500.0)})
    assert snapshot.growth(server)[1:] == (500.0, "weights.encoder/weight")
    server.total[0] = float("nan")
    assert snapshot.growth(server).fault == "total is up to nan after the aggregation"
    server.total[0] = 1e30
    assert snapshot.growth(server).fault == "total is up to 1e+30 after the aggregation"
    server.total[0] = 0
    server.states.set(1, {"head": torch.full((2,), float("inf"))})
    assert snapshot.growth(server).fault == "head of client 1 is up to inf after the aggregation"
