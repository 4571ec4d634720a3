"""What local fits hand on is stored whatever its length, in memory or on disk, and comes back from a checkpoint."""

import copy
import pickle

import pytest
import torch

from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.carried import CarriedStates


@pytest.mark.parametrize("limit", [None, 0.0])
def test_rows_grow_with_what_is_stored(limit):
    carried = CarriedStates(4, limit)
    assert carried.get(2) == b""
    carried.set(2, b"short")
    carried.set(0, bytes(range(256)) * 20)  # longer than the room that there was
    carried.set(1, b"")
    assert [carried.get(client) for client in range(4)] == [bytes(range(256)) * 20, b"", b"short", b""]
    carried.set(0, b"less")
    assert carried.get(0) == b"less"
    assert carried.rows.on_disk == (limit is not None)
    assert carried.num_bytes >= 3 * 256 * 20
    assert copy.deepcopy(carried).get(2) == pickle.loads(pickle.dumps(carried)).get(2) == b"short"
    carried.clear()
    assert carried.get(0) == b""


@pytest.mark.parametrize("limit", [None, 0.0])
def test_a_checkpoint_brings_it_back(limit, tmp_path):
    carried, other = CarriedStates(3, limit), CarriedStates(3)
    carried.set(1, b"something")
    torch.save(carried.state_dict(), tmp_path / "carried.pt")
    state = torch.load(tmp_path / "carried.pt", weights_only=True)
    other.set(0, b"gone")
    other.load_state_dict(state)
    assert [other.get(client) for client in range(3)] == [b"", b"something", b""]
    other.load_state_dict(CarriedStates(3).state_dict())
    assert other.get(1) == b""
    with pytest.raises(CheckpointError, match="the checkpoint holds 3 clients"):
        CarriedStates(4).load_state_dict(state)
