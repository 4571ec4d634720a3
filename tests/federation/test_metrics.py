"""Further metrics of clients: under every engine, in files, loggers and tables."""

import csv
import json
import math
from functools import partial

import pytest
import torch
from _helpers.configs import digits_config
from _helpers.results import valid
from _helpers.toy import Toy, quiet_trainer, tiny_encoder
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.metrics import f1_score

from pfl_lightning import Federation, ProcessEngine, SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter, results_table
from pfl_lightning.cli import main
from pfl_lightning.cli.compare import compare
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import PFLSSL, FedAvg, FedPer
from pfl_lightning.report.grouping import group_runs
from pfl_lightning.report.rows import reach
from pfl_lightning.runs.changes import Change
from pfl_lightning.runs.config import run_options
from pfl_lightning.runs.reading import read_run
from pfl_lightning.runs.results import HistoryEntry
from pfl_lightning.self_supervised import SimCLR
from pfl_lightning.server_optimizers import FedAdam

METRICS = ("f1", "auroc", "calibration_error")


def fitted(folder, engine=None, rounds=2, metrics=METRICS, callbacks=(), method=FedAvg, **options):
    federation = Federation(partial(method, lr=0.1, epochs=1, **options), tiny_encoder, engine, 1, metrics=metrics)
    trainer = quiet_trainer(rounds, FederatedLoop(), ResultsWriter(str(folder)), *callbacks)
    trainer.fit(federation, datamodule=Toy())
    return trainer, federation


def by_hand(federation, part):
    """F1 of each client, of its own model's scores."""
    found = {}
    for client in range(federation.num_clients):
        samples = getattr(federation.data.client_data(client), part)
        if len(samples):
            x, y = samples.loader(100).tensors()
            with torch.no_grad():
                predicted = federation.client_model(client).eval()(x).argmax(1)
            found[client] = f1_score(y, predicted, labels=y.unique(), average="macro", zero_division=0)
    return found


def test_values_are_those_of_the_clients_own_models(tmp_path):
    _, federation = fitted(tmp_path, method=FedPer)
    for part, scores in (("test", federation.test_scores), ("validation", federation.validation_scores)):
        assert {client: score.further["f1"] for client, score in scores.items()} == pytest.approx(
            by_hand(federation, part)
        )


def test_values_of_files_loggers_and_tables(tmp_path):
    trainer, federation = fitted(tmp_path)
    results = valid(tmp_path / "results.json")
    own = {client: score.further for client, score in federation.test_scores.items()}
    for name in METRICS:
        block, values = results["metrics"][name], [one[name] for one in own.values()]
        known = [value for value in values if not math.isnan(value)]
        assert block["last"]["test"]["mean"] == pytest.approx(sum(known) / len(known))
        assert results["history"][-1]["test"][name] == pytest.approx(sum(known) / len(known))
        assert trainer.callback_metrics[f"test_{name}/mean"].item() == pytest.approx(sum(known) / len(known))
        assert block["last"]["test"]["best"] == (min if block["lower_is_better"] else max)(known)
    assert results["metrics"]["calibration_error"]["lower_is_better"]
    samples = [score.num_samples for score in federation.test_scores.values()]
    weighted = sum(n * one["f1"] for n, one in zip(samples, own.values(), strict=True)) / sum(samples)
    assert results["metrics"]["f1"]["last"]["test"]["weighted_mean"] == pytest.approx(weighted)
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert [float(row["test_f1_last"]) for row in rows] == pytest.approx([one["f1"] for one in own.values()])
    assert "calibration_error" in results_table(trainer)
    trainer.test(federation, datamodule=Toy(), verbose=False)
    tested = valid(tmp_path / "test.json")["metrics"]["f1"]["last"]["test"]
    assert tested["mean"] == pytest.approx(results["metrics"]["f1"]["last"]["test"]["mean"])
    run = read_run(tmp_path, metric="f1")
    assert run.test.mean == pytest.approx(results["metrics"]["f1"]["last"]["test"]["mean"])
    assert len(run.test.clients) == len(own)
    assert [entry.test for entry in run.history] == [entry["test"]["f1"] for entry in results["history"]]


@pytest.mark.parametrize("engine", [VectorizedEngine(), ProcessEngine(2)], ids=["vectorized", "processes"])
def test_engines_agree(tmp_path, engine):
    _, one = fitted(tmp_path, SequentialEngine(), rounds=1)
    _, other = fitted(tmp_path, engine, rounds=1)
    for client, score in one.test_scores.items():
        assert other.test_scores[client].further == pytest.approx(dict(score.further), abs=1e-4, nan_ok=True)


def test_callbacks_can_watch_one(tmp_path):
    stopping = EarlyStopping("val_f1/mean", patience=1, mode="max", min_delta=2.0)  # which nothing reaches
    trainer, _ = fitted(tmp_path, rounds=5, callbacks=[stopping])
    assert trainer.current_epoch < 5


