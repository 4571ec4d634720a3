"""`pfl` itself: what it prints before any subcommand is imported, and how quickly it could: without torch."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest
import yaml

import pfl_lightning
from pfl_lightning.cli import federated_cli, main
from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS
from pfl_lightning.cli.federated_cli import FederatedCLI, ParsedCLI, prepare

PROGRAM = """
import sys
from pfl_lightning.cli import main
try:
    main({words})
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print(sorted({{"torch", "lightning", "torchvision", "sklearn"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words",
    [
        *("--help", "--version", "fit --help", "compare --help", "methods --help"),
        *("study --help", "reproduce"),
    ],
)
def test_help_imports_no_torch(tmp_path, words):
    command = [sys.executable, "-c", PROGRAM.format(words=words.split())]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"
    assert len(found.stdout.splitlines()) > 1  # it said something


WAITING = """
import os, sys

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
from pfl_lightning.cli import main
main(["fit", "--config", "any.yaml"])
"""


@pytest.mark.parametrize(("given", "policy"), [({}, "passive"), ({"GOMP_SPINCOUNT": "9"}, None)])
def test_threads_sleep_while_they_wait_unless_the_user_says_how(tmp_path, given, policy):
    """That is settled when torch is imported."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", WAITING]
    (tmp_path / "any.yaml").write_text("seed_everything: 0")
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert found.stdout == f"{policy}\n", found.stderr


def test_help_lists_every_subcommand(capsys):
    main(["--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == [*TRAINER_COMMANDS, *OTHER_COMMANDS]
    assert all(len(text) > 10 for _, text in lines)


def test_the_trainers_subcommands_are_listed():
    assert set(TRAINER_COMMANDS) == set(FederatedCLI.subcommands())


@pytest.mark.parametrize(("typed", "built"), [("validate", 1), ("no_subcommand", len(TRAINER_COMMANDS))])
def test_the_options_of_the_typed_subcommand_alone_are_built(monkeypatch, typed, built):
    """Each takes a fifth of a second."""
    calls = []
    add = FederatedCLI.add_arguments_to_parser
    monkeypatch.setattr(FederatedCLI, "add_arguments_to_parser", lambda *args: calls.append(1) or add(*args))
    with pytest.raises(SystemExit, match="2"):
        FederatedCLI([typed, "--no_option", "1"])
    assert len(calls) == built


def test_a_parser_that_was_prepared_reads_as_a_new_one(monkeypatch, tmp_path):
    """Of other classes than those of the config that it was prepared with."""
    monkeypatch.setattr(federated_cli, "PREPARED", {})
    monkeypatch.setattr(sys, "argv", ["pfl"])
    config = {
        "seed_everything": 3,
        "model": {"encoder": "mlp", "method": {"class_path": "FedPAC", "init_args": {"lr": 0.5}}},
        "data": {"class_path": "Digits", "init_args": {"partition": {"class_path": "DirichletOverClients"}}},
    }
    config["data"]["init_args"]["partition"]["init_args"] = {"num_clients": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    argv = ["fit", "--config", str(tmp_path / "run.yaml"), "--trainer.max_epochs=2"]
    new = ParsedCLI(argv)
    federated_cli.PREPARED.clear()
    prepare()
    prepared = federated_cli.PREPARED["fit"]["parser"]
    found = ParsedCLI(argv)
    assert found.parser is prepared is not new.parser
    texts = [cli.parser.dump(cli.config, skip_unset=False) for cli in (new, found)]
    assert texts[0] == texts[1]
    assert "FedPAC" in texts[0]


@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_every_other_subcommand_has_help(name, capsys):
    with suppress(SystemExit):  # argparse exits
        main([name, "--help"])
    assert "usage: pfl " in capsys.readouterr().out


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"pfl_lightning {pfl_lightning.__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("ft", "fit"), ("compar", "compare"), ("method", "methods")])
def test_a_misspelt_subcommand(capsys, typed, meant):
    with pytest.raises(SystemExit, match="2"):
        main([typed, "--config", "x.yaml"])
    assert capsys.readouterr().err.startswith(f"pfl: there is no subcommand {typed!r}\ndid you mean {meant!r}?\n")


@pytest.mark.parametrize("words", [["--rounds", "3"], ["--config", "x.yaml", "--trainer.max_epochs=3"]])
def test_options_without_a_subcommand(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"options follow a subcommand\ndid you mean pfl fit {' '.join(words)}\n" in capsys.readouterr().err


def test_a_word_like_no_subcommand(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["xyzzy"])
    assert "known: fit, validate, " in capsys.readouterr().err


def test_a_new_process_knows_every_class_by_its_name():
    """The parser knows those that are imported; in this process all are."""
    program = "import sys, pfl_lightning.cli.federated_cli; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {f"pfl_lightning.{name}" for name in ("datamodules", "engines", "methods", "self_supervised")} <= {*found}
