"""Methods that act on the head, on modules whose head is more than a linear layer that trains."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.project import Data, run_project
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, Toy
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DCPFL, FedClassAvg, FedGH


class Module(L.LightningModule):
    """A classifier; its head has batch normalization, or a bias that does not train."""

    def __init__(self, kind):
        super().__init__()
        self.body, linear = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.Tanh()), nn.Linear(FEATURES, CLASSES)
        self.head = nn.Sequential(nn.BatchNorm1d(FEATURES), linear) if kind == "norm" else linear
        if kind == "frozen":
            self.head.bias.requires_grad_(False)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("method", [DCPFL, FedGH, FedClassAvg, partial(FedClassAvg, objective="published")])
def test_a_frozen_tensor_of_the_head_stays(method):
    module = Module("frozen")
    weight, bias = (value.detach().clone() for value in (module.head.weight, module.head.bias))
    federation, _ = run_project(method, 2, module=module, head=["head.*"])
    for client in range(CLIENTS):
        head = federation.client_model(client).head
        assert torch.equal(head.bias, bias)
        assert not torch.equal(head.weight, weight)


@pytest.mark.parametrize("method", [DCPFL, FedGH])
def test_a_server_that_trains_the_head_refuses_batch_normalization_in_it(method):
    with pytest.raises(ConfigurationError, match="batch normalization has no statistics there: let the head"):
        run_project(method, module=Module("norm"), head=["head.*"])


@pytest.mark.parametrize("options", [{}, {"objective": "published"}, {"batch_norm": "own"}])
def test_fedclassavg_pulls_what_travels_of_the_head(options):
    federation, _ = run_project(
        partial(FedClassAvg, **options), 2, module=Module("norm"), data=Data(Toy(), batch_size=20), head=["head.*"]
    )
    assert int(federation.client_model(0).head[0].num_batches_tracked) > 0
