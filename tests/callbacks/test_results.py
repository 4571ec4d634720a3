"""results.json and clients.csv against figures recomputed from the clients' own models."""

import csv
import json
import signal
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from _helpers import resume
from _helpers.plain import score
from _helpers.results import valid
from _helpers.toy import CLIENTS, LABELS, GivenCohorts, Toy, quiet_trainer, run
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter, RoundProgress
from pfl_lightning.callbacks.tables import fit_table
from pfl_lightning.datamodules import IID, Digits, FromFile
from pfl_lightning.errors import RunLockedError
from pfl_lightning.methods import FedAvg, FedMD, FedPAC, FedPer, LocalOnly
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.lock import RunLock

COHORTS = [[0, 2, 3], [1, 2], [4], [0, 1, 3]]
METHOD = partial(FedPAC, lr=0.3, epochs=1)
CHOICES = ("last", "validation_selected", "best_test")


class Independent(L.Callback):
    """After every round, every client's accuracies from its model and the raw samples."""

    def __init__(self, data):
        self.data, self.rounds = data, []

    def on_validation_end(self, trainer, pl_module):
        models = {client: pl_module.client_model(client) for client in range(CLIENTS)}
        self.rounds.append(
            {
                part: [score(pl_module.client_model(client), self.data, client, part)[0] for client in models]
                for part in ("validation", "test")
            }
        )


def play(folder, method=METHOD, rounds=4, data=None, **options):
    data = data or Toy()
    watch = Independent(data)
    run(method, rounds, data=data, cohorts=COHORTS, callbacks=[ResultsWriter(str(folder)), watch], **options)
    return valid(folder / "results.json"), watch.rounds


