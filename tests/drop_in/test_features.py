"""The papers' methods on somebody's own module equal the built-in ones, parameter by parameter."""

from functools import partial

import pytest
import torch
from _helpers.project import Net, run_project
from _helpers.toy import CLIENTS, assert_same, own_model, run

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.methods import DCPFL, FedClassAvg, FedGH, FedPAC, FedProto, FedRoD
from pfl_lightning.methods import fedrod as fedrod_module

LR, COHORTS = 0.05, [[0, 2, 3], [1, 2]]
SGD = {"lr": LR, "momentum": 0.5, "weight_decay": 5e-4}
# Options of both, and those of the built-in method alone, which has no optimizer of its own making.
METHODS = {
    "FedProto": (FedProto, {"alignment": 0.7}, {"lr": LR}),
    "FedPAC": (FedPAC, {"head_lr": 0.1, "head_epochs": 2, "alignment": 0.7}, {"lr": LR}),
    "FedGH": (FedGH, {"server_lr": 0.2}, {"lr": LR}),
    "FedRoD": (FedRoD, {}, {"lr": LR}),
    "DCPFL": (DCPFL, {"virtual_features": 40, "server_lr": 0.2}, SGD),
    "DCPFL matrices": (DCPFL, {"virtual_features": 40, "factors": False}, SGD),
    "FedClassAvg": (
        FedClassAvg,
        {"contrastive": False, "proximal": 0.4},
        {"optimizer": partial(torch.optim.SGD, **SGD), "head_relu": False},
    ),
}


def as_builtin(state):
    """A module's tensors under the names of encoder and head."""
    return {name.replace("body.", "encoder.").replace("fc.", "head."): tensor for name, tensor in state.items()}


@pytest.fixture
def same_personal_head(monkeypatch):
    """Fed-RoD's second head begins with the same weights, however many random numbers were drawn before."""

    class Linear(torch.nn.Linear):
        def reset_parameters(self):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))

    class Layers:
        Module = torch.nn.Module

    Layers.Linear = Linear
    monkeypatch.setattr(fedrod_module, "nn", Layers)


def states(federation, wanted):
    """Each client's own model, and tensors of the server by their shape."""
    found = {}
    for client in range(CLIENTS):
        own = own_model(federation, client)
        module = as_builtin(own.module.state_dict()) if wanted == "module" else own.state_dict()
        module |= {name: w for name, w in own.state_dict().items() if name.startswith("personal_head.")}
        names = [name for name in module if name.startswith(("encoder.", "head.", "personal_head."))]
        found |= {f"client {client} {name}": module[name].clone() for name in names}
    named = as_builtin({n.removeprefix("module."): w for n, w in federation.server.broadcast(1, 2).weights.items()})
    return found | {f"sent {name}": tensor.clone() for name, tensor in named.items()}


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])
@pytest.mark.parametrize("name", METHODS)
def test_a_module_trains_as_the_built_in_method(name, engine, same_personal_head):
    method, options, of_builtin = METHODS[name]
    options = {**options, "epochs": 2}
    builtin = run(
        partial(method, **options, **of_builtin), 2, cohorts=COHORTS, engine=SequentialEngine(cache_features=False)
    )
    federation, trainer = run_project(method, 2, module=Net(LR), cohorts=COHORTS, engine=engine(), **options)
    assert_same(states(federation, "module"), states(builtin, "builtin"), atol=0.0)
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
    assert type(federation.client_model(1)) is Net
    for client in (0, 1):
        assert federation.test_scores[client].accuracy == builtin.test_scores[client].accuracy