def test_clients_without_a_value_are_left_out_and_counted(tmp_path):
    with pytest.warns(UserWarning, match="val_Undefined is undefined"):
        trainer, _ = fitted(tmp_path, rounds=1, metrics=[undefined_for_some()])
    assert trainer.callback_metrics["val_Undefined/clients"] < Toy().num_clients
    summary = valid(tmp_path / "results.json")["metrics"]["Undefined"]["last"]["validation"]
    assert summary["num_clients"] == trainer.callback_metrics["val_Undefined/clients"]


def undefined_for_some():
    """A metric that is not defined where the first label is 1."""
    from torchmetrics import Metric

    class Undefined(Metric):
        higher_is_better = True

        def __init__(self):
            super().__init__()
            self.add_state("value", torch.tensor(0.0))

        def update(self, preds, target):
            self.value = torch.tensor(math.nan if target[0] == 1 else 0.5)

        def compute(self):
            return self.value

    return Undefined()


def test_confusion_matrices(tmp_path):
    trainer, federation = fitted(tmp_path, rounds=1, metrics=["confusion_matrix"])
    assert "metrics" not in valid(tmp_path / "results.json")
    found = list(csv.DictReader((tmp_path / "confusion_matrices.csv").open()))
    for client, score in federation.test_scores.items():
        own = [row for row in found if (row["client"], row["part"]) == (str(client), "test")]
        right = sum(int(row["samples"]) for row in own if row["class"] == row["predicted"])
        assert sum(int(row["samples"]) for row in own) == score.num_samples
        assert right / score.num_samples == pytest.approx(score.accuracy)
    trainer.test(federation, datamodule=Toy(), verbose=False)
    tested = list(csv.DictReader((tmp_path / "test_confusion_matrices.csv").open()))
    assert tested == [row for row in found if row["part"] == "test"]


def test_without_metrics_there_is_no_block(tmp_path):
    fitted(tmp_path, rounds=1, metrics=())
    assert "metrics" not in valid(tmp_path / "results.json")


def test_nearest_neighbors_have_no_further_metrics(tmp_path):
    data = Toy()
    federation = Federation(partial(PFLSSL, objective=SimCLR, lr=0.1, epochs=1), tiny_encoder, metrics=["f1"])
    with pytest.warns(UserWarning, match="PFLSSL is evaluated by nearest neighbors"):
        quiet_trainer(1, FederatedLoop()).validate(federation, datamodule=data, verbose=False)


def test_a_comparison_by_another_metric(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, rounds in (("one", 1), ("two", 3)):
        fitted(tmp_path / name, rounds=rounds)
    means = [
        json.loads((tmp_path / name / "results.json").read_text())["metrics"]["calibration_error"]
        for name in ("one", "two")
    ]
    words = [str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(tmp_path / "out"), "--format", "md"]
    compare([*words, "--labels", "A", "B", "--metric", "calibration_error"])
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "test calibration error" in text
    lowest = min(100 * one["last"]["test"]["mean"] for one in means)
    assert f"**{lowest:.2f}**" in text
    with pytest.raises(
        ConfigurationError, match=r"no metric 'precision'.*it has accuracy, f1, auroc.*--metrics precision"
    ):
        compare([*words, "--metric", "precision"])


def test_rounds_to_a_target_that_a_metric_falls_to():
    history = [HistoryEntry(1, test=0.4), HistoryEntry(2, test=0.1), HistoryEntry(3, test=0.05)]
    assert reach(history, 0.1, lower_is_better=True)["rounds"] == 2
    assert reach(history, 0.01, lower_is_better=True)["rounds"] == math.inf


def test_metrics_are_given_once_and_make_no_other_run(tmp_path, capsys):
    words = ["fit", "--config", digits_config(tmp_path, {"model.metrics": ["f1"]}), "--metrics", "auroc"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    assert "metrics is ['auroc'], model.metrics is ['f1']: give one of them" in capsys.readouterr().err
    one, other = ({"model": {"method": "FedAvg", "metrics": metrics}} for metrics in ([], ["f1"]))
    assert run_options(one, "FedAvg", {}, 1) == run_options(other, "FedAvg", {}, 1)
    assert Change("model.metrics", [], ["f1"]).of_execution


def test_server_optimizers_make_other_rows(tmp_path):
    """In a config, and in Python alone."""
    one, other = (
        {"model": {"method": "FedAvg", "server_optimizer": given}} for given in (None, {"class_path": "FedAdam"})
    )
    assert run_options(one, "FedAvg", {}, 1) != run_options(other, "FedAvg", {}, 1)
    for name, options in (("plain", {}), ("adam", {"server_optimizer": partial(FedAdam, lr=0.02)})):
        federation = Federation(partial(FedAvg, lr=0.1, epochs=1), tiny_encoder, seed=1, **options)
        quiet_trainer(1, FederatedLoop(), ResultsWriter(str(tmp_path / name))).fit(federation, datamodule=Toy())
    rows = group_runs([read_run(tmp_path / name) for name in ("plain", "adam")])
    assert [len(row.runs) for row in rows] == [1, 1]
    assert "server_optimizer" in rows[1].label
