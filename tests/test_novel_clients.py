"""Clients that are set aside: they never train, are evaluated, and are reported apart."""

import json
from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, Toy, assert_same, quiet_trainer, run, tiny_encoder, whole_state
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.datamodules.clients.division import draw_novel_clients
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import FedAvg, FedPer

FIT = partial(FedPer, lr=0.05, epochs=1)


@given(
    num_clients=st.integers(2, 300),
    novel=st.one_of(st.integers(0, 250), st.floats(0, 0.999, exclude_max=True)),
    seed=st.integers(0, 5),
)
def test_the_draw_is_a_set_of_clients_that_leaves_somebody(num_clients, novel, seed):
    wanted = novel if isinstance(novel, int) else novel * num_clients
    if wanted > num_clients - 1 + 1e-9:
        with pytest.raises(ValueError, match="none would be left to train"):
            draw_novel_clients(novel, num_clients, seed)
        return
    found = draw_novel_clients(novel, num_clients, seed)
    assert found == sorted(set(found))
    assert all(0 <= client < num_clients for client in found)
    assert wanted - 1e-6 <= len(found) < wanted + 1
    assert found == draw_novel_clients(novel, num_clients, seed)


@pytest.mark.parametrize("novel", [-1, 1.0, 1.5, True, "2", None])
def test_what_is_no_number_of_clients(novel):
    with pytest.raises(ValueError, match=r"novel_clients must be a share in \[0, 1\) or a number of clients"):
        Toy(novel_clients=novel)


def test_they_never_train_and_are_not_evaluated_during_the_fit():
    data = Toy(novel_clients=2)
    assert len(data.novel) == 2
    assert sorted(data.novel + data.participating) == list(range(CLIENTS))
    trained = []

    class Watched(FedPer):
        def make_update(self, context, before):
            trained.append(context.client)
            return super().make_update(context, before)

    federation = run(partial(Watched, epochs=1), 3, data=data, loop=FederatedLoop(cohort=1.0))
    assert sorted(trained) == sorted(3 * data.participating)
    assert sorted(federation.test_scores) == data.participating
    assert not any(federation.personal.written(client) for client in data.novel)
    assert not any(name.startswith("novel") for name in federation.trainer.callback_metrics)


@pytest.mark.parametrize("cohort", [1, 2, 0.5])
def test_a_share_and_a_number_are_of_those_that_take_part(cohort):
    data = Toy(novel_clients=2)
    loop = FederatedLoop(cohort, eval_cohort=2)
    federation = run(FIT, 2, data=data, loop=loop)
    seen = {client for round in range(50) for client in data.cohort(round)}
    assert seen == set(data.participating)
    assert set(federation.test_scores) < set(data.participating)
    assert len(federation.test_scores) == 2
    with pytest.raises(ConfigurationError, match="cohort is 4 clients, there are 3"):
        run(FIT, 1, data=Toy(novel_clients=2), loop=FederatedLoop(4))


def test_the_others_train_as_they_would_without_them():
    """With the same three clients in the cohort, nothing of the novel ones reaches anybody."""
    novel = Toy(novel_clients=2)
    others = novel.participating
    federation = run(partial(FedAvg, lr=0.05), 2, data=novel, loop=FederatedLoop())
    expected = run(partial(FedAvg, lr=0.05), 2, cohorts=[others])
    assert_same(whole_state(federation), whole_state(expected))


def test_they_are_reported_apart_by_test(tmp_path):
    data = Toy(novel_clients=0.4)
    saver = ModelCheckpoint(tmp_path, filename="last")
    trained = run(FIT, 2, data=data, loop=FederatedLoop(), callbacks=[saver], enable_checkpointing=True)
    fresh = Federation(FIT, tiny_encoder, seed=1)
    trainer = quiet_trainer(1)
    metrics = trainer.test(fresh, Toy(novel_clients=0.4), ckpt_path=tmp_path / "last.ckpt", verbose=False)[0]
    scores = fresh.test_scores
    assert sorted(scores) == list(range(CLIENTS))
    for prefix, clients in (("", data.participating), ("novel_", data.novel)):
        accuracies = torch.tensor([scores[client].accuracy for client in clients], dtype=torch.float64)
        assert metrics[f"{prefix}test_accuracy/mean"] == pytest.approx(float(accuracies.mean()), abs=1e-6)
        assert metrics[f"{prefix}test_accuracy/std"] == pytest.approx(float(accuracies.std(correction=0)), abs=1e-6)
    for client in data.novel:  # the received encoder under the head that every client starts from
        head = trained.clients.model_and_state(client)[1]["head.weight"]
        assert torch.equal(fresh.client_model(client).head.weight, head)
    assert fresh.test_scores[data.participating[0]] == trained.test_scores[data.participating[0]]


def test_a_checkpoint_of_other_novel_clients_is_refused(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="last")
    run(FIT, 1, data=Toy(novel_clients=1), loop=FederatedLoop(), callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match="another partition"):
        run(FIT, 2, data=Toy(novel_clients=2), loop=FederatedLoop(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert Toy(novel_clients=2, seed=1).novel != Toy(novel_clients=2, seed=3).novel


def test_results_name_them(tmp_path):
    data = Toy(novel_clients=2)
    run(FIT, 1, data=data, loop=FederatedLoop(), callbacks=[ResultsWriter(str(tmp_path))])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["novel_clients"] == data.novel
    assert results["evaluated_clients"] == 3
