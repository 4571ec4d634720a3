"""Messages about a client say its name where the data have names."""

import math
import warnings
from functools import partial

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.toy import LABELS, Toy, quiet_trainer, run, tiny_encoder

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli.tables import evaluation_table
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import FedAvg, FedFomo
from pfl_lightning.metrics import idle_clients

NAMES, BAD = ("Lille", "Lyon", "Metz", "Nantes", "Nice"), 2
ENGINES = {
    "sequential": lambda patch: SequentialEngine(),
    "trainer": lambda patch: TrainerEngine(),
    "vectorized": lambda patch: VectorizedEngine(forward="vmap"),
    "workers": lambda patch: fake_ray_engine(patch, 2)[0],
}


class Fails(FedAvg):
    """Client 2 raises an error, warns, or makes an update of absurd size, in some rounds."""

    what, rounds = "error", (1,)

    def before_fit(self, context):
        if context.client == BAD and context.round in self.rounds:
            if self.what == "error":
                raise OSError("no item.png")
            warnings.warn("an odd item", stacklevel=1)
        return super().before_fit(context)

    def make_update(self, context, before):
        if self.what == "large" and context.client == BAD and context.round in self.rounds:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(1e9)
        return super().make_update(context, before)


def failing(what, *rounds):
    return partial(type("Fails", (Fails,), {"what": what, "rounds": rounds}), lr=0.05, epochs=1)


def named(**options):
    data = Toy(**options)
    data.partition.client_names = NAMES
    return data


def play(method, rounds=2, data=None, **options):
    """A federation, and what was said while it trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run(method, rounds, data=data or named(), **options)
    return federation, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ENGINES)
def test_a_client_that_fails(name, monkeypatch, caplog):
    _, said = play(failing("error", 1), engine=ENGINES[name](monkeypatch))
    assert [text for text in said if "left out" in text] == [
        "left out of the aggregation: client 2 (Metz), round 2: its own code or data failed with OSError: no item.png"
    ]
    assert any(message.startswith("client 2 (Metz), round 2:\nTraceback") for message in caplog.messages)
    with pytest.raises(OSError, match="no item") as raised:
        play(failing("error", 0), engine=ENGINES[name](monkeypatch))
    assert "in the local fit of client 2 (Metz), round 1" in raised.value.__notes__
    with pytest.raises(OSError, match="no item") as raised:
        play(failing("error", 1), engine=ENGINES[name](monkeypatch), loop=FederatedLoop(on_client_error="raise"))
    assert "in the local fit of client 2 (Metz), round 2" in raised.value.__notes__


@pytest.mark.parametrize("name", ENGINES)
def test_warnings_of_a_client_and_updates_that_lie_far_off(name, monkeypatch):
    _, said = play(failing("large", 1), engine=ENGINES[name](monkeypatch))
    assert any("2 (Metz)" in text and ", round 2: an odd item" in text for text in said)  # a stack's clients are named
    assert any(text.startswith("left out of the aggregation: client 2 (Metz), round 2: ") for text in said)
    with pytest.raises(FederationError, match=r"min_clients is 5\. client 2 \(Metz\), round 1: "):
        play(failing("large", 0), engine=ENGINES[name](monkeypatch), loop=FederatedLoop(min_clients=5))


def test_evaluations_without_a_value():
    labels = [[own[0]] * len(own) if client == BAD else own for client, own in enumerate(LABELS)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(1).fit(Federation(FedAvg, tiny_encoder, metrics=["auroc"]), datamodule=named(labels=labels))
    said = [str(warning.message) for warning in caught]
    assert any("test_auroc is undefined (NaN) for client 2 (Metz): look at their" in text for text in said)

    def spoil(inputs, targets):
        start = sum(map(len, LABELS)) + 5 * BAD
        inputs[start] = math.nan

    _, said = play(FedAvg, 1, data=named(change=spoil))
    assert any(text.startswith("validation items of client 2 (Metz) have values that are not finite") for text in said)
    assert any(text.startswith("the loss of client 2 (Metz) is NaN") for text in said)


def test_what_is_refused_before_the_first_round():
    with pytest.raises(ConfigurationError, match=r"validation samples of every client, and client 2 \(Metz\) has none"):
        play(FedFomo, 1, data=named(validation=[5, 5, 0, 5, 5]))
    with pytest.raises(ValueError, match=r"drop_last leaves client 0 \(Lille\) no batch \(4 such clients\)"):
        play(FedAvg, 1, data=named(batch_size=16, drop_last=True))


def test_tables_name_the_worst_client():
    federation, _ = play(FedAvg, 1)
    worst = min(federation.test_scores, key=lambda client: federation.test_scores[client].accuracy)
    assert evaluation_table("t", federation).caption == f"worst of the participating: client {worst} ({NAMES[worst]})"
    federation.data.partition.client_names = ()
    assert evaluation_table("t", federation).caption is None
    assert idle_clients([1], {1: 0.5}, NAMES) == "1 client never trained (1 (Lyon); mean 50.00 %)"
