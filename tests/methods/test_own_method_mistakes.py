"""Mistakes of those who write a method are named, with what was expected and what to write."""

from functools import partial

import pytest
import torch
from _helpers.toy import run

from pfl_lightning import Aggregator, Broadcast
from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import load_state


def own(**members):
    """A subclass of FedAvg with these members, as a user would write it."""
    return partial(type("Own", (FedAvg,), members), epochs=1)


@pytest.mark.parametrize("name", ["shared", "fixed"])
def test_a_string_in_the_place_of_a_tuple_of_patterns(name):
    with pytest.raises(ConfigurationError, match=r"patterns of Own .* must be a tuple of strings, got 'head.*'.*write"):
        run(own(**{name: "head.*"}))


@pytest.mark.parametrize("name", ["loss_names", "personalization_losses"])
def test_a_string_in_the_place_of_a_tuple_of_losses(name):
    with pytest.raises(ConfigurationError, match=rf"Own\.{name} must be a tuple of strings, got 'cross_entropy'"):
        run(own(**{name: "cross_entropy"}))


def test_a_string_in_a_phase():
    with pytest.raises(ConfigurationError, match=r"train of phase 'head' must be a tuple of strings, got 'head\.\*'"):
        run(own(phases=lambda self: (Phase("head", "head.*"),)))
    with pytest.raises(
        ConfigurationError, match="losses of phase 'head' must be a tuple of strings, got 'cross_entropy'"
    ):
        run(own(phases=lambda self: (Phase("head", losses="cross_entropy"),)))


@pytest.mark.parametrize("found", [Phase("head", ("head.*",)), None, ("head",)], ids=["phase", "none", "names"])
@pytest.mark.parametrize("name", ["phases", "personalization_phases"])
def test_phases_that_are_no_tuple_of_phases(name, found):
    with pytest.raises(ConfigurationError, match=rf"Own\.{name} must return a tuple of phases, got "):
        run(own(**{name: lambda self: found}))


def test_a_server_that_is_none():
    with pytest.raises(
        ConfigurationError, match=r"Own\.configure_aggregator returned NoneType, expected an Aggregator"
    ):
        run(own(configure_aggregator=lambda self, num_clients: None))


@pytest.mark.parametrize("limit", [0, 1.0], ids=["in a round", "in an evaluation"])
def test_a_broadcast_that_is_none(limit):
    class Silent(AveragingAggregator):
        def broadcast(self, client, round):
            return None

    method = own(configure_aggregator=lambda self, num_clients: Silent(self, num_clients))
    with pytest.raises(ConfigurationError, match=r"Silent\.broadcast returned NoneType, expected a Broadcast"):
        run(method, limit_val_batches=limit, num_sanity_val_steps=1)


def test_a_broadcast_of_another_shape():
    class Narrow(Aggregator):
        def broadcast(self, client, round):
            return Broadcast(client=client, round=round, weights={"head.weight": torch.zeros(1, 4)})

    method = own(configure_aggregator=lambda self, num_clients: Narrow(self, num_clients))
    with pytest.raises(ConfigurationError, match=r"'head\.weight' of Own has shape \(5, 4\), .* \(1, 4\)"):
        run(method)


def test_a_state_of_another_shape_is_not_stretched():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ConfigurationError, match=r"'bias' of Linear has shape \(3,\), .* have \(1,\)"):
        load_state(model, {"bias": torch.zeros(1)})


@pytest.mark.parametrize("output", [1.5, {"los": 1.5}], ids=["number", "dictionary"])
def test_a_step_without_a_loss(output):
    with pytest.raises(ConfigurationError, match=r"Own\.training_step returned .*1\.5.*: expected the loss, a tensor"):
        run(own(training_step=lambda self, batch, index: output), limit_val_batches=0)
