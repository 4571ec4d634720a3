"""Modules whose author overrides state_dict: it shapes checkpoints, and not what the federation exchanges."""

from typing import Any

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same, quiet_trainer
from torch import nn
from torchmetrics import MeanMetric

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine, export_clients
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedProto


class Plain(Net):
    """With batch normalization and a frozen layer."""

    strict_loading = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(norm=True)
        self.body[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Trained(Plain):
    """Saves what trains, as projects with LoRA do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}


class NoArguments(Plain):
    def state_dict(self) -> Any:
        return {name: p.detach() for name, p in self.named_parameters()}


class Legacy(Plain):
    """Does not fill what it is given."""

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return {prefix + name: p for name, p in self.named_parameters()}


EVEN = Data(drop_last=True)  # no last batch of one sample, which batch normalization does not take
OVERRIDES = pytest.mark.parametrize("kind", [Trained, NoArguments, Legacy])


def weights(method: Any, module: Any, **options: Any) -> dict[str, torch.Tensor]:
    federation, _ = run_project(method, 2, module=module, data=EVEN, cohorts=(range(5), range(5)), **options)
    return {**plain_state(federation.global_model()), **plain_state(federation.client_model(3))}


@pytest.mark.repeated
@OVERRIDES
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        (FedAvg, TrainerEngine),
        (FedAvg, SequentialEngine),
        (FedPer, TrainerEngine),
        (Ditto, TrainerEngine),
        (FedProto, SequentialEngine),
    ],
)
def test_they_train_as_without_the_override(kind, method, engine):
    assert_same(weights(method, kind(), engine=engine()), weights(method, Plain(), engine=engine()), atol=0)


@OVERRIDES
def test_checkpoints_are_as_the_author_has_them(kind, tmp_path):
    def fit(module: Any, rounds: int, **options: Any) -> Any:
        trainer = quiet_trainer(rounds, FederatedLoop(method=FedAvg, num_clients=2, seed=0))
        trainer.fit(module, Data(), **options)
        return trainer

    module, path = kind(), tmp_path / "last.ckpt"
    fit(module, 1).save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_same(dict(saved), dict(module.state_dict()), atol=0)
    assert "body.1.running_mean" not in saved
    goes_on, whole = kind(), kind()
    fit(goes_on, 2, ckpt_path=path)
    fit(whole, 2)
    assert_same(plain_state(goes_on), plain_state(whole), atol=0)


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Extra(Plain):
    def __init__(self) -> None:
        super().__init__()
        counting = Counting(self.fc.in_features, self.fc.out_features)
        counting.load_state_dict(self.fc.state_dict(), strict=False)
        self.fc = counting


class Scripted(Plain):
    """With layers of TorchScript, which torch copies as results of a computation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.jit.script(self.fc)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("kind", [Extra, Scripted])
@pytest.mark.parametrize(("method", "engine"), [(FedAvg, TrainerEngine), (Ditto, TrainerEngine)])
def test_layers_with_a_form_of_their_own_train_as_plain_ones(kind, method, engine):
    assert_same(weights(method, kind(), engine=engine()), weights(method, Plain(), engine=engine()), atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("kind", [Extra, Scripted])
def test_a_run_with_them_goes_on(kind, tmp_path):
    def fit(rounds: int, **options: Any) -> Any:
        module, loop = kind(), FederatedLoop(method=FedPer, head="fc", num_clients=2, seed=0)
        trainer = quiet_trainer(rounds, loop)
        trainer.fit(module, EVEN, **options)
        return trainer, plain_state(module)

    path = tmp_path / "last.ckpt"
    fit(1)[0].save_checkpoint(path)
    assert_same(fit(2, ckpt_path=path)[1], fit(2)[1], atol=0)


def test_exported_clients_are_whole(tmp_path):
    federation, _ = run_project(FedAvg, module=Trained(), data=EVEN)
    export_clients(federation, tmp_path, [1])
    found = torch.load(tmp_path / "client_1.pt", weights_only=True)
    assert_same(found, plain_state(federation.client_model(1)), atol=0)
    assert "body.1.running_mean" in found


def test_layers_with_a_state_of_their_own():
    class Layer(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    module = nn.Sequential(Layer(1, 2), MeanMetric())
    module[1].persistent(True)
    module[0].bias.state_dict = None  # no layer
    assert set(plain_state(module)) == {"0.weight", "0.bias", "1.mean_value", "1.weight"}
    assert "state_dict" not in vars(module[0])
    assert "0.weight" not in module.state_dict()
