"""Mistakes of those who write a method are named, with what was expected and what to write."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from _helpers.toy import run

from pfl_lightning import Aggregator, Broadcast
from pfl_lightning.client import Phase
from pfl_lightning.errors import ConfigurationError, InvalidMessageError
from pfl_lightning.messages import statistics_field
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


@dataclass(frozen=True, kw_only=True)
class Means(Broadcast):
    """With class means."""

    means: torch.Tensor = statistics_field(shape="C d")
    seen: torch.Tensor = statistics_field(shape="C", at_least=0)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"means": torch.zeros(5, 1)}, r"Means\.means has shape \(5, 1\), expected \(5, 4\)"),
        ({"seen": -torch.ones(5)}, r"Means\.seen is \[-1.0, .*, expected at least 0"),
        (
            {"means": torch.full((5, 4), torch.nan)},
            r"Means\.means holds 20 non-finite values of 20; look at how",
        ),
        ({"means": None}, r"Means\.means is missing"),
    ],
    ids=["shape", "range", "not finite", "missing"],
)
def test_a_broadcast_that_is_not_as_declared(sent, said):
    content = {"means": torch.zeros(5, 4), "seen": torch.ones(5), **sent}

    class Sends(AveragingAggregator):
        def broadcast(self, client, round):
            return Means(**{**vars(super().broadcast(client, round)), **content})

    method = own(configure_aggregator=lambda self, num_clients: Sends(self, num_clients))
    with pytest.raises(InvalidMessageError, match=rf"client \d, round 1: {said}"):
        run(method, limit_val_batches=0)


def test_weights_in_a_broadcast_may_hold_a_mask():
    """Which comes back as it was sent."""
    server = run(own()).server
    assert server.weights.as_state()
    Broadcast(client=0, round=0, weights={"mask": torch.tensor([-torch.inf])}).check_content({}, bool)


def test_a_metric_of_the_server_that_is_logged_already():
    class Logs(AveragingAggregator):
        def aggregate(self):
            super().aggregate()
            self.metrics = {"train/loss": 99.0}

    method = own(configure_aggregator=lambda self, num_clients: Logs(self, num_clients))
    with pytest.raises(ConfigurationError, match=r"Logs\.metrics has 'train/loss', which is logged already"):
        run(method)


def test_batch_normalization_of_a_misspelled_kind():
    with pytest.raises(ConfigurationError, match=r"batch_norm of Own must be .*'own_statistics'.*, got 'Own'"):
        run(own(batch_norm="Own"))


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (torch.tensor(1.0), r"got a tensor of shape \(\)\n"),
        ({"cross_entropy": torch.zeros(3)}, r"got a tensor of shape \(3,\) for 'cross_entropy'"),
        ({"cross_entropy": 1.0}, "got a float for 'cross_entropy'"),
    ],
    ids=["tensor", "a value for each sample", "number"],
)
def test_loss_terms_that_are_no_scalars_by_name(terms, said):
    with pytest.raises(
        ConfigurationError, match=rf"Own\.loss_terms must return a dictionary of scalar tensors.*{said}"
    ):
        run(own(loss_terms=lambda self, features, labels: terms), limit_val_batches=0)


def test_a_state_of_another_shape_is_not_stretched():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ConfigurationError, match=r"'bias' of Linear has shape \(3,\), .* have \(1,\)"):
        load_state(model, {"bias": torch.zeros(1)})


@pytest.mark.parametrize("output", [1.5, {"los": 1.5}], ids=["number", "dictionary"])
def test_a_step_without_a_loss(output):
    with pytest.raises(ConfigurationError, match=r"Own\.training_step returned .*1\.5.*: expected the loss, a tensor"):
        run(own(training_step=lambda self, batch, index: output), limit_val_batches=0)
