"""FFA-LoRA and FedSA-LoRA equal the plain restatement."""

import pytest
import torch
from _helpers.plain import batches, cross_entropy, mean_of, named, put, sgd
from _helpers.project import Net, run_project
from _helpers.toy import CLIENTS, FEATURES, INPUTS, Toy, assert_same
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedSALoRA, FFALoRA

LR, EPOCHS, RANK = 0.05, 2, 2
COHORTS = [[0, 2, 3], [1, 2]]


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base_layer(inputs) + self.lora_B["default"](self.lora_A["default"](inputs))


class LowRank(Net):
    """Two adapted layers and a head that trains."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__(lr)
        torch.manual_seed(3)
        self.body = nn.Sequential(Adapted(INPUTS, 8), nn.Tanh(), Adapted(8, FEATURES), nn.Tanh())


class Plain(nn.Module):
    """The same for the restatement."""

    def __init__(self) -> None:
        super().__init__()
        net = LowRank()
        self.body, self.fc = net.body, net.fc

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(inputs))


RULES = {
    "FFALoRA": (FFALoRA, lambda name: "base_layer" not in name and "lora_A" not in name, lambda name: True),
    "FedSALoRA": (FedSALoRA, lambda name: "base_layer" not in name, lambda name: "lora_A" in name),
    "FedAvg": (FedAvg, lambda name: "base_layer" not in name, lambda name: True),
}
"""Method; what trains; what of it is averaged."""


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rounds_equal_the_restatement(rule, engine):
    method, trains, averaged = rule
    data, module = Toy(), LowRank()
    federation, _ = run_project(method, 2, module=module, cohorts=COHORTS, engine=engine(), epochs=EPOCHS, head="fc")
    models = [Plain() for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            net = models[client]
            train = [p for name, p in net.named_parameters() if trains(name)]
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), train, LR, cross_entropy)
        uploads = [{n: p for n, p in named(models[k]).items() if trains(n) and averaged(n)} for k in cohort]
        mean = mean_of(uploads, [len(data.labels[k]) for k in cohort])
        for net in models:
            put(net, mean)
    for client, model in enumerate(models):
        own = dict(federation.client_model(client).named_parameters())
        assert_same({name: own[name].detach() for name in named(model)}, named(model), atol=1e-6)
    shared = {name.removeprefix("module.") for name in federation.models[0].shared_names()}
    assert shared == {n for n, _ in module.named_parameters() if trains(n) and averaged(n)}


def test_what_is_left_on_the_client():
    module = LowRank()
    federation, _ = run_project(FedSALoRA, module=module, engine=SequentialEngine(), head="fc")
    stored = {name.removeprefix("module.") for name in federation.personal.stores[0].initial}
    assert stored == {n for n, _ in module.named_parameters() if "lora_B" in n or n.startswith("fc.")}
    module = LowRank()
    federation, _ = run_project(FFALoRA, module=module, engine=SequentialEngine(), head="fc")
    assert federation.personal.num_bytes == 0
    first, last = LowRank(), federation.client_model(1)
    assert torch.equal(first.body[0].lora_A["default"].weight, last.body[0].lora_A["default"].weight)
    assert module.body[0].lora_A["default"].weight.requires_grad  # the given module is as its author left it


@pytest.mark.parametrize("method", [FedSALoRA, FFALoRA])
def test_without_adapters(method):
    with pytest.raises(ConfigurationError, match=rf"{method.__name__} is for models with low-rank adapters .*peft"):
        run_project(method, module=Net())


def test_frozen_matrices_cannot_be_averaged():
    module = LowRank()
    for adapted in (module.body[0], module.body[2]):
        adapted.lora_A.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="those of LowRank are frozen: let them train, or use FFALoRA"):
        run_project(FedSALoRA, module=module)
