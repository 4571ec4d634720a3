"""What methods may ask for: optimizer steps, participating clients, planned rounds, and a server's own generator."""

import ast
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.process_helpers import forked_process_engine
from _helpers.toy import BATCH, LABELS, Toy, run, tiny_encoder

import pfl_lightning.engines
from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.messages import ClientUpdate, Message, statistics_field
from pfl_lightning.methods import FedAvg, FedRep, LocalOnly
from pfl_lightning.seeding import derive_seed
from pfl_lightning.server import Aggregator, AveragingAggregator

ENGINES = pytest.mark.parametrize(
    "make",
    [
        SequentialEngine,
        TrainerEngine,
        partial(VectorizedEngine, forward="vmap"),
    ],
    ids=["sequential", "trainer", "vmap"],
)
EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class ToldUpdate(ClientUpdate):
    """With a number that reaches the server under every engine."""

    told: torch.Tensor = statistics_field(shape="", dtype=torch.int64)


def tell(update, number):
    shown = {"client": update.client, "round": update.round, "num_samples": update.num_samples}
    return ToldUpdate(**shown, weights=update.weights, told=torch.tensor(number))


class Server(AveragingAggregator):
    """Keeps what clients and server are told."""

    update_class = ToldUpdate
    not_checkpointed = ("told",)

    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.told = {}

    def receive(self, update):
        assert (self.facts.num_participating, self.facts.num_rounds) == (4, 2)
        self.told[update.round, update.client] = int(update.told)
        super().receive(update)


class Told(FedRep):
    """Uploads the number of steps."""

    def before_fit(self, context):
        assert context.num_steps == 0

    def make_update(self, context, before):
        assert (context.facts.num_participating, context.facts.num_rounds) == (4, 2)
        return tell(super().make_update(context, before), context.num_steps)

    def configure_aggregator(self, num_clients):
        return Server(self, num_clients)


def told(engine):
    method, data = partial(Told, epochs=EPOCHS, head_epochs=1), Toy(novel_clients=1)
    federation = run(method, 2, engine=engine, loop=FederatedLoop(), data=data, limit_val_batches=0)
    return federation.server.told, federation.trainer.datamodule.participating


def plain_count(labels):
    """A step for every batch of every epoch of both phases."""
    return (EPOCHS + 1) * len(range(0, len(labels), BATCH))


@ENGINES
def test_steps_and_clients_are_those_of_a_plain_count(make):
    found, participating = told(make())
    assert len(participating) == 4
    assert found == {(round, k): plain_count(LABELS[k]) for round in range(2) for k in participating}


@pytest.mark.parametrize(
    "make",
    [lambda patch: fake_ray_engine(patch, 2)[0], lambda patch: forked_process_engine(patch, 2)],
    ids=["ray", "processes"],
)
def test_steps_and_clients_in_other_processes(make, monkeypatch):
    found, participating = told(make(monkeypatch))
    assert len(participating) == 4
    assert found == {(round, k): plain_count(LABELS[k]) for round in range(2) for k in participating}


class Held(FedAvg):
    """Uploads how many the client has held back and what their classes add up to."""

    def before_fit(self, context):
        return summary(context.validation.tensors()[1]) if context.validation is not None else 1

    def make_update(self, context, before):
        assert context.data.num_samples == len(LABELS[context.client])
        return tell(super().make_update(context, None), before)

    def configure_aggregator(self, num_clients):
        return Server(self, num_clients)


def summary(labels):
    return 1000 * len(labels) + int(labels.sum())


@pytest.mark.parametrize(
    "make",
    [
        lambda patch: SequentialEngine(),
        lambda patch: TrainerEngine(),
        lambda patch: VectorizedEngine(forward="vmap"),
        lambda patch: fake_ray_engine(patch, 2)[0],
        lambda patch: forked_process_engine(patch, 2),
    ],
    ids=["sequential", "trainer", "vmap", "ray", "processes"],
)
def test_a_fit_has_the_clients_own_validation_part(make, monkeypatch):
    data = Toy(validation=[5, 0, 9, 1, 20], novel_clients=1)
    method = partial(Held, epochs=1)
    federation = run(method, 2, engine=make(monkeypatch), loop=FederatedLoop(), data=data, limit_val_batches=0)
    labels = {client: data.tensors(client, "validation")[1] for client in data.participating}
    expected = {client: summary(own) if len(own) else 1 for client, own in labels.items()}
    assert federation.server.told == {(round, k): expected[k] for round in range(2) for k in data.participating}


class SkipsFirst(torch.amp.GradScaler):
    """Skips the first step of a phase, as an overflow of the gradient would."""

    first = True

    def step(self, optimizer, *args, **kwargs):
        if self.first:
            self.first = False
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self._per_optimizer_states.clear()


def test_skipped_steps_are_not_counted(monkeypatch):
    from pfl_lightning.engines import sequential

    monkeypatch.setattr(sequential, "new_scaler", lambda environment, state: SkipsFirst("cpu", init_scale=1.0))
    found, participating = told(SequentialEngine())
    assert found == {(round, k): plain_count(LABELS[k]) - 2 for round in range(2) for k in participating}


def test_outside_of_a_fit_and_without_a_limit_there_is_no_number_of_rounds():
    federation = run(partial(LocalOnly, epochs=1), 1, loop=FederatedLoop(0.2))
    assert federation.server.facts.num_rounds == 1
    federation.trainer.validate(federation, datamodule=Toy(), verbose=False)
    assert federation.server.facts.num_rounds is None
    assert federation.server.facts.num_participating == 5


def test_a_server_draws_by_seed_purpose_and_round():
    server = LocalOnly(tiny_encoder((6,)), 5).configure_aggregator(3)
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
        update = super().make_update(context, before)
        return replace(update, num_samples=0) if context.client == 2 else update


@ENGINES
def test_a_refused_update_leaves_the_client_as_it_was(make, monkeypatch):
    checked, check = [], Aggregator.check

    def count(server, update):
        checked.append(update.client)
        check(server, update)

    monkeypatch.setattr(Aggregator, "check", count)
    with pytest.warns(UserWarning, match="left out of the aggregation: client 2"):
        federation = run(partial(Bad, epochs=1), engine=make(), limit_val_batches=0)
    assert checked == [0, 1, 2, 3, 4]
    assert [federation.personal.written(client) for client in range(5)] == [True, True, False, True, True]
    [error] = [result.error for result in federation.trainer.callbacks[0].results if result.error is not None]
    assert isinstance(error, InvalidMessageError)


@ENGINES
def test_every_tensor_of_an_update_is_scanned_once(make, monkeypatch):
    scans, scan = [], Message._check_tensor

    def count(message, *args, **kwargs):
        if isinstance(message, ClientUpdate):
            scans.append(message.client)
        return scan(message, *args, **kwargs)

    monkeypatch.setattr(Message, "_check_tensor", count)
    federation = run(partial(FedAvg, epochs=1), engine=make(), limit_val_batches=0)
    tensors = len(federation.server.weights)
    assert scans == [client for client in range(5) for _ in range(tensors)]


def test_engines_import_nothing_from_drop_in():
    folder = Path(pfl_lightning.engines.__file__).parent
    files = list(folder.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("pfl_lightning.drop_in") for name in names), file
