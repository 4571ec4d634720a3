"""Methods that act on the head, on modules whose head is more than a linear layer that trains."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.project import Data, run_project
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, Toy, assert_same
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import DCPFL, FD, GPFL, FedClassAvg, FedGH, FedPAC, FedPer, FedProto, FedRoD


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
    with pytest.raises(
        ConfigurationError, match="batch normalization has no statistics there: make only the last linear layer"
    ):
        run_project(method, module=Module("norm"), head=["head.*"])


@pytest.mark.parametrize("options", [{}, {"objective": "published"}, {"batch_norm": "own"}])
def test_fedclassavg_pulls_what_travels_of_the_head(options):
    federation, _ = run_project(
        partial(FedClassAvg, **options), 2, module=Module("norm"), data=Data(Toy(), batch_size=20), head=["head.*"]
    )
    assert int(federation.client_model(0).head[0].num_batches_tracked) > 0


class OwnLinear(nn.Module):
    """As ``nn.Linear``, of another class."""

    def __init__(self, linear, transposed=False):
        super().__init__()
        self.transposed = transposed
        weight = linear.weight.detach().T.clone() if transposed else linear.weight.detach().clone()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(linear.bias.detach().clone())

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight.T if self.transposed else self.weight, self.bias)


class WithHead(Module):
    """The classifier with another head."""

    def __init__(self, head):
        super().__init__("linear")
        self.head = head


def fitted_with(method, make, /, **options):
    torch.manual_seed(3)
    linear = nn.Linear(FEATURES, CLASSES)
    torch.manual_seed(4)
    federation, _ = run_project(method, 2, module=WithHead(make(linear)), **options)
    return federation


METHODS = [FedPAC, FedProto, FedClassAvg, partial(FedClassAvg, contrastive=False), FedGH, DCPFL, FedRoD, GPFL, FD]


@pytest.mark.repeated
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"head": "head"}])
def test_a_linear_layer_of_another_class_is_one(method, options):
    expected = fitted_with(method, lambda linear: linear, **options)
    found = fitted_with(method, OwnLinear, **options)
    transposed = fitted_with(method, partial(OwnLinear, transposed=True), **options)
    for client in range(CLIENTS):
        state = dict(expected.client_model(client).state_dict())
        assert_same(dict(found.client_model(client).state_dict()), state, atol=0.0)
        other = dict(transposed.client_model(client).state_dict())
        assert_same({**other, "head.weight": other["head.weight"].T}, state, atol=1e-5)


class Cosine(nn.Module):
    """Scaled cosines of features and weights, as in an ArcFace layer."""

    def __init__(self, width, classes, name="weight"):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Parameter(torch.randn(classes, width)))

    def forward(self, inputs):
        weight = getattr(self, self.name)
        return 8 * nn.functional.linear(nn.functional.normalize(inputs), nn.functional.normalize(weight))


HEADS = {
    "cosine": lambda linear: Cosine(FEATURES, CLASSES),
    "its weight has a name of its own": lambda linear: Cosine(FEATURES, CLASSES, "prototypes"),
    "weight normalization": nn.utils.parametrizations.weight_norm,
    "and no bias": lambda linear: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES, bias=False)),
    "spectral normalization": nn.utils.parametrizations.spectral_norm,
    "last of several": lambda linear: nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), Cosine(7, CLASSES)),
}


@pytest.mark.repeated
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("method", [FedPer, FedPAC, FedProto, FedGH])
def test_a_head_of_any_class_is_taken(method, head):
    named, before = {"head": "head"} if head is HEADS["last of several"] else {}, dict[str, torch.Tensor]()

    def make(linear):
        made = head(linear)
        before.update({name: value.clone() for name, value in made.state_dict().items()})
        return made

    federation = fitted_with(method, make, **named)
    client = federation.clients.models[0]
    assert {name.partition(".")[0] for name in client.user_module.roles.head} == {"head"}
    if method is not FedPer:
        assert (client.feature_width, client.num_classes) == (FEATURES, CLASSES)
    after = federation.client_model(1).head.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


class Margin(Cosine):
    """Takes the classes, too, which forward of the module does not have."""

    def forward(self, inputs, classes):
        return super().forward(inputs) - nn.functional.one_hot(classes, CLASSES)


class Metric(WithHead):
    def forward(self, inputs):
        return self.body(inputs)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self(batch[0]), batch[1]), batch[1])


@pytest.mark.parametrize("method", [FedPer, FedPAC, FedProto])
def test_a_head_that_the_step_alone_calls(method):
    federation, _ = run_project(method, module=Metric(Margin(FEATURES, CLASSES)))
    assert {name.partition(".")[0] for name in federation.clients.models[0].user_module.roles.head} == {"head"}