def check_summary(got, accuracies, round):
    values = np.array(accuracies)
    worst = np.sort(values)[: max(1, -(-len(values) // 10))]
    expected = {
        "mean": values.mean(),
        "std": np.sqrt(((values - values.mean()) ** 2).mean()),
        "worst_decile": worst.mean(),
        "best": values.max(),
        "worst": values.min(),
    }
    assert got["round"] == round + 1
    got = got["test"]
    assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert got["variance"] == pytest.approx(values.var(), abs=1e-6)
    assert got["num_clients"] == len(values)
    assert values[got["best_client"]] == values.max()
    assert values[got["worst_client"]] == values.min()


def test_all_figures(tmp_path):
    results, rounds = play(tmp_path)
    assert results["method"] == "FedPAC"
    assert (results["rounds"], results["num_clients"], results["seed"]) == (4, CLIENTS, 11)
    means = {part: [np.mean(round[part]) for round in rounds] for part in ("validation", "test")}
    chosen = [3, int(np.argmax(means["validation"])), int(np.argmax(means["test"]))]
    for name, round in zip(CHOICES, chosen, strict=True):
        check_summary(results["accuracy"][name], rounds[round]["test"], round)
    assert [entry["round"] for entry in results["history"]] == [1, 2, 3, 4]
    for part in ("validation", "test"):
        assert [entry[part]["accuracy"] for entry in results["history"]] == pytest.approx(means[part], abs=1e-6)
        assert results["accuracy"]["last"][part]["mean"] == pytest.approx(means[part][-1], abs=1e-6)
    assert 0 < results["seconds_per_round"] < 60
    for direction in ("up", "down"):
        kinds = results["bytes"][f"{direction}_by_kind"]
        assert set(kinds) == {"weights", "statistics"}
        assert results["bytes"][direction] == sum(kinds.values()) > 0


class _Prescribed(L.Callback):
    """Overwrites what the validation found, so that the three choices fall on three rounds."""

    validation = (0.1, 0.9, 0.9, 0.2)  # the first of equal rounds counts
    test = (0.8, 0.3, 0.7, 0.5)

    def on_validation_epoch_end(self, trainer, pl_module):
        from dataclasses import replace

        for scores, values in ((pl_module.validation_scores, self.validation), (pl_module.test_scores, self.test)):
            for client in scores:
                accuracy = values[trainer.current_epoch] + client / 100
                scores[client] = replace(scores[client], accuracy=accuracy)


def test_the_three_choices_are_kept_apart(tmp_path):
    callbacks = [_Prescribed(), ResultsWriter(str(tmp_path))]
    run(partial(FedAvg, epochs=1), 4, callbacks=callbacks)
    accuracy = json.loads((tmp_path / "results.json").read_text())["accuracy"]
    assert [accuracy[name]["round"] for name in CHOICES] == [4, 2, 1]
    assert [accuracy[name]["test"]["mean"] for name in CHOICES] == pytest.approx([0.52, 0.32, 0.82])
    assert [accuracy[name]["test"]["best_client"] for name in CHOICES] == [4, 4, 4]
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert [int(row["client"]) for row in rows] == list(range(CLIENTS))
    for client, row in enumerate(rows):
        assert int(row["train_samples"]) == len(LABELS[client])
        assert (int(row["validation_samples"]), int(row["test_samples"])) == (5, 8)
        for part, values in (("test", _Prescribed.test), ("validation", _Prescribed.validation)):
            got = [float(row[f"{part}_accuracy_{name}"]) for name in CHOICES]
            assert got == pytest.approx([values[round] + client / 100 for round in (3, 1, 0)])


def test_without_validation_parts_nothing_is_selected_on_validation(tmp_path):
    results, rounds = play(tmp_path, data=Toy(validation=0))
    assert results["accuracy"]["validation_selected"] is None
    check_summary(results["accuracy"]["last"], rounds[3]["test"], 3)
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert {row["validation_accuracy_last"] for row in rows} == {""}
    assert {row["validation_samples"] for row in rows} == {"0"}


def test_limited_validation_counts_the_clients_it_has_seen(tmp_path):
    results, rounds = play(tmp_path, limit_val_batches=3)
    check_summary(results["accuracy"]["last"], rounds[3]["test"][:3], 3)
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert [row["test_accuracy_last"] != "" for row in rows] == [True] * 3 + [False] * 2


def test_bytes_and_seconds_are_those_of_the_run(tmp_path):
    results, _ = play(tmp_path, partial(FedAvg, epochs=1))
    parameters = 6 * 5 + 5 + 5 * 4 + 4 + 4 * 5 + 5
    messages = sum(len(cohort) for cohort in COHORTS)
    assert results["bytes"]["up"] == results["bytes"]["down"] == messages * parameters * 4
    assert results["bytes"]["up_by_kind"] == {"weights": messages * parameters * 4}
    for direction in ("up", "down"):
        own = [entry[f"bytes_{direction}"] for entry in results["history"]]
        assert own == [len(cohort) * parameters * 4 for cohort in COHORTS]
    assert sum(entry["seconds"] for entry in results["history"]) == pytest.approx(results["seconds"])
    assert results["seconds"] == pytest.approx(4 * results["seconds_per_round"])


def test_the_partition_is_saved_and_can_be_read_back(tmp_path):
    play(tmp_path, rounds=1)
    data = Toy()
    data.setup()
    again = FromFile(str(tmp_path / "partition.npz"))
    held = data.partition.lists
    for got, expected in zip(again.partition(data.load().train_targets.numpy()), held[0], strict=True):
        assert got.tolist() == expected.tolist()


class _Stops(L.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_a_run_that_ends_early_leaves_its_results(tmp_path, error, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # Lightning would make this process deaf to Ctrl-C
    with pytest.raises((SystemExit, RuntimeError)):
        run(partial(FedPer, epochs=1), 4, callbacks=[ResultsWriter(str(tmp_path)), _Stops(error)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rounds"] == 2
    assert [entry["round"] for entry in results["history"]] == [1, 2]
    assert results["accuracy"]["last"]["round"] == 2
    assert len((tmp_path / "clients.csv").read_text().splitlines()) == CLIENTS + 1


def test_a_run_that_fails_at_once_says_why_and_writes_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="0 of 5 updates"):
        run(_AlwaysBad, callbacks=[ResultsWriter(str(tmp_path))])
    assert not (tmp_path / "results.json").exists()


class _AlwaysBad(FedAvg):
    def loss_terms(self, features, labels):
        return {name: term * float("inf") for name, term in super().loss_terms(features, labels).items()}


def test_results_lie_in_the_folder_of_the_trainer_by_default(tmp_path):
    run(partial(FedAvg, epochs=1), callbacks=[ResultsWriter()], default_root_dir=tmp_path)
    assert (tmp_path / "results.json").is_file()


@pytest.mark.parametrize(("name", "part"), [("test", "test"), ("validate", "validation")])
def test_an_evaluation_leaves_files_of_the_same_form(tmp_path, name, part):
    data = Toy()
    federation = run(partial(FedAvg, epochs=1), 2, data=data)
    writer = ResultsWriter(str(tmp_path))
    trainer = quiet_trainer(1, GivenCohorts([0]), writer)
    getattr(trainer, name)(federation, datamodule=data, verbose=False)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}_clients.csv"}
    assert writer.history == []
    found = valid(tmp_path / f"{name}.json")
    expected = [score(federation.client_model(client), data, client, part)[0] for client in range(CLIENTS)]
    assert found["accuracy"]["last"][part]["mean"] == pytest.approx(np.mean(expected))
    assert found["accuracy"]["last"][{"test": "validation", "validation": "test"}[part]] is None
    assert (found["finished"], found["evaluated_clients"], "history" in found) == (None, CLIENTS, False)
    rows = list(csv.DictReader((tmp_path / f"{name}_clients.csv").open()))
    assert [float(row[f"{part}_accuracy"]) for row in rows] == pytest.approx(expected)
    assert [int(row["train_samples"]) for row in rows] == [len(LABELS[client]) for client in range(CLIENTS)]


def test_an_evaluation_of_adapted_models_is_no_test_of_the_run(tmp_path):
    data = Toy()
    federation = run(partial(FedAvg, epochs=1), 1, data=data)
    trainer = quiet_trainer(1, GivenCohorts([0]), ResultsWriter(str(tmp_path)))
    with federation.personalized(Personalization(epochs=1)):
        trainer.test(federation, datamodule=data, verbose=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("novel", [0, 1])
def test_results_on_public_samples_satisfy_the_schema(tmp_path, novel):
    data = Digits(partition=IID(num_clients=3 + novel), public=30, novel_clients=novel, batch_size=64)
    federation = Federation(partial(FedMD, epochs=1, public_samples=10, public_batch_size=5), encoder="mlp")
    quiet_trainer(1, FederatedLoop(), ResultsWriter(str(tmp_path))).fit(federation, datamodule=data)
    assert "-public" in valid(tmp_path / "results.json")["partition"]["fingerprint"]


def test_rounds_without_an_evaluation_are_in_the_history(tmp_path):
    run(partial(FedAvg, epochs=1), 3, callbacks=[ResultsWriter(str(tmp_path))], check_val_every_n_epoch=2)
    results = valid(tmp_path / "results.json")
    assert [(entry["round"], entry["clients"]) for entry in results["history"]] == [(1, 0), (2, CLIENTS), (3, 0)]
    assert [entry["test"] is None for entry in results["history"]] == [True, False, True]
    assert all(entry["loss"] > 0 for entry in results["history"])
    assert sum(entry["bytes_up"] for entry in results["history"]) == results["bytes"]["up"]
    assert results["evaluated_clients"] == CLIENTS
    assert results["accuracy"]["last"]["round"] == 2


class _StopsWithin(L.Callback):
    """Stops after the second client of a round."""

    def __init__(self, round):
        self.round = round

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.current_epoch == self.round and batch_idx == 1


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_round_that_was_stopped_in_its_middle_is_none(tmp_path, stopped, capsys):
    callbacks = [ResultsWriter(str(tmp_path)), RoundProgress(), _StopsWithin(stopped)]
    run(partial(FedAvg, epochs=1), 4, callbacks=callbacks)
    results = valid(tmp_path / "results.json")
    played = list(range(1, stopped + 1))
    assert [entry["round"] for entry in results["history"]] == played
    assert results["rounds"] == stopped
    assert sum(entry["bytes_up"] for entry in results["history"]) == results["bytes"]["up"]
    assert [choice and choice["round"] for choice in results["accuracy"].values()] == [stopped or None] * 3
    assert capsys.readouterr().out.count("round ") == stopped


class _OutOfTime(Timer):
    """Its time is over once a round has been played."""

    over = False

    def on_train_epoch_end(self, *args, **kwargs):
        self.over = True
        super().on_train_epoch_end(*args, **kwargs)

    def time_elapsed(self, stage=RunningStage.TRAINING):
        return 2.0 if self.over else 0.0


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_run_that_time_has_ended_is_not_finished(tmp_path, rounds):
    timer = _OutOfTime(timedelta(seconds=1), interval="epoch")
    run(partial(FedAvg, epochs=1), rounds, callbacks=[ResultsWriter(str(tmp_path)), timer])
    results = valid(tmp_path / "results.json")
    assert (results["rounds"], results["finished"]) == (1, rounds == 1)


class _Reads(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_start(self, trainer, pl_module):
        if not hasattr(self, "found"):
            self.found = valid(self.folder / "results.json")


def test_while_a_finished_run_is_extended_its_results_say_so(tmp_path):
    resume.play(tmp_path, 1, partial(FedAvg, epochs=1))
    assert valid(tmp_path / "results.json")["finished"]
    reads = _Reads(tmp_path)
    resume.play(tmp_path, 2, partial(FedAvg, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"), more=[reads])
    assert (reads.found["finished"], reads.found["rounds"]) == (False, 1)
    results = valid(tmp_path / "results.json")
    assert (results["finished"], results["rounds"]) == (True, 2)


def test_what_a_run_says_of_itself(tmp_path):
    method = partial(FedPAC, lr=0.3, epochs=2, optimizer=partial(torch.optim.Adam, lr=0.1))
    run(method, 1, callbacks=[ResultsWriter(str(tmp_path))])
    results = valid(tmp_path / "results.json")
    arguments = results["method_arguments"]
    assert (arguments["lr"], arguments["epochs"], arguments["momentum"]) == (0.3, 2, 0.5)
    assert arguments["optimizer"] == {"name": "Adam", "arguments": {"lr": 0.1}}
    assert arguments["alignment"] == 1.0
    assert not {"encoder", "num_classes", "self"} & arguments.keys()
    assert results["data"]["name"] == "Toy"
    assert results["evaluated"] == {"score": "classifier", "model": "aggregated"}
    assert results["versions"]["torch"] == torch.__version__


def test_data_and_partition_are_told_apart(tmp_path):
    def said(name, data):
        callbacks = [ResultsWriter(str(tmp_path / name))]
        run(partial(FedAvg, epochs=1), 1, data=data, callbacks=callbacks, cohorts=[[0, 1]])
        found = valid(tmp_path / name / "results.json")
        return found["data"]["fingerprint"], found["partition"]["fingerprint"]

    first = said("a", Toy())
    assert said("b", Toy()) == first
    other = said("c", Toy(novel_clients=1))
    assert other[0] == first[0]
    assert other[1] != first[1]

    def move(inputs, targets):
        inputs[-1] += 1

    changed = said("d", Toy(change=move))
    assert (changed[0] != first[0], changed[1] == first[1]) == (True, True)


def test_local_training_is_evaluated_as_trained(tmp_path):
    run(partial(LocalOnly, epochs=1), 1, callbacks=[ResultsWriter(str(tmp_path))])
    assert valid(tmp_path / "results.json")["evaluated"] == {"score": "classifier", "model": "trained"}


def test_a_fine_tuned_model_and_a_nearest_neighbor_score_are_named(tmp_path):
    run(partial(FedAvg, epochs=1, fine_tune="head"), 1, callbacks=[ResultsWriter(str(tmp_path / "tuned"))])
    assert valid(tmp_path / "tuned" / "results.json")["evaluated"] == {"score": "classifier", "model": "fine_tuned"}
    federation = run(_NoHead, 1, callbacks=[writer := ResultsWriter(str(tmp_path / "knn"))])
    assert valid(tmp_path / "knn" / "results.json")["evaluated"]["score"] == "nearest_neighbor"
    assert fit_table(federation, writer).title.startswith("_NoHead: nearest-neighbor score (test parts) over 5 clients")


class _NoHead(FedAvg):
    evaluation = "knn"


def test_a_folder_that_another_process_writes_to_is_refused_and_left_alone(tmp_path, monkeypatch):
    """With a Trainer in Python; here the lock is of this process, which is not asked."""
    resume.play(tmp_path, 1, partial(FedPer, epochs=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("pfl_lightning.callbacks.results.is_locked_here", lambda folder: False)
    with RunLock(tmp_path), pytest.raises(RunLockedError, match="is being trained by process"):
        resume.play(tmp_path, 2, partial(FedPer, epochs=1), ckpt_path=str(tmp_path / "last.ckpt"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("error", [None, ValueError("something")])
def test_the_folder_is_locked_during_a_fit_alone(tmp_path, error):
    locked = []

    class Look(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            locked.append((tmp_path / ".lock").exists())
            if error is not None:
                raise error

    with pytest.raises(ValueError, match="something") if error else nullcontext():
        run(partial(FedPer, epochs=1), 1, callbacks=[ResultsWriter(str(tmp_path)), Look()])
    assert locked == [True]
    assert not (tmp_path / ".lock").exists()


def test_a_lock_of_the_command_line_is_enough(tmp_path):
    with RunLock(tmp_path):
        run(partial(FedPer, epochs=1), 1, callbacks=[ResultsWriter(str(tmp_path))])
        assert (tmp_path / ".lock").exists()
