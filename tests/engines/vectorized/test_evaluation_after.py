"""A vectorized evaluation leaves the same state behind as SequentialEngine's."""

from functools import partial

import pytest
from _helpers.engines import UNEQUAL, evaluate, trained
from _helpers.plain import score
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, whole_state

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.methods import FedAvg, FedBABU, FedBN, FedClassAvg, FedProto


def flags(model):
    return [parameter.requires_grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "method",
    [FedAvg, FedClassAvg, FedProto, partial(FedAvg, fine_tune="head"), FedBABU],
    ids=["FedAvg", "FedClassAvg", "FedProto", "FedAvg-FT", "FedBABU"],
)
def test_the_module_is_left_as_by_the_sequential_engine(method):
    """Its modes, its flags and its own memory, that is: a client's state is loaded before its next use."""
    federation = trained(partial(method, lr=0.02), encoder=normed_encoder, data=Toy(batch_size=9))
    model, left = federation.clients.models[0], []
    for engine in (VectorizedEngine(forward="vmap"), SequentialEngine()):
        model.requires_grad_(True).train()
        tensors = [*model.parameters(), *model.buffers()]
        memory = [tensor.data_ptr() for tensor in tensors]
        evaluate(federation, engine)
        assert [tensor.data_ptr() for tensor in tensors] == memory
        left.append((flags(model), [name for name, _ in model.named_buffers()], list(model.state_dict())))
        assert not any(module.training for module in model.modules())
    assert left[0] == left[1]


@pytest.mark.parametrize(
    "method",
    [partial(FedAvg, fine_tune="head"), FedBABU, FedClassAvg, FedBN],
    ids=["FT", "FedBABU", "FedClassAvg", "FedBN"],
)
def test_an_evaluation_changes_nothing_for_the_next_round(method):
    def go(**options):
        data = Toy(batch_size=9)
        cohorts = [[1, 3], range(CLIENTS), [0, 2, 4]]
        engine = VectorizedEngine(forward="vmap")
        return run(
            partial(method, lr=0.02), 3, encoder=normed_encoder, data=data, cohorts=cohorts, engine=engine, **options
        )

    assert_same(whole_state(go()), whole_state(go(limit_val_batches=0)))


def test_clients_can_be_had_after_an_evaluation():
    federation = trained(partial(FedBABU, lr=0.02), data=Toy(**UNEQUAL))
    expected = [federation.client_model(client).state_dict() for client in range(CLIENTS)]
    federation.engine = VectorizedEngine(forward="vmap")
    results = evaluate(federation, federation.engine)
    for client, state in enumerate(expected):
        model = federation.client_model(client)
        assert_same(dict(model.state_dict()), dict(state))
        assert all(flags(model))
        assert results[client].test.loss == pytest.approx(score(model, federation.data, client, "test")[1], abs=1e-5)
