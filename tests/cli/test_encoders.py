"""Encoders on the command line: lists, deals, what a run writes back, and what is said of mistakes."""

import re
import sys

import pytest
import yaml

from pfl_lightning.cli import main

MLP_64 = {"class_path": "pfl_lightning.encoders.MLP", "init_args": {"hidden": [8], "out_features": 64}}
CHOICES = {
    "a name": "mlp",
    "a class": MLP_64,
    "a projector behind a name": {
        "class_path": "pfl_lightning.encoders.WithProjector",
        "init_args": {"encoder": "small_cnn", "hidden": 16},
    },
    "a projector behind a class": {
        "class_path": "pfl_lightning.encoders.WithProjector",
        "init_args": {"encoder": MLP_64},
    },
    "a list of names": ["small_cnn", "mlp"],
    "a list of names and classes": ["small_cnn", MLP_64],
    "by share": {
        "class_path": "pfl_lightning.encoders.ByShare",
        "init_args": {"encoders": ["small_cnn", MLP_64], "shares": [0.25, 0.75]},
    },
    "by client": {
        "class_path": "pfl_lightning.encoders.ByClient",
        "init_args": {"encoders": ["small_cnn", "mlp"], "clients": [0, "mlp", 1, "small_cnn"]},
    },
}


def config(tmp_path, encoder, method="FedProto", **options):
    content = {
        "run_dir": str(tmp_path / "runs"),
        "model": {
            "method": {"class_path": f"pfl_lightning.methods.{method}", "init_args": {"epochs": 1, **options}},
            "encoder": encoder,
        },
        "data": {
            "class_path": "pfl_lightning.datamodules.Digits",
            "init_args": {
                "batch_size": 10,
                "partition": {
                    "class_path": "pfl_lightning.datamodules.IID",
                    "init_args": {"num_clients": 4, "samples_per_client": 30},
                },
            },
        },
        "trainer": {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(autouse=True)
def _loud(monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")


@pytest.mark.parametrize("encoder", CHOICES.values(), ids=CHOICES)
def test_a_run_can_be_repeated_from_the_config_that_it_saved(tmp_path, encoder):
    main(["fit", "--config", config(tmp_path, encoder)])
    saved = tmp_path / "runs" / "version_0" / "config.yaml"
    assert "Unable" not in saved.read_text()
    main(["fit", "--config", str(saved)])
    results = [(tmp_path / "runs" / f"version_{k}" / "clients.csv").read_text() for k in (0, 1)]
    assert results[0] == results[1]


def test_a_methods_own_optimizer_by_class_path(tmp_path):
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    with pytest.warns(UserWarning, match="compares 2 augmented views of each sample, and the data module augments"):
        main(["fit", "--config", config(tmp_path, "mlp", method="FedClassAvg", optimizer=sgd)])
    assert "torch.optim.SGD" in (tmp_path / "runs" / "version_0" / "config.yaml").read_text()


def test_the_start_of_a_run_shows_the_architectures(tmp_path, capsys):
    main(["fit", "--config", config(tmp_path, CHOICES["by share"])])
    shown = capsys.readouterr().out
    assert "FedProto: 4 clients" in shown
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if "small_cnn" in line or "MLP" in line]
    assert [(row[0], row[-1]) for row in rows] == [("small_cnn", "1"), ("MLP", "3")]
    main(["fit", "--config", config(tmp_path, "mlp"), "--trainer.enable_model_summary", "false"])
    assert "FedProto: 4 clients" not in capsys.readouterr().out


def test_pfl_methods(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main(["methods"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("DualFed", "encoder, global_head", "googlenet", "6,124,704"))
    main(["partition", "--config", config(tmp_path, CHOICES["by client"]), "--run_dir", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "small_cnn" in line or "mlp" in line]
    assert [row.replace("│", " ").split()[-1] for row in rows] == ["2", "2"]


MISTAKES = {
    "an unknown name": (["small_cnn", "mpl"], "unknown encoder 'mpl'; did you mean 'mlp'"),
    "an empty list": ([], "needs a list of encoders"),
    "a list as text": ("small_cnn, mlp", "a list of encoders is written as"),
    "what makes no encoder": (
        ["torch.nn.functional.relu", "mlp"],
        "relu' is not an encoder: expected a subclass of torch.nn.Module",
    ),
    "shares that do not sum to one": (
        {**CHOICES["by share"], "init_args": {"encoders": ["small_cnn", "mlp"], "shares": [0.5, 0.6]}},
        "with the sum 1",
    ),
    "features of two widths": (
        ["small_cnn", {**MLP_64, "init_args": {"out_features": 32}}],
        "is 64 in small_cnn and 32 in MLP",
    ),
}


@pytest.mark.parametrize(("encoder", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, encoder, message):
    monkeypatch.delenv("PFL_DEBUG")
    monkeypatch.setattr(sys, "argv", ["pfl"])
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", config(tmp_path, encoder)])
    said = f"{stopped.value} {capsys.readouterr().err}"
    assert re.search(message, said.replace("\n", " ")), said
    assert "Traceback" not in said
