"""Named parts of a state, and every client's part at rest."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from toy import Toy, run

from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import FedAvg, FedPAC, FedPer
from pfl_lightning.state import ClientStates, TensorDict, load_state, matching, select_state

NAMES = ["encoder.conv.weight", "encoder.conv.bias", "encoder.norm.running_mean", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*",), NAMES),
        ((), []),
        (("head.*",), NAMES[3:]),
        (("*.bias", "encoder.conv.*"), [NAMES[0], NAMES[1], NAMES[4]]),
        (("head.weight", "head.*"), NAMES[3:]),
        (("encoder.norm.running_*",), NAMES[2:3]),
    ],
)
def test_matching_keeps_the_order_of_the_names(patterns, expected):
    assert matching(NAMES, patterns) == expected
    assert matching(iter(NAMES), patterns) == expected


def test_a_pattern_without_a_match_is_refused():
    with pytest.raises(ConfigurationError, match=r"'Head\.\*' fits no parameter or buffer; there are \['encoder"):
        matching(NAMES, ("head.*", "Head.*"))


def test_select_copies_and_load_writes_in_place():
    module = nn.BatchNorm1d(3)
    taken = select_state(module, ["weight", "running_mean"])
    weight = module.weight
    with torch.no_grad():
        weight.fill_(7)
    assert taken["weight"].tolist() == [1, 1, 1]
    load_state(module, {"weight": torch.tensor([1.0, 2, 3]), "running_mean": torch.tensor([4.0, 5, 6])})
    assert module.weight is weight
    assert weight.requires_grad
    assert weight.tolist() == [1, 2, 3]
    assert module.running_mean.tolist() == [4, 5, 6]
    shared = select_state(module, ["weight"], clone=False)["weight"]
    assert shared.data_ptr() == weight.data_ptr()
    assert not shared.requires_grad
    with pytest.raises(KeyError):
        load_state(module, {"wait": torch.zeros(1)})


class TestTensorDict:
    def test_keeps_names_with_dots_and_moves_with_its_module(self):
        holder = nn.Module()
        holder.content = TensorDict({"a.b": torch.ones(2), "c": torch.zeros(1)})
        assert holder.double().content.as_state()["a.b"].dtype == torch.float64
        assert list(holder.content.as_state()) == ["a.b", "c"]
        assert len(holder.content) == 2

    def test_grows_on_loading(self):
        full, empty = TensorDict({"a.b": torch.ones(2)}), TensorDict()
        empty.load_state_dict(full.state_dict())
        assert empty.as_state()["a.b"].tolist() == [1, 1]
        full.load_state_dict(TensorDict({"z": torch.zeros(1)}).state_dict())
        assert list(full.as_state()) == ["z"]

    def test_assigning_replaces_everything(self):
        content = TensorDict({"a": torch.ones(2)})
        content.assign({"b": torch.zeros(1, requires_grad=True)})
        assert list(content.as_state()) == ["b"]
        assert not content.as_state()["b"].requires_grad

    def test_what_is_not_persistent_is_not_saved(self):
        assert TensorDict({"a": torch.ones(2)}, persistent=False).state_dict() == {}


class TestClientStates:
    initial = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}  # noqa: RUF012

    def test_a_client_has_the_initial_state_until_it_stores_one(self):
        states = ClientStates(self.initial, 3)
        new = {"w": torch.tensor([5.0, 6.0]), "n": torch.tensor(9)}
        states.set(1, new)
        new["w"].zero_()
        assert [states.get(k)["w"].tolist() for k in range(3)] == [[1, 2], [5, 6], [1, 2]]
        assert [int(states.get(k)["n"]) for k in range(3)] == [3, 9, 3]
        assert states.get(1)["n"].dtype == torch.int64
        assert len(states) == 3
        assert states.num_bytes == 16

    def test_the_initial_state_is_a_copy(self):
        given = {"w": torch.ones(2)}
        states = ClientStates(given, 2)
        given["w"].zero_()
        assert states.get(0)["w"].tolist() == [1, 1]

    @pytest.mark.parametrize("written", [[], [2], [0, 1, 2]])
    def test_round_trip(self, written):
        states = ClientStates(self.initial, 3)
        for client in written:
            states.set(client, {"w": torch.full((2,), float(client)), "n": torch.tensor(client)})
        other = ClientStates({"w": torch.zeros(2), "n": torch.tensor(0)}, 3)
        other.set(0, {"w": torch.full((2,), -1.0), "n": torch.tensor(-1)})
        other.load_state_dict(states.state_dict())
        for client in range(3):
            assert {n: t.tolist() for n, t in other.get(client).items()} == {
                n: t.tolist() for n, t in states.get(client).items()
            }
        assert other.num_bytes == states.num_bytes == 16 * len(written)

    def test_another_number_of_clients_is_refused(self):
        with pytest.raises(CheckpointError, match="holds 3 clients, this federation has 4"):
            ClientStates(self.initial, 4).load_state_dict(ClientStates(self.initial, 3).state_dict())

    @pytest.mark.parametrize("other", [{}, {"w": torch.zeros(3), "n": torch.tensor(0)}, {"w": torch.zeros(2)}])
    def test_another_state_is_refused(self, other):
        with pytest.raises(CheckpointError, match="personal state has shapes"):
            ClientStates(other, 3).load_state_dict(ClientStates(self.initial, 3).state_dict())

    def test_an_empty_state_stays_empty(self):
        states = ClientStates({}, 5)
        states.set(2, {})
        assert states.get(2) == {}
        assert states.num_bytes == 0


# ---------------------------------------------------------------------- memory


def test_a_thousand_clients_with_a_shared_model_make_a_small_checkpoint(tmp_path):
    def size(method, clients):
        federation = run(method, data=Toy([[0, 1]] * clients), cohorts=[[0, 1]], limit_val_batches=1)
        path = tmp_path / "all.ckpt"
        federation.trainer.save_checkpoint(path)
        return path.stat().st_size

    for method in (FedAvg, FedPer, FedPAC):
        assert size(method, 1000) < size(method, 20) + 40_000


MEASURE = """
import resource, torch
from pfl_lightning.state import ClientStates
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
states = ClientStates({"w": torch.ones(250_000)}, 1000)  # a gigabyte, if it were written
for client in range(1000):
    states.get(client)
for client in range(5):
    states.set(client, {"w": torch.zeros(250_000)})
states.state_dict()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kilobytes on Linux")
def test_unwritten_rows_cost_no_memory():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    grown = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 60_000  # kilobytes; twelve rows of one megabyte, and room
