"""What methods may ask for: optimizer steps, participating clients, planned rounds, and a server's own generator."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from _helpers.toy import BATCH, LABELS, Toy, run

import pfl_lightning.engines
from pfl_lightning import RayEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods import FedAvg, FedRep, LocalOnly
from pfl_lightning.seeding import derive_seed
from pfl_lightning.server import Aggregator

ENGINES = pytest.mark.parametrize(
    "make",
    [SequentialEngine, TrainerEngine, partial(VectorizedEngine, forward="vmap"), partial(VectorizedEngine, 2, forward="loop")],
    ids=["sequential", "trainer", "vmap", "loop"],
)
EPOCHS = 2


class Told(FedAvg):
    """Uploads the number of steps as the number of samples, which reaches the server under every engine."""

    def before_fit(self, context):
        assert context.num_steps == 0

    def make_update(self, context, before):
        update = super().make_update(context, before)
        facts = context.facts
        assert (facts.num_participating, facts.num_rounds) == (4, 2)
        return ClientUpdate(client=update.client, round=update.round, num_samples=context.num_steps, weights=update.weights)

    def configure_aggregator(self, num_clients):
        server = super().configure_aggregator(num_clients)
        server.told, receive = {}, server.receive

        def keep(update):
            assert (server.facts.num_participating, server.facts.num_rounds) == (4, 2)
            server.told[update.round, update.client] = update.num_samples
            receive(update)

        server.receive = keep
        return server


class TwoPhases(Told):
    """The steps of both phases count."""

    phases = FedRep.phases
    body_epochs = head_epochs = EPOCHS
    head_lr = body_lr = 0.05


def told(engine, method=Told, **options):
    federation = run(
        partial(method, epochs=EPOCHS), 2, engine=engine, loop=FederatedLoop(), data=Toy(novel_clients=1), **options
    )
    return federation.server.told, federation.trainer.datamodule.participating


def plain_count(labels):
    """A step for every batch of every epoch."""
    return EPOCHS * len(range(0, len(labels), BATCH))


@ENGINES
def test_steps_and_clients_are_those_of_a_plain_count(make):
    found, participating = told(make(), limit_val_batches=0)
    assert len(participating) == 4
    assert found == {(round, k): plain_count(LABELS[k]) for round in range(2) for k in participating}


@pytest.mark.ray
def test_under_ray_too():
    found, participating = told(RayEngine(1), limit_val_batches=0)
    assert found == {(round, k): plain_count(LABELS[k]) for round in range(2) for k in participating}


class Overflows(torch.amp.GradScaler):
    """Skips every third step, as an overflow would."""


def test_outside_of_a_fit_and_without_a_limit_there_is_no_number_of_rounds():
    federation = run(partial(LocalOnly, epochs=1), 1, loop=FederatedLoop(0.2))
    assert federation.server.facts.num_rounds == 1
    federation.trainer.validate(federation, datamodule=Toy(), verbose=False)
    assert federation.server.facts.num_rounds is None
    assert federation.server.facts.num_participating == 5


def test_a_server_draws_by_seed_purpose_and_round():
    server = Aggregator(None, 3)
    server.seed = 11
    drawn = torch.rand(4, generator=server.generator("virtual features", 2))
    expected = torch.rand(4, generator=torch.Generator().manual_seed(derive_seed(11, "virtual features", 2)))
    assert torch.equal(drawn, expected)
    assert not torch.equal(drawn, torch.rand(4, generator=server.generator("virtual features", 3)))
    assert not torch.equal(drawn, torch.rand(4, generator=server.generator("other", 2)))


# ---------------------------------------------------------------------- updates are checked once, by the server


class Bad(LocalOnly):
    """Client 2 uploads what the server refuses; it has trained, and its state is finite."""

    def make_update(self, context, before):
        weights = {"head.bias": torch.full((5,), torch.nan)} if context.client == 2 else {}
        return ClientUpdate(client=context.client, round=context.round, num_samples=1, weights=weights)

    def configure_aggregator(self, num_clients):
        return Server(self, num_clients)


class Server(Aggregator):
    """Receives anything that is finite."""

    def broadcast(self, client, round):
        from pfl_lightning.messages import Broadcast

        return Broadcast(client=client, round=round)

    def check(self, update):
        update.check_finite()

    def receive(self, update):
        assert update.client != 2

    def aggregate(self):
        pass


@ENGINES
def test_a_refused_update_leaves_the_client_as_it_was(make, monkeypatch):
    scans, check_finite = [], ClientUpdate.check_finite

    def scan(update):
        scans.append(update.client)
        check_finite(update)

    monkeypatch.setattr(ClientUpdate, "check_finite", scan)
    with pytest.warns(UserWarning, match="left out of the aggregation: client 2"):
        federation = run(partial(Bad, epochs=1), engine=make(), limit_val_batches=0)
    assert scans == [0, 1, 2, 3, 4]
    assert [federation.personal.written(client) for client in range(5)] == [True, True, False, True, True]
    [error] = [result.error for result in federation.trainer.callbacks[0].results if result.error is not None]
    assert isinstance(error, InvalidMessageError)


def test_engines_import_nothing_from_drop_in():
    folder = Path(pfl_lightning.engines.__file__).parent
    files = list(folder.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("pfl_lightning.drop_in") for name in names), file
