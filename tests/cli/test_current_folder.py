"""Modules of the current folder can be named in configs, though `pfl` lies elsewhere."""

import sys

import pytest
from _helpers.configs import digits_config

from pfl_lightning.cli import main

MODULE = """
from pfl_lightning.methods import FedAvg

class Mine(FedAvg):
    pass
"""


@pytest.mark.parametrize(
    ("command", "module", "said"),
    [("fit", "method_of_this_folder", "Mine: test accuracy"), ("partition", "other_method_of_this_folder", "clients")],
)
def test_a_module_in_the_current_folder(tmp_path, monkeypatch, capsys, command, module, said):
    config = digits_config(tmp_path, {"model.method.class_path": f"{module}.Mine"})
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    main([command, "--config", config])
    assert said in capsys.readouterr().out
    assert sys.path[-1] == str(tmp_path)  # what is installed comes first


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [("--model.method", "Mind", "Mine"), ("--model.encoder", "MyEncoderr", "MyEncoder")],
)
def test_a_misspelt_name_in_a_module_of_the_current_folder(tmp_path, monkeypatch, capsys, option, typed, meant):
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    (tmp_path / "of_this_folder.py").write_text(
        f"from torch import nn\n{MODULE}\nclass MyEncoder(nn.Module):\n    pass"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", digits_config(tmp_path, {}), option, f"of_this_folder.{typed}"])
    said = stopped.value.code if isinstance(stopped.value.code, str) else capsys.readouterr().err
    assert "did you mean" in said
    assert f"{meant}'?" in said
