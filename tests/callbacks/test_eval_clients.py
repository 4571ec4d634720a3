"""A sample of the clients is evaluated during a fit, and everybody by validate and test."""

import csv
import json
import warnings
from functools import partial

import lightning as L
import numpy as np
import pytest
from _helpers.plain import score
from _helpers.results import without_seconds
from _helpers.toy import CLIENTS, LABELS, SEED, Toy, assert_same, quiet_trainer, run, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPAC, FedPer

FIT = partial(FedPAC, lr=0.1, epochs=1)
SOME = FederatedLoop(2, eval_cohort=3).sample_eval_clients(CLIENTS, SEED)


class Diary(L.Callback):
    """Whose models were evaluated, round by round."""

    def __init__(self):
        self.clients = []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.clients.append([])

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.clients[-1] += batch.tolist()


@pytest.mark.parametrize(
    ("eval_cohort", "size"), [(1.0, 20), (0.3, 6), (0.31, 7), (0.001, 1), (1, 1), (7, 7), (20, 20)]
)
def test_the_sample(eval_cohort, size):
    drawn = [FederatedLoop(eval_cohort=eval_cohort).sample_eval_clients(20, seed) for seed in range(200)]
    assert all(len(clients) == size for clients in drawn)
    assert all(clients == sorted(set(clients)) for clients in drawn)
    assert {client for clients in drawn for client in clients} == set(range(20))
    assert (len({tuple(clients) for clients in drawn}) > 10) == (size < 20)
    assert drawn[3] == FederatedLoop(5, eval_cohort=eval_cohort).sample_eval_clients(20, 3)


def test_it_is_not_the_first_cohort():
    """Each has a stream of its own: otherwise one would judge those that have just trained."""
    loop = FederatedLoop(10, eval_cohort=10)
    assert loop.sample_eval_clients(1000, 0) != loop.sample_cohort(0, 1000, 0, None)


@pytest.mark.parametrize("eval_cohort", [0, 0.0, -1, 1.5, True, float("nan"), "all"])
def test_samples_without_meaning_are_refused(eval_cohort):
    with pytest.raises(ConfigurationError, match=r"eval_cohort must be a share in .*limit_val_batches"):
        FederatedLoop(eval_cohort=eval_cohort)


def test_more_than_there_are():
    with pytest.raises(ConfigurationError, match="eval_cohort is 6 clients, there are 5"):
        run(FedAvg, loop=FederatedLoop(eval_cohort=6))


def test_the_same_clients_in_every_round_and_everybody_afterwards():
    diary, data = Diary(), Toy()
    federation = run(FIT, 3, loop=FederatedLoop(2, eval_cohort=3), callbacks=[diary], data=data)
    assert len(SOME) == 3
    assert diary.clients == [SOME] * 3
    assert list(federation.validation_scores) == list(federation.test_scores) == SOME
    found = federation.trainer.callback_metrics["test_accuracy/mean"]
    expected = [score(federation.client_model(client), data, client, "test")[0] for client in SOME]
    assert float(found) == pytest.approx(np.mean(expected), abs=1e-6)
    federation.trainer.validate(federation, datamodule=data, verbose=False)
    assert list(federation.validation_scores) == list(range(CLIENTS))
    quiet_trainer(1).test(federation, datamodule=data, verbose=False)
    assert list(federation.test_scores) == list(range(CLIENTS))


def test_nothing_else_changes():
    some, every = (run(FIT, 3, loop=FederatedLoop(2, eval_cohort=eval_cohort)) for eval_cohort in (3, 1.0))
    assert_same(whole_state(some), whole_state(every))
    assert some.test_scores == {client: every.test_scores[client] for client in SOME}


def test_validation_limits_take_the_first_of_them():
    federation = run(FIT, 1, loop=FederatedLoop(eval_cohort=3), limit_val_batches=2, num_sanity_val_steps=1)
    assert list(federation.test_scores) == SOME[:2]


class Fails(FedAvg):
    def before_fit(self, context):
        raise MemoryError


def test_everybody_after_an_error():
    data = Toy()
    with pytest.raises(MemoryError):
        run(Fails, loop=FederatedLoop(eval_cohort=3), data=data)
    assert data.evaluated_clients() == list(range(CLIENTS))


def test_clients_that_do_not_exist():
    data = Toy()
    data.eval_clients = [1, 5]
    with pytest.raises(IndexError, match=r"eval_clients: \[1, 5\] names clients outside 0 to 4"):
        data.evaluated_clients()


# ---------------------------------------------------------------------- what is written


def test_results_say_how_many_and_invent_nothing(tmp_path):
    loop, data = FederatedLoop(2, eval_cohort=3), Toy()
    federation = run(FIT, 2, loop=loop, callbacks=[ResultsWriter(str(tmp_path))], data=data)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["num_clients"], results["evaluated_clients"]) == (CLIENTS, 3)
    assert [entry["clients"] for entry in results["history"]] == [3, 3]
    assert {choice["test"]["num_clients"] for choice in results["accuracy"].values()} == {3}
    expected = {client: score(federation.client_model(client), data, client, "test")[0] for client in SOME}
    last = results["accuracy"]["last"]["test"]
    assert last["mean"] == pytest.approx(np.mean(list(expected.values())), abs=1e-6)
    assert {last["best_client"], last["worst_client"]} <= set(SOME)
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert [int(row["client"]) for row in rows] == list(range(CLIENTS))
    assert [int(row["train_samples"]) for row in rows] == [len(own) for own in LABELS]
    for client, row in enumerate(rows):
        figures = [value for name, value in row.items() if "accuracy" in name]
        assert len(figures) == 6
        assert all(figures) if client in SOME else not any(figures)
    assert {int(r["client"]): float(r["test_accuracy_last"]) for r in rows if r["test_accuracy_last"]} == pytest.approx(
        expected, abs=1e-6
    )


def test_without_evaluation_nobody_was_evaluated(tmp_path):
    run(FIT, 1, callbacks=[ResultsWriter(str(tmp_path))], limit_val_batches=0)
    assert json.loads((tmp_path / "results.json").read_text())["evaluated_clients"] == 0


# ---------------------------------------------------------------------- resume


def play(folder, rounds, eval_cohort=3, **options):
    diary = Diary()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    callbacks = [saver, ResultsWriter(str(folder)), diary]
    loop = FederatedLoop(2, eval_cohort=eval_cohort)
    method = partial(FedPer, lr=0.1, epochs=1)
    federation = run(method, rounds, loop=loop, callbacks=callbacks, enable_checkpointing=True, **options)
    return federation, diary.clients


def test_a_resumed_run_evaluates_the_same_clients(tmp_path):
    whole, seen = play(tmp_path / "whole", 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*evaluated.*")
        resumed, later = play(tmp_path / "parts", 4, ckpt_path=str(tmp_path / "whole" / "epoch=1.ckpt"))
    assert (seen, later) == ([SOME] * 4, [SOME] * 2)
    assert resumed.test_scores == whole.test_scores
    results, expected = (
        without_seconds(json.loads((tmp_path / name / "results.json").read_text())) for name in ("parts", "whole")
    )
    assert results["accuracy"] == expected["accuracy"]
    assert results["history"] == expected["history"]


def test_going_on_with_another_sample_is_said(tmp_path):
    play(tmp_path, 1)
    with pytest.warns(UserWarning, match="run evaluated 3 of the clients, this one evaluates 2: values of rounds"):
        play(tmp_path, 2, 2, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
