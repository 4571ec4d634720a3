"""The worked examples of CONTRIBUTING.md run as they stand there."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from pfl_lightning.cli import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|yaml)\n(.*?)^```$", re.S | re.M)


@pytest.fixture(scope="module")
def blocks():
    """Code blocks of the page: MimeLite, its config and its test; FedADMM and its test."""
    found = [code for _, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())]
    assert len(found) == 5
    return found


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import code as a module of the given name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def imported(name, code):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(code.replace("pfl_lightning.methods.mimelite", "example_mimelite"))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    for name in [name for name in sys.modules if name.startswith("example_")]:
        del sys.modules[name]


def run_tests(module):
    """Run every test of a module; return their names."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    for test in tests.values():
        test()
    return list(tests)


def test_the_method_passes_its_tests(blocks, load):
    load("example_mimelite", blocks[0])
    example = load("example_mimelite_test", blocks[2])
    assert run_tests(example) == ["test_rounds_equal_the_restatement", "test_engines_agree"]


def test_the_test_would_notice_a_wrong_server(blocks, load):
    right = "(1 - self.beta) * mean[n]"
    assert blocks[0].count(right) == 1
    load("example_mimelite", blocks[0].replace(right, "mean[n]"))
    example = load("example_mimelite_test", blocks[2])
    with pytest.raises(AssertionError):
        example.test_rounds_equal_the_restatement()


def test_the_config_runs(blocks, load, tmp_path, monkeypatch):
    load("example_mimelite", blocks[0])
    config = tmp_path / "mimelite_digits.yaml"
    config.write_text(blocks[1].replace("pfl_lightning.methods.MimeLite", "example_mimelite.MimeLite"))
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.max_epochs", "1", "--model.method.init_args.epochs", "1", "--trainer.accelerator", "cpu"]
    main(["fit", "--config", str(config), *short])
    assert (tmp_path / "runs" / "mimelite_digits" / "version_0" / "results.json").is_file()


def test_state_of_a_client(blocks, load):
    method = load("example_fedadmm", blocks[3])
    example = load("example_fedadmm_test", blocks[4])
    example.FedADMM = method.FedADMM
    assert run_tests(example) == ["test_x_is_the_mean_over_all_clients"]


def test_the_server_of_the_example_is_saved(blocks, load):
    """Its state and nothing else of it is in a checkpoint."""
    method = load("example_mimelite", blocks[0])
    encoder = torch.nn.Linear(3, 2)
    encoder.out_features = 2
    server = method.MimeLite(encoder, 4).configure_aggregator(5)
    names = {name.partition(".")[0] for name in server.state_dict()}
    assert names == {"weights", "momentum"}
