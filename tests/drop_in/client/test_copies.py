"""Modules that cannot be copied are copied by their weights, and an error says how."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from _helpers.project import Data, Net, run_project
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.client.copies import copied
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedPer

METHODS = pytest.mark.parametrize("method", [FedAvg, FedPer, Ditto])


class Locked(Net):
    """Holds a lock; its parameters are those of Net."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Normed(Net):
    """Its head has the old weight normalization, whose weight is the result of a computation."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.fc = nn.utils.weight_norm(self.fc)


class Keeping(Net):
    """Keeps results of its step, which have a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = [{"scores": self(batch[0])}]
        return super().training_step(batch, batch_idx)


def state_of(federation: Any) -> Any:
    return {**federation.global_model().state_dict(), "own": federation.client_model(1).fc.bias}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@METHODS
def test_a_factory_gives_what_a_copy_gives(method):
    expected, _ = run_project(method, 2, head="fc")
    module, data = Locked(), Data()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    federate(module, data, method, num_clients=2, head="fc", module_factory=Locked)
    assert torch.equal(torch.get_rng_state(), before)
    got, _ = run_project(method, 2, module=module, head="fc", module_factory=Locked)
    assert same(state_of(got), state_of(expected))
    assert torch.equal(module.fc.weight, got.global_model().fc.weight)
    assert type(got.client_model(0)) is Locked


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("module", [Normed, Keeping])
def test_results_that_a_module_holds_need_no_factory(module, engine):
    federation, _ = run_project(FedPer, 2, module=module(), engine=engine(), head="fc*")
    made, _ = run_project(FedPer, 2, module=module(), engine=engine(), head="fc*", module_factory=module)
    assert same(state_of(federation), state_of(made))
    copy.deepcopy(federation.clients.models[0])
    if module is Keeping:
        plain, _ = run_project(FedPer, 2, engine=engine(), head="fc*")
        assert same(state_of(federation), state_of(plain))


def test_the_error_names_the_factory():
    with pytest.raises(
        ConfigurationError, match=r"Locked, but it cannot be copied: .*module_factory=.*Locked\(\.\.\.\)"
    ):
        federate(Locked(), Data(), FedAvg, num_clients=2)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Net, "must make a new Locked at every call, it made Net"),
        (lambda made=Locked(): made, "must make a new Locked at every call"),  # noqa: B008
    ],
)
def test_a_factory_makes_the_same_kind(factory, message):
    module = factory() if factory is not Net else Locked()
    with pytest.raises(ConfigurationError, match=message):
        federate(module, Data(), FedAvg, num_clients=2, module_factory=factory)


def test_a_factory_makes_the_same_shapes():
    with pytest.raises(ConfigurationError, match="other names or shapes of parameters or buffers than"):
        copied(Net(norm=True), Net)


def test_modes_types_and_frozen_parameters_are_copied():
    module = Net().double()
    module.body.eval()
    module.fc.weight.requires_grad_(False)
    other = copied(module, Net)
    assert [layer.training for layer in other.modules()] == [layer.training for layer in module.modules()]
    assert other.fc.weight.dtype == torch.float64
    assert not other.fc.weight.requires_grad
    assert other.fc.bias.requires_grad
