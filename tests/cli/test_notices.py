"""A command that is refused says why, before Lightning says anything of the machine."""

import logging

import pytest
from _helpers.configs import digits_config
from lightning_utilities.core import rank_zero

from pfl_lightning.cli import main

NOTICES = ("GPU available", "TPU available", "Seed set to")


@pytest.fixture(autouse=True)
def _plain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    digits_config(tmp_path, {"trainer.enable_model_summary": False})


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--data.init_args.partition.init_args.num_clients 5000", None, "clients need"),
        ("--model.encoder pfl_lightning.encoders.FedProtoCNN", None, ""),
        ("--trainer.devices 2", 2, "one process; the Trainer has 2"),
        ("--trainer.devices 3 --trainer.strategy ddp_spawn", 2, "one process; the Trainer has 3"),
        ("--trainer.strategy ddp", 2, "DDPStrategy is for several"),
        ("--loop.min_clients 9", None, "min_clients is 9, but a round has 3 clients"),
        ("--trainer.callbacks LearningRateFinder", None, "LearningRateFinder needs a plain training run"),
    ],
)
def test_a_refusal_comes_alone(capsys, caplog, words, code, said):
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "config.yaml", *words.split()])
    assert code in (None, ended.value.code)
    assert said in capsys.readouterr().err + str(ended.value.code)
    assert not any(notice in record.getMessage() for record in caplog.records for notice in NOTICES)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning", "lightning_fabric"])
def test_a_refusal_comes_alone_whichever_name_of_lightning_a_project_imports(caplog, monkeypatch, package):
    """All of them log by one logger: that of the last import."""
    monkeypatch.setattr(rank_zero, "log", logging.getLogger(f"{package}.utilities.rank_zero"))
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        main(["fit", "--config", "config.yaml", "--loop.min_clients", "9"])
    assert not [record.getMessage() for record in caplog.records if record.name.startswith(package)]


@pytest.mark.parametrize("command", ["fit", "test", "partition"])
def test_a_command_that_runs_has_them_once(caplog, command):
    with caplog.at_level(logging.INFO):
        main([command, "--config", "config.yaml"])
        main([command, "--config", "config.yaml"])
    said = [record.getMessage() for record in caplog.records]
    for notice in NOTICES:
        assert sum(notice in message for message in said) == 2
