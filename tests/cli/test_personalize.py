"""``pfl personalize`` and ``pfl fit --personalize``: what they print, write and refuse."""

import csv
import json
import math
from dataclasses import replace

import pytest
import yaml
from _helpers.results import valid
from _helpers.toy import run

from pfl_lightning.cli import main
from pfl_lightning.cli.tables import write_personalization
from pfl_lightning.errors import CheckpointError, UsageError
from pfl_lightning.methods import FedAvg
from pfl_lightning.phases import Personalization


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")
    data = {
        "novel_clients": 2,
        "partition": {
            "class_path": "pfl_lightning.datamodules.IID",
            "init_args": {"num_clients": 5, "samples_per_client": 30},
        },
    }
    content = {
        "run_dir": str(tmp_path / "runs"),
        "model": {
            "method": {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {"epochs": 1}},
            "encoder": "mlp",
        },
        "data": {"class_path": "pfl_lightning.datamodules.Digits", "init_args": data},
        "trainer": {"max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def results(tmp_path):
    folder = tmp_path / "runs" / "version_0"
    with (folder / "personalized.csv").open() as file:
        return valid(folder / "personalized.json"), list(csv.DictReader(file))


def test_fit_goes_on_with_the_stage_and_personalize_repeats_it(tmp_path, config, capsys):
    main(["fit", "--config", str(config), "--personalize.epochs", "3"])
    assert "personalized (linear, 3 epochs)" in capsys.readouterr().out
    found, rows = results(tmp_path)
    assert (found["participating"]["num_clients"], found["novel"]["num_clients"]) == (3, 2)
    assert found["personalization"]["epochs"] == 3
    accuracies = [float(row["test_accuracy"]) for row in rows if row["novel"] == "0"]
    assert found["participating"]["mean"] == pytest.approx(sum(accuracies) / 3)
    variance = sum((value - sum(accuracies) / 3) ** 2 for value in accuracies) / 3
    assert found["participating"]["variance"] == pytest.approx(variance)
    trained = json.loads((tmp_path / "runs" / "version_0" / "results.json").read_text())
    for key in ("format", "method", "method_arguments", "data", "partition", "versions", "seed"):
        assert found[key] == trained[key], key
    main(["personalize", "--config", str(config), "--ckpt_path", "last", "--personalize.epochs", "3"])
    assert results(tmp_path) == (found, rows)


def test_fit_alone_and_the_stage_alone(tmp_path, config):
    main(["fit", "--config", str(config)])
    assert not (tmp_path / "runs" / "version_0" / "personalized.json").exists()
    main(["personalize", "--config", str(config), "--ckpt_path", "last"])
    assert results(tmp_path)[0]["personalization"] == {
        "train": "linear",
        "epochs": 10,
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "batch_size": 32,
        "augment": False,
    }


def test_results_of_another_personalization_are_kept(tmp_path, config, capsys):
    folder = tmp_path / "runs" / "version_0"
    main(["fit", "--config", str(config)])
    last = ["personalize", "--config", str(config), "--ckpt_path", "last", "--personalize.epochs"]
    main([*last, "2"])
    first, rows = results(tmp_path)
    main([*last, "2"])
    assert not list(folder.glob("personalized-*"))
    assert "are kept" not in capsys.readouterr().out
    for number, epochs in enumerate((1, 2), start=1):
        main([*last, str(epochs)])
        assert f"are kept: {folder / f'personalized-{number}.json'}" in capsys.readouterr().out
    assert results(tmp_path) == (first, rows)
    assert json.loads((folder / "personalized-1.json").read_text()) == first
    with (folder / "personalized-1.csv").open() as file:
        assert list(csv.DictReader(file)) == rows
    assert json.loads((folder / "personalized-2.json").read_text())["personalization"]["epochs"] == 1
    (folder / "personalized.json").write_text("{")
    main([*last, "2"])
    assert (folder / "personalized-3.json").read_text() == "{"


def test_nothing_writes_what_the_method_gives(tmp_path, config, capsys):
    """Beside rows that adapt something, with what was evaluated."""
    main(["fit", "--config", str(config), "--personalize.train", "nothing"])
    assert "FedAvg, as trained: test accuracy, in %" in capsys.readouterr().out
    found, rows = results(tmp_path)
    assert found["evaluated"] == {"score": "classifier", "model": "aggregated"}
    assert [row["personalized"] for row in rows] == ["0"] * 5
    main(["test", "--config", str(config), "--ckpt_path", "last"])
    with (tmp_path / "runs" / "version_0" / "test_clients.csv").open() as file:
        tested = [row["test_accuracy"] for row in csv.DictReader(file)]
    assert [row["test_accuracy"] for row in rows] == tested


def test_untrained_models_are_adapted_only_where_that_is_asked_for(tmp_path, config):
    """Each client alone, for as many epochs as the stage has: the baseline Script-Fair."""
    with pytest.raises(UsageError, match="needs --ckpt_path, the trained model that clients adapt: last, best or a f"):
        main(["personalize", "--config", str(config), "--personalize.train", "all"])
    none = ["fit", "--config", str(config), "--trainer.max_epochs", "0"]
    with pytest.raises(UsageError, match=r"--trainer.max_epochs is 0: nothing would be trained; .* pfl fit"):
        main(none)
    for more in ([*none, "--personalize", "null"], [*none[:3], "--trainer.limit_train_batches", "0"]):
        with pytest.raises(UsageError, match="nothing would be trained"):
            main(more)
    assert not (tmp_path / "runs").exists()
    main([*none, "--personalize.train", "all"])
    found, rows = results(tmp_path)
    assert (found["participating"]["num_clients"], found["round"]) == (3, 0)
    assert [row["rounds_trained"] for row in rows] == ["0"] * 5


def test_without_novel_clients_there_are_only_participating_ones(tmp_path, config, capsys):
    main(["fit", "--config", str(config), "--data.init_args.novel_clients", "0", "--personalize.epochs", "1"])
    table = capsys.readouterr().out.split("personalized (linear, 1 epoch)")[1]
    assert "│ 5 participating │" in table
    assert " novel │" not in table
    found, rows = results(tmp_path)
    assert found["participating"]["num_clients"] == 5
    assert "novel" not in found
    assert [row["novel"] for row in rows] == ["0"] * 5


def test_a_checkpoint_of_something_else_is_refused(tmp_path, config):
    main(["fit", "--config", str(config)])
    last = ["personalize", "--config", str(config), "--ckpt_path", "last"]
    with pytest.raises(CheckpointError, match="of another method, FedAvg; this run has FedPer"):
        main([*last, "--model.method", "pfl_lightning.methods.FedPer"])
    with pytest.raises(CheckpointError, match="another encoder"):
        main([*last, "--model.encoder", "small_cnn"])
    with pytest.raises(CheckpointError, match="another partition"):
        main([*last, "--data.init_args.novel_clients", "1"])
    assert not (tmp_path / "runs" / "version_0" / "personalized.json").exists()


def test_too_many_novel_clients_are_refused(config):
    with pytest.raises(ValueError, match="novel_clients is 5: all of the 5 clients would be novel"):
        main(["fit", "--config", str(config), "--data.init_args.novel_clients", "5"])


def test_clients_whose_personalization_fails_are_named(tmp_path, config):
    main(["fit", "--config", str(config)])
    last = ["personalize", "--config", str(config), "--ckpt_path", "last"]
    main(last)
    assert results(tmp_path)[0]["not_personalized"] == []
    with pytest.warns(UserWarning, match="evaluated without fine-tuning: client"):
        main([*last, "--personalize.train", "all", "--personalize.lr", "1e6", "--personalize.batch_size", "5"])
    found, rows = results(tmp_path)
    assert found["not_personalized"]
    assert [int(row["client"]) for row in rows if row["personalized"] == "0"] == found["not_personalized"]


def test_each_client_alone_from_the_same_start(tmp_path, config):
    """Script-Fair and Script-Convergent: a fit of no rounds, then the stage, for both kinds of clients."""
    more = ["--config", str(config), "--model.method", "pfl_lightning.methods.LocalOnly", "--personalize.train", "all"]
    main(["fit", *more, "--personalize.epochs", "3", "--trainer.max_epochs", "0"])
    found, rows = results(tmp_path)
    assert (found["participating"]["num_clients"], found["novel"]["num_clients"]) == (3, 2)
    losses = {row["client"]: float(row["test_loss"]) for row in rows}
    main(["fit", *more, "--personalize.epochs", "30", "--trainer.max_epochs", "0", "--run_dir", str(tmp_path / "long")])
    with (tmp_path / "long" / "version_0" / "personalized.csv").open() as file:
        longer = {row["client"]: float(row["test_loss"]) for row in csv.DictReader(file)}
    assert all(longer[client] < losses[client] for client in losses)


def test_a_config_with_the_stage_can_be_told_to_train_alone(tmp_path, config):
    content = yaml.safe_load(config.read_text()) | {"personalize": {"train": "head", "epochs": 2}}
    config.write_text(yaml.safe_dump(content))
    main(["fit", "--config", str(config), "--personalize", "null"])
    assert not (tmp_path / "runs" / "version_0" / "personalized.json").exists()
    main(["personalize", "--config", str(config), "--ckpt_path", "last"])
    found = results(tmp_path)[0]
    assert (found["personalization"]["train"], found["personalization"]["epochs"]) == ("head", 2)
    main(["fit", "--config", str(config), "--run_dir", str(tmp_path / "both")])
    both = valid(tmp_path / "both" / "version_0" / "personalized.json")
    assert both == found


def test_what_is_not_known_is_null_and_empty(tmp_path):
    federation = run(FedAvg, 1)
    scores = federation.test_scores
    scores.update({client: replace(score, accuracy=math.nan, loss=math.nan) for client, score in scores.items()})
    write_personalization(federation, Personalization(), tmp_path, 1)
    content = valid(tmp_path / "personalized.json")
    assert content["participating"]["mean"] is None
    with (tmp_path / "personalized.csv").open() as file:
        assert {(row["test_accuracy"], row["test_loss"]) for row in csv.DictReader(file)} == {("", "")}
