"""A method that forgets something: the base does it, or refuses with a sentence; never silently wrong."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _helpers.resume import play
from _helpers.toy import CLASSES, CLIENTS, assert_same, for_toy, run, tiny_encoder, whole_state

from pfl_lightning import AveragingAggregator, VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.messages import Broadcast
from pfl_lightning.methods import METHODS, DualFed, FedAvg, FedPAC, FedRep, FedRoD
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import select_state

# ---------------------------------------------------------------------- a server's store


class OwnHeads(AveragingAggregator):
    """Averages encoders, and gives each client the head that it sent last: in a store, and nothing else."""

    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.heads = ClientStates(select_state(client, ["head.weight", "head.bias"]), num_clients)

    def broadcast(self, client, round):
        return Broadcast(client=client, round=round, weights={**self.weights.as_state(), **self.heads.get(client)})

    def receive(self, update):
        super().receive(update)
        self.heads.set(update.client, {name: update.weights[name] for name in self.heads.initial})


class WithOwnHeads(FedAvg):
    """Its client."""

    server = OwnHeads

    def configure_aggregator(self, num_clients):
        return self.server(self, num_clients)


class ExtraState(OwnHeads):
    """Saves something of its own, without a call of super()."""

    def get_extra_state(self):
        return {"own": 1}

    def set_extra_state(self, state):
        assert state == {"own": 1}


class WithExtraState(WithOwnHeads):
    """Its client."""

    server = ExtraState


@pytest.mark.parametrize("method", [WithOwnHeads, WithExtraState])
def test_a_server_with_a_store_and_nothing_else_resumes_exactly(tmp_path, method):
    fit = partial(method, lr=0.05, epochs=1)
    whole = play(tmp_path / "whole", 4, fit)
    play(tmp_path / "parts", 2, fit)
    resumed = play(tmp_path / "parts", 4, fit, ckpt_path=str(tmp_path / "parts" / "last.ckpt"))
    heads = [whole.server.heads.get(client)["head.bias"] for client in range(CLIENTS)]
    assert not torch.equal(heads[0], heads[1])  # there is something to lose
    for client in range(CLIENTS):
        assert_same(resumed.server.heads.get(client), whole.server.heads.get(client))
    assert_same(whole_state(resumed), whole_state(whole))


def test_a_checkpoint_without_the_servers_store_is_refused():
    client = WithOwnHeads(tiny_encoder((6,)), CLASSES)
    state = AveragingAggregator(client, CLIENTS).state_dict()
    with pytest.raises(CheckpointError, match="the checkpoint holds 0 client states of the server, OwnHeads has 1"):
        OwnHeads(client, CLIENTS).load_state_dict(state)


# ---------------------------------------------------------------------- other content of a server


class Remembers(AveragingAggregator):
    """Keeps something between rounds, as ``keep`` says."""

    keep = None

    def aggregate(self):
        before = {name: tensor.clone() for name, tensor in self.weights.as_state().items()}
        super().aggregate()
        type(self).keep(self, before)


def keep_state(server, before):
    server.momentum = before


def keep_in_object(server, before):
    server.memory.last = before["head.bias"]


def count_rounds(server, before):
    server.steps += 1


def keep_in_place(server, before):
    server.table += 1


def keep_array(server, before):
    server.array = server.array + 1


def draw(server, before):
    torch.rand(2, generator=server.generator_of_its_own)


def step(server, before):
    server.scale.grad = torch.ones(())
    server.optimizer.step()


class Kept(Remembers):
    """Has all kinds of attributes, which do not change by themselves."""

    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.memory, self.steps, self.history = SimpleNamespace(last=None), 0, []
        self.table, self.array = torch.zeros(3), np.zeros(2)
        self.generator_of_its_own = torch.Generator().manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.SGD([self.scale], lr=0.1, momentum=0.9)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)


def with_server(server, **options):
    class Method(FedAvg):
        def configure_aggregator(self, num_clients):
            return server(self, num_clients)

    return partial(Method, epochs=1, **options)


LOST = {
    "a dictionary": (keep_state, r"momentum\['encoder"),
    "an object": (keep_in_object, "memory.last"),
    "a counter": (count_rounds, "steps"),
    "a tensor in place": (keep_in_place, "table"),
    "an array": (keep_array, "array"),
    "a generator": (draw, "generator_of_its_own"),
    "an optimizer": (step, r"optimizer.state\[0\]\['momentum_buffer'\]"),
    "a list": (lambda server, before: server.history.append(1.0), r"history\[0\]"),
    "a buffer that is not saved": (lambda server, before: server.scratch.add_(1), "scratch"),
    "a store in a list": (
        lambda server, before: server.history.append(ClientStates(before, 2)),
        r"history\[0\].num_clients",
    ),
}


@pytest.mark.parametrize(("keep", "name"), LOST.values(), ids=LOST)
def test_content_that_a_resume_would_lose_is_refused(keep, name):
    server = type("Forgetful", (Kept,), {"keep": keep})
    with pytest.raises(ConfigurationError, match=rf"Forgetful.{name}.* checkpoints do not save it.* register_buffer"):
        run(with_server(server), cohorts=[[0]], limit_val_batches=0)


KEPT = {
    "nothing": ({}, lambda server, before: None),
    "a buffer": ({}, lambda server, before: server.total.add_(1)),
    "what need not be saved": ({"not_checkpointed": ("steps",)}, count_rounds),
    "what the server saves itself": (
        {"get_extra_state": lambda server: server.steps, "set_extra_state": lambda server, state: None},
        count_rounds,
    ),
}


@pytest.mark.parametrize(("attributes", "keep"), KEPT.values(), ids=KEPT)
def test_content_that_is_saved_or_need_not_be_is_taken(attributes, keep):
    server = type("Careful", (Kept,), {"keep": keep, **attributes})
    assert run(with_server(server), 2, cohorts=[[0]], limit_val_batches=0).round == 1


# ---------------------------------------------------------------------- phases and loss terms


class OtherNames(FedPAC):
    """FedPAC with phases of other names, which say nothing of losses."""

    def phases(self):
        head, encoder = super().phases()
        return replace(head, name="classifier"), replace(encoder, name="body", losses=None)


@pytest.mark.parametrize("engine", [None, VectorizedEngine(clients_per_batch=5)], ids=["sequential", "vectorized"])
def test_fedpac_with_a_phase_of_another_name_trains_with_alignment(engine):
    options = {"cohorts": [range(CLIENTS)], "engine": engine, "limit_val_batches": 0}
    expected = run(partial(FedPAC, lr=0.05, epochs=1), 2, **options)
    renamed = run(partial(OtherNames, lr=0.05, epochs=1), 2, **options)
    without = run(partial(FedPAC, lr=0.05, epochs=1, alignment=0.0), 2, **options)
    assert_same(whole_state(renamed), whole_state(expected))
    assert not torch.equal(
        renamed.server.encoder.as_state()["encoder.0.bias"], without.server.encoder.as_state()["encoder.0.bias"]
    )


@pytest.mark.repeated
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_no_method_looks_at_the_names_of_its_phases(method):
    class Renamed(method):
        def phases(self):
            return tuple(replace(phase, name=f"phase {index}") for index, phase in enumerate(super().phases()))

        def personalization_phases(self):
            return tuple(replace(phase, name="another") for phase in super().personalization_phases())

    Renamed.__name__ = method.__name__
    states = [
        whole_state(run(for_toy(made, epochs=1, fine_tune="all"), cohorts=[[0, 3]])) for made in (method, Renamed)
    ]
    assert_same(*states)


class Misspelled(FedPAC):
    """Names a loss term that does not exist, in a phase that comes last."""

    def phases(self):
        head, encoder = super().phases()
        return head, replace(encoder, losses=("cross_entropy", "alignmnet"))


def test_a_loss_term_that_does_not_exist_is_refused_before_training():
    trained = []

    class Watched(Misspelled):
        def before_fit(self, context):
            trained.append(context.client)
            return super().before_fit(context)

    with pytest.raises(
        ConfigurationError,
        match="Watched has no loss term 'alignmnet', which its phase 'encoder' names: there are cross_entropy, alignm",
    ):
        run(partial(Watched, epochs=1))
    assert trained == []


class Late(FedRep):
    """Names such a term in phases that it has only once it has begun."""

    begun = False

    def before_fit(self, context):
        self.begun = True

    def phases(self):
        return (Phase("late", ("head.*",), losses=("proximal",)),) if self.begun else super().phases()


def test_a_loss_term_of_a_later_phase_is_refused_when_it_is_entered():
    with pytest.raises(ConfigurationError, match="Late has no loss term 'proximal', which its phase 'late' names"):
        run(partial(Late, epochs=1), limit_val_batches=0)


class Undeclared(FedPAC):
    """Adds a term that no phase of FedPAC names."""

    def loss_terms(self, features, labels):
        return {**super().loss_terms(features, labels), "size": features.square().mean()}


class Asking(FedAvg):
    """Asks for a term that it does not declare."""

    def loss_terms(self, features, labels):
        terms = super().loss_terms(features, labels)
        return {**terms, "size": features.square().mean()} if self.uses("size") else terms


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Undeclared,
            r"phase 'head' of Undeclared has the loss terms \('cross_entropy',\), .* \['cross_entropy', 'size'\]",
        ),
        (
            Asking,
            "Asking has no loss term 'size', which loss_terms asks for: there are cross_entropy; a new term must be",
        ),
    ],
)
@pytest.mark.parametrize("engine", [None, VectorizedEngine(clients_per_batch=5)], ids=["sequential", "vectorized"])
def test_a_term_that_no_phase_names_is_refused(method, message, engine):
    with pytest.raises(ConfigurationError, match=message):
        run(partial(method, epochs=1), engine=engine, limit_val_batches=0)


def test_a_further_term_of_a_method_without_own_phases_needs_no_declaration():
    class Further(FedAvg):
        def loss_terms(self, features, labels):
            return {**super().loss_terms(features, labels), "size": features.square().mean()}

    changed, plain = (run(partial(m, epochs=1), cohorts=[[0]], limit_val_batches=0) for m in (Further, FedAvg))
    bias = "encoder.0.bias"
    assert not torch.equal(changed.server.weights.as_state()[bias], plain.server.weights.as_state()[bias])


@pytest.mark.parametrize(
    ("method", "losses", "expected"),
    [
        (FedPAC, ("cross_entropy",), ["cross_entropy"]),
        (FedPAC, ("alignment",), ["alignment"]),
        (FedPAC, None, ["cross_entropy", "alignment"]),
        (DualFed, ("contrastive",), ["contrastive"]),
        (DualFed, ("global_cross_entropy",), ["global_cross_entropy"]),
        (FedRoD, None, ["balanced_softmax", "personal_cross_entropy"]),
        (FedRoD, ("personal_cross_entropy",), ["personal_cross_entropy"]),
        (FedRoD, ("cross_entropy",), ["cross_entropy"]),
    ],
)
def test_the_terms_are_those_that_the_phase_names(method, losses, expected):
    client = for_toy(method)(tiny_encoder((6,)), CLASSES)
    client.phase = Phase("any", losses=losses)
    terms = client.loss_terms(torch.randn(4, 4), torch.tensor([0, 1, 1, 2]))
    assert list(terms) == expected


class HoldsOddTensors(AveragingAggregator):
    """A server with tensors that cannot be viewed as bytes as they are, and a long list."""

    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.row = torch.zeros(5, 3)[:1, 0]
        self.one = torch.zeros(()).expand(1)
        self.sparse = torch.eye(3).to_sparse()
        self.conjugate = torch.zeros(2, dtype=torch.complex64).conj()
        self.long = [0.5] * 300_000


class WithOddServer(FedAvg):
    def configure_aggregator(self, num_clients):
        return HoldsOddTensors(self, num_clients)


def test_tensors_of_any_layout_end_no_run():
    assert run(partial(WithOddServer, epochs=1), 2).round == 1


class Inner(AveragingAggregator):
    """An aggregator inside another one, with a client's state that it saves itself."""

    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.own = ClientStates({"a": torch.zeros(2)}, num_clients)

    def receive(self, update):
        super().receive(update)
        self.own.set(update.client, {"a": torch.full((2,), float(update.round + 1))})


class Outer(AveragingAggregator):
    def __init__(self, client, num_clients):
        super().__init__(client, num_clients)
        self.inner = Inner(client, num_clients)

    def check(self, update):
        super().check(update)
        self.inner.check(update)

    def receive(self, update):
        super().receive(update)
        self.inner.receive(update)

    def aggregate(self):
        super().aggregate()
        self.inner.aggregate()


class WithNestedServer(FedAvg):
    def configure_aggregator(self, num_clients):
        return Outer(self, num_clients)


def test_an_aggregator_inside_another_one_is_no_unsaved_state():
    federation = run(partial(WithNestedServer, epochs=1), 2)
    assert torch.equal(federation.server.inner.own.get(0)["a"], torch.full((2,), 2.0))


@pytest.mark.parametrize(("former", "now"), [("unsaved", "not_checkpointed"), ("undoes_clients", "rolls_back_client")])
def test_a_former_name_is_refused_with_the_new_one(former, now):
    with pytest.raises(ConfigurationError, match=rf"^Mine\.{former} is now called {now}"):
        type("Mine", (AveragingAggregator,), {former: True})
