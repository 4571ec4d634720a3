"""Which part of a module is its head."""

import logging

import pytest
from _helpers.project import Net, run_project
from torch import nn

from pfl_lightning.drop_in.client.roles import find_roles, traced_head
from pfl_lightning.drop_in.client.tracing import Trace
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPer, LGFedAvg


class Mixed(nn.Module):
    """Linear layers in the middle and at the end, and something after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = nn.ModuleDict({"attention": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
        self.classifier = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
        self.scale = nn.BatchNorm1d(2)


def test_the_traced_head_is_said(caplog):
    with caplog.at_level(logging.WARNING, "pfl_lightning"):
        found = traced_head(Mixed(), Trace(last=("classifier.1",), norms=("scale",), problem=None), "FedPer")
    assert found.head == find_roles(Mixed(), ["classifier.1", "scale"]).head
    assert (
        "head of Mixed: 'classifier.1', the only last layer that the loss of a traced batch depends on" in caplog.text
    )
    assert "classifier.1.weight" in caplog.text


@pytest.mark.parametrize(
    ("module", "trace", "message"),
    [
        (
            Mixed(),
            Trace(problem="the step failed with KeyError: 'x'"),
            "failed with KeyError: 'x'. Set head= .candidates: .*classif",
        ),
        (
            Mixed(),
            Trace(("first", "block.attention"), problem=None),
            "2 last layers at once.*'first', 'block.attention'",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            Trace(("0",), problem=None),
            "'0' has all parameters of the module. .*candidates: none.*use a method without a head",
        ),
    ],
)
def test_a_head_that_is_not_sure_is_refused(module, trace, message):
    with pytest.raises(ConfigurationError, match=f"FedPer needs the head of {type(module).__name__}.*{message}"):
        traced_head(module, trace, "FedPer")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("classifier.1", {"classifier.1.weight"}),
        ("classifier.*", {"classifier.0.weight", "classifier.0.bias", "classifier.1.weight"}),
        ("classifier", {"classifier.0.weight", "classifier.0.bias", "classifier.1.weight"}),
        (["*.attention", "first.bias"], {"block.attention.weight", "block.attention.bias", "first.bias"}),
        ("scale", {f"scale.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}),
        ((), set()),
    ],
)
def test_patterns_name_layers_or_parameters(head, expected, caplog):
    roles = find_roles(Mixed(), head)
    assert roles.head == expected
    assert not caplog.text
    assert roles.of("first.weight") == "encoder.first.weight"
    assert all(roles.of(name) == f"head.{name}" for name in expected)


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (Mixed(), "fc", "head='fc' matches no parameter or persistent buffer; there are .'first.weight'"),
        (Mixed(), ["classifier", "nothing.*"], "head='nothing..' matches no"),
        (Mixed(), "*", "matches all parameters of Mixed, so none is left for the encoder"),
        (nn.Sequential(nn.Linear(2, 2)), "0", "matches all parameters of Sequential"),
    ],
)
def test_patterns_that_divide_nothing_are_refused(module, head, message):
    with pytest.raises(ConfigurationError, match=message):
        find_roles(module, head)


def test_tied_weights_are_of_one_part():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.hidden = nn.Embedding(5, 3), nn.Linear(3, 3)
            self.output = nn.Linear(3, 5)
            self.output.weight = self.embedding.weight

    with pytest.raises(ConfigurationError, match=r"embedding.weight and output.weight are one parameter"):
        find_roles(Tied(), "output")
    with pytest.raises(ConfigurationError, match=r"FedPer needs the head of Tied.*are one parameter"):
        traced_head(Tied(), Trace(last=("output",), problem=None), "FedPer")
    assert find_roles(Tied(), ["embedding", "output"]).head == {"embedding.weight", "output.weight", "output.bias"}
    assert not find_roles(Tied(), ())


class Convolutional(Net):
    """Without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 4, 1), nn.Tanh())
        self.fc = nn.Sequential(nn.Conv1d(4, 5, 1), nn.Flatten())


@pytest.mark.parametrize("method", [FedPer, LGFedAvg])
def test_a_method_that_sets_a_head_apart_asks_for_it(method):
    with pytest.raises(ConfigurationError, match=f"{method.__name__} needs the head of Convolutional.*head="):
        run_project(method, module=Convolutional(), head=())


def test_without_a_head_everything_is_shared():
    federation, _ = run_project(FedAvg, module=Convolutional())
    assert set(federation.server.weights.as_state()) == {f"module.{name}" for name in Convolutional().state_dict()}
    named, _ = run_project(FedPer, module=Convolutional(), head="fc")
    assert set(named.server.weights.as_state()) == {"module.body.1.weight", "module.body.1.bias"}
