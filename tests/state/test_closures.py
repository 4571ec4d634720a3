"""Functions that a module has among its attributes, and hooks, hold the layers of their own copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from _helpers.project import Net, run_project
from _helpers.toy import INPUTS, assert_same

from pfl_lightning import SequentialEngine
from pfl_lightning.drop_in.client.copies import copied
from pfl_lightning.methods import Ditto, FedAvg, FedPer
from pfl_lightning.state.closures import copy_module


class ByFunction(Net):
    """Runs its layers by functions made in ``__init__``, and keeps features by a hook."""

    def __init__(self) -> None:
        super().__init__()
        body = self.body
        self.seen: dict[str, Any] = {}
        self.run = lambda inputs: self.fc(body(inputs))
        self.runs = [lambda inputs, layer=self.fc: layer(inputs)]
        self.double = partial(torch.mul, other=2)
        self.body.register_forward_hook(lambda layer, inputs, output: self.seen.update(features=output.detach()))

    def forward(self, inputs: Any) -> Any:
        return self.run(inputs)


def test_clients_train_the_layers_that_functions_run():
    expected, _ = run_project(FedAvg, module=Net())
    found, _ = run_project(FedAvg, module=ByFunction())
    assert_same(found.global_model().state_dict(), expected.global_model().state_dict(), atol=0)


def test_functions_and_hooks_of_a_copy_are_its_own():
    module = ByFunction()
    other = copied(module)
    inputs = torch.ones(2, module.body[0].in_features)
    other(inputs).sum().backward()
    assert other.seen
    assert not module.seen
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in module.parameters())
    other.runs[0](other.seen["features"]).sum().backward()
    assert module.fc.weight.grad is None
    assert module.run.__closure__[0].cell_contents in (module, module.body)
    assert float(other.double(torch.ones(()))) == 2


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_models_that_are_handed_out_run_their_own_layers(method):
    federation, _ = run_project(method, module=ByFunction(), engine=SequentialEngine())
    models = [federation.client_model(client) for client in range(5)] + [federation.global_model(), federation.shown]
    inputs = torch.randn(4, INPUTS)
    for model in models:
        plain = Net()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(inputs), plain(inputs))
    for client, model in federation.client_models(range(5)):
        plain.load_state_dict(model.module.state_dict())
        assert torch.equal(model(inputs), plain(inputs)), client


class CopiesLess(torch.nn.Linear):
    """A layer whose copy has none of what it keeps."""

    def __init__(self) -> None:
        super().__init__(INPUTS, INPUTS)
        self.kept = torch.nn.Linear(2, 2)

    def __deepcopy__(self, memo: Any) -> Any:
        other = torch.nn.Linear(INPUTS, INPUTS)
        other.load_state_dict({"weight": self.weight, "bias": self.bias})
        return other


def test_a_layer_may_copy_itself_in_a_way_of_its_own():
    module = ByFunction()
    module.less = CopiesLess()
    other = copied(module)
    assert not hasattr(other.less, "kept")
    assert other.run.__closure__[0].cell_contents in (other, other.body)


class Nested(torch.nn.Module):
    """A function that calls another, a layer as a keyword's default, and a function that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        first = self.first

        def inner(values: torch.Tensor) -> torch.Tensor:
            return first(values)

        def outer(values: torch.Tensor, *, layer: torch.nn.Module = self.second) -> torch.Tensor:
            return layer(inner(values))

        def repeated(values: torch.Tensor, times: int) -> torch.Tensor:
            return repeated(outer(values), times - 1) if times else values

        self.function, self.repeated = outer, repeated

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values)


def test_functions_that_call_functions_run_the_layers_of_the_copy() -> None:
    own = Nested()
    other = copy_module(own)
    torch.nn.init.zeros_(other.first.weight)
    torch.nn.init.ones_(other.second.weight)
    values = torch.rand(2, 3)
    assert torch.equal(other(values), other.second(other.first(values)))
    assert torch.equal(own(values), own.second(own.first(values)))
    assert not torch.equal(own(values), other(values))
    assert torch.equal(other.repeated(values, 2), other(other(values)))
    assert torch.equal(own.repeated(values, 2), own(own(values)))
