"""What local fits hand on is stored whatever its length, in memory or on disk, and comes back from a checkpoint."""

import copy
import pickle

import pytest
import torch

from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.clients import ResumeStates


@pytest.mark.parametrize("limit", [None, 0.0])
def test_rows_grow_with_what_is_stored(limit):
    states = ResumeStates(4, limit)
    assert states.get(2) == b""
    states.set(2, b"short")
    states.set(0, bytes(range(256)) * 20)  # longer than the room that there was
    states.set(1, b"")
    assert [states.get(client) for client in range(4)] == [bytes(range(256)) * 20, b"", b"short", b""]
    states.set(0, b"less")
    assert states.get(0) == b"less"
    assert states.rows.on_disk == (limit is not None)
    assert states.rows.num_bytes >= 3 * 256 * 20
    assert copy.deepcopy(states).get(2) == pickle.loads(pickle.dumps(states)).get(2) == b"short"
    states.clear()
    assert states.get(0) == b""


@pytest.mark.parametrize("limit", [None, 0.0])
def test_a_checkpoint_brings_it_back(limit, tmp_path):
    states, other = ResumeStates(3, limit), ResumeStates(3)
    states.set(1, b"something")
    torch.save(states.state_dict(), tmp_path / "resume_states.pt")
    state = torch.load(tmp_path / "resume_states.pt", weights_only=True)
    other.set(0, b"gone")
    other.load_state_dict(state)
    assert [other.get(client) for client in range(3)] == [b"", b"something", b""]
    other.load_state_dict(ResumeStates(3).state_dict())
    assert other.get(1) == b""
    with pytest.raises(CheckpointError, match="the checkpoint holds 3 clients"):
        ResumeStates(4).load_state_dict(state)
