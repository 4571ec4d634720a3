"""What one batch through a module tells about its last layers."""

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLASSES, FEATURES, INPUTS
from torch import nn
from torch.nn import functional as F

from pfl_lightning.datamodules import IID, FromLoaders
from pfl_lightning.drop_in.client.roles import traced_head
from pfl_lightning.drop_in.client.tracing import trace_batch
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPer


class Stepping(Net):
    """A module of which only ``score`` differs."""

    def forward(self, inputs):
        return self.fc(self.body(inputs))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])  # a Trainer is there
        return {"loss": loss}


class Unused(Stepping):
    """A head that is declared last and never called."""

    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(FEATURES, 3)


class HiddenLast(Stepping):
    """A hidden layer that is declared behind the head."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(INPUTS, INPUTS)

    def forward(self, inputs):
        return super().forward(self.hidden(inputs).relu_())


class Teacher(Stepping):
    """A frozen network, whose scores are part of the loss."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(INPUTS, CLASSES).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        return F.cross_entropy(scores, batch[1]) + F.mse_loss(scores, self.teacher(batch[0]))


class Adversarial(Stepping):
    """Two losses by turns, each of one network while the other is frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(CLASSES, 1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.judge(self(batch[0])).square().mean())
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        own = [*self.body.parameters(), *self.fc.parameters()]
        return [torch.optim.SGD(own, lr=0.1), torch.optim.SGD(self.judge.parameters(), lr=0.1)]


class InputGradient(Stepping):
    """Inputs that ask for gradients are no parameters."""

    def training_step(self, batch, batch_idx):
        inputs = batch[0].clone().requires_grad_()
        return F.cross_entropy(self(inputs), batch[1]) + inputs.square().mean()


class OwnScale(Stepping):
    """A parameter of the module itself behind the head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


class OnlyOwn(Stepping):
    """No layer is called, and nothing else is trained."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(INPUTS, CLASSES))

    def forward(self, inputs):
        return inputs @ self.start


class Regularized(Stepping):
    """All weights are part of the loss."""

    def training_step(self, batch, batch_idx):
        weights = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(self(batch[0]), batch[1]) + 1e-3 * weights


class Scaled(Stepping):
    """Batch normalization and a learned temperature behind the head."""

    def __init__(self):
        super().__init__()
        self.norm, self.temperature = nn.BatchNorm1d(CLASSES), nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.norm(super().forward(inputs)) / self.temperature


class Segmenting(Stepping):
    """A convolution gives a score for each class and place."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU())
        self.out = nn.Conv1d(4, CLASSES, 1)
        self.project = nn.Linear(INPUTS, INPUTS)

    def forward(self, inputs):
        return self.out(self.decoder(self.project(inputs)[:, None])).mean(-1)


class Attending(Stepping):
    """A layer that uses the weights of its parts without calling them, and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(1, 1, batch_first=True)
        self.token = nn.Parameter(torch.zeros(1, 1, 1))

    def forward(self, inputs):
        tokens = torch.cat([self.token.expand(len(inputs), -1, -1), inputs[..., None]], dim=1)
        return super().forward(self.attention(tokens, tokens, tokens)[0][:, 1:, 0])


class Tied(Stepping):
    """The weight of the output is that of the first layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Linear(INPUTS, CLASSES, bias=False), nn.Linear(INPUTS, CLASSES, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, inputs):
        return self.out(inputs + self.embedding(inputs).mean(1, keepdim=True))


class TwoHeads(Stepping):
    """Two tasks at once."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        features = self.body(batch[0])
        return F.cross_entropy(self.fc(features), batch[1]) + F.cross_entropy(self.second(features), batch[1])


class Functional(Stepping):
    """A layer whose weights are used and that is not called."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs):
        return F.linear(super().forward(inputs), self.out.weight)


class Failing(Stepping):
    """Its step needs what is not there."""

    def training_step(self, batch, batch_idx):
        return {}["nothing"]


class Manual(Stepping):
    """Steps its optimizer by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.optimizers().step()


def trace(module):
    data = FromLoaders(IID(2), datamodule=Data())
    data.setup()
    return trace_batch(module, data)


@pytest.mark.parametrize(
    ("module", "head"),
    [
        (Stepping, "fc"),
        (Unused, "fc"),
        (HiddenLast, "fc"),
        (Teacher, "fc"),
        (Regularized, "fc"),
        (Segmenting, "out"),
        (Attending, "fc"),
        (Manual, "fc"),
        (InputGradient, "fc"),
    ],
)
def test_the_last_layer_of_the_loss_is_found(module, head):
    module = module()
    state, found = torch.get_rng_state(), trace(module)
    assert (found.last, found.norms, found.problem) == ((head,), (), None)
    assert torch.equal(torch.get_rng_state(), state)
    assert traced_head(module, found, "FedPer").head == {f"{head}.weight", f"{head}.bias"}


def test_a_normalization_behind_it_is_part_of_the_head():
    found = trace(module := Scaled())
    assert (found.last, found.norms) == (("fc",), ("norm",))
    assert {"fc.weight", "norm.weight", "norm.running_mean"} <= traced_head(module, found, "FedPer").head


def test_a_parameter_of_the_module_itself_may_be_the_head():
    module = OnlyOwn()
    assert traced_head(module, trace(module), "FedPer").head == {"start"}


@pytest.mark.parametrize(
    ("module", "last", "message"),
    [
        (Tied, ("out",), "embedding.weight and out.weight are one parameter"),
        (TwoHeads, ("second", "fc"), "2 last layers at once.*candidates: 'second', 'fc'"),
        (Functional, ("out", "fc"), "2 last layers at once"),
        (Adversarial, ("fc", "judge"), "2 last layers at once.*candidates: 'fc', 'judge'"),
        (OwnScale, ("scale", "fc"), "2 last layers at once.*candidates: 'fc', 'scale'"),
        (Failing, (), "the step failed with KeyError: 'nothing'.*candidates: .*'fc'"),
    ],
)
def test_what_is_not_sure_is_refused(module, last, message):
    module = module()
    found = trace(module)
    assert set(found.last) == set(last)
    with pytest.raises(ConfigurationError, match=f"FedPer needs the head of {type(module).__name__}.*{message}"):
        traced_head(module, found, "FedPer")


def test_a_federation_takes_the_traced_head_or_asks_for_it():
    federation, _ = run_project(FedPer, module=Unused())
    shared = {name.removeprefix("module.") for name in federation.server.weights.as_state()}
    assert shared == {n for n in Unused().state_dict() if not n.startswith("fc.")}
    with pytest.raises(ConfigurationError, match="FedPer needs the head of TwoHeads"):
        run_project(FedPer, module=TwoHeads())
    run_project(FedPer, module=TwoHeads(), head=["fc", "second"])
    run_project(FedAvg, module=TwoHeads())


def test_tracing_changes_nothing_in_the_run():
    named, _ = run_project(FedPer, head="fc")
    traced, _ = run_project(FedPer)
    for client in range(2):
        one, two = named.client_model(client).state_dict(), traced.client_model(client).state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)
