"""What is said of the tensors that travel, and of buffers that are averaged."""

import warnings

import pytest
import torch
from _helpers.project import Data, Net, run_project

from pfl_lightning.drop_in.outer.traveling import what_travels
from pfl_lightning.methods import Ditto, FedAvg, FedBABU, FedBN, FedPer, LocalOnly

SAID = "local fits change buffers"


class Moving(Net):
    """Buffers of all kinds, of which ``memory`` and ``layer.shift`` move."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.layer = torch.nn.Module()
        self.layer.register_buffer("shift", torch.zeros(2))
        self.layer.register_buffer("running_mean", torch.zeros(2))  # of a normalization layer of its author's own
        self.register_buffer("memory", torch.zeros(4))
        self.register_buffer("grid", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(0))
        self.moves = True

    def training_step(self, batch, batch_idx):
        if self.moves:
            self.memory[batch_idx % 4] += batch[0].mean().detach()
            self.layer.shift += 1
        self.layer.running_mean += 1
        self.steps += 1
        return super().training_step(batch, batch_idx)


def said(method=FedAvg, rounds=2, module=None, clients=5, **options):
    options |= {"data": Data(drop_last=True), "cohorts": [range(clients)] * rounds}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_project(method, rounds, module=module or Moving(norm=True), **options)
    return [str(warning.message) for warning in found if SAID in str(warning.message)]


def test_averaged_buffers_are_named_once():
    (message,) = said(rounds=3)
    assert "of Moving that are averaged over the clients: memory, layer.shift." in message
    assert "personal=('memory', 'layer.shift') keeps them on each client" in message


@pytest.mark.parametrize(
    "options",
    [
        {"personal": ("memory", "layer.*")},
        {"shared": ("memory", "layer.shift")},
        {"method": LocalOnly},
        {"num_clients": 1, "clients": 1},
    ],
    ids=str,
)
def test_nothing_is_said(options):
    assert not said(**options)


def test_constant_buffers_are_not_named():
    module = Moving()
    module.moves = False
    assert not said(module=module)


def line(method, module=None, **options):
    federation, _ = run_project(method, module=module or Moving(), data=Data(drop_last=True), **options)
    return what_travels(federation.clients.models[0])


def test_the_line():
    assert line(FedAvg) == (
        "10 of the 11 tensors of Moving travel between clients and server (memory, grid, body.*, fc.*, layer.*); stay "
        "with each client: steps"
    )
    assert line(FedPer, head="fc", module=Net()) == (
        "4 of the 6 tensors of Net travel between clients and server (body.*); stay with each client: fc.*"
    )
    assert line(FedBABU, head="fc", module=Net()).endswith("(body.*); stay at their initial values: fc.*")
    assert line(FedAvg, module=Net()) == "All of the 6 tensors of Net travel between clients and server"
    assert line(LocalOnly, module=Net()) == (
        "None of the 6 tensors of Net travel between clients and server; stay with each client: body.*, fc.*"
    )
    assert "6 of the 12 tensors of Net travel between clients and server (global_model.*)" in line(Ditto, module=Net())


def test_parts_of_a_layer_and_frozen_ones():
    module = Net(norm=True)
    module.body[0].requires_grad_(False)
    assert line(FedBN, module=module) == (
        "4 of the 11 tensors of Net travel between clients and server (body.3.*, fc.*); stay with each client: "
        "body.1.*; frozen: body.0.*"
    )


def test_the_line_is_printed_before_the_first_round(monkeypatch):
    printed = []
    monkeypatch.setattr("pfl_lightning.drop_in.outer.federation.rank_zero_info", printed.append)
    run_project(FedAvg, 3, module=Net(), cohorts=[range(5)] * 3)
    assert printed == ["All of the 6 tensors of Net travel between clients and server"]
