"""Modules of the current folder can be named in configs, though `pfl` lies elsewhere."""

import sys

from _helpers.configs import digits_config

from pfl_lightning.cli import main

MODULE = """
from pfl_lightning.methods import FedAvg

class Mine(FedAvg):
    pass
"""


def test_a_module_in_the_current_folder(tmp_path, monkeypatch, capsys):
    config = digits_config(tmp_path, {"model.method.class_path": "method_of_this_folder.Mine"})
    (tmp_path / "method_of_this_folder.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    main(["fit", "--config", config])
    assert "Mine: test accuracy" in capsys.readouterr().out
    assert sys.path[-1] == str(tmp_path)  # what is installed comes first


def test_a_subcommand_without_a_trainer_imports_from_it_too(tmp_path, monkeypatch, capsys):
    config = digits_config(tmp_path, {"model.method.class_path": "other_method_of_this_folder.Mine"})
    (tmp_path / "other_method_of_this_folder.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    main(["methods", "--config", config])
    assert "clients" in capsys.readouterr().out
