"""`pfl fit --help`: two screens, of options that there are; --help all has the others."""

import re

import pytest
from jsonargparse import ArgumentParser

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import TRAINER_COMMANDS, short_help
from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.cli.messages import OF_CLASSES, OTHER_NAMES
from pfl_lightning.cli.parser import all_options
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.methods import FedPAC
from pfl_lightning.phases import Personalization

OF_NAMED_CLASSES = {*OF_CLASSES, "data.partition.help", "model.engine.workers", "personalize.train", "print_config"}
"""Options of classes that are named, which the parser knows once they are."""


@pytest.fixture(scope="module")
def options():
    """Options of each subcommand."""
    parsers = {}

    def keep(self, args):
        action = next(action for action in self.parser._actions if isinstance(action.choices, dict))
        parsers.update(action.choices)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "parse_arguments", lambda self, parser, args: keep(self, args))
        with pytest.raises(SystemExit):
            FederatedCLI(args=["--run_dir", "runs"])  # no subcommand is typed: all are built
    return {name: {*all_options(parser)} for name, parser in parsers.items()}


@pytest.mark.parametrize("command", TRAINER_COMMANDS)
def test_every_option_exists(options, command):
    written = {option.rstrip(".+") for option in re.findall(r"--([a-z_.]+)", short_help(command))}
    assert len(written) > 20
    assert written - options[command] - OF_NAMED_CLASSES == {"help"} - options[command]


@pytest.mark.parametrize("command", TRAINER_COMMANDS)
def test_two_screens_of_80_columns_and_40_lines(command):
    lines = short_help(command).splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 80


def test_options_of_classes_exist(options):
    parser = ArgumentParser()
    of_data = ((Digits, "data"), (IID, "data.partition"))
    for cls, name in ((FedPAC, "model.method"), *of_data, (Personalization, "personalize")):
        parser.add_class_arguments(cls, name, fail_untyped=False, skip={"partition"} if cls is Digits else set())
    known = {*all_options(parser), "data.partition", "data.root"}
    assert {*OF_CLASSES} <= known
    assert {*OTHER_NAMES.values()} <= known | options["fit"]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "x.yaml", "--help"], ["--help", "--config", "x"]])
def test_help_is_short(capsys, words):
    main(["fit", *words])
    assert capsys.readouterr().out == f"{short_help('fit')}\n"


@pytest.mark.parametrize("words", [["--help", "loop"], ["--help=loop"]])
def test_help_on_a_group(capsys, words):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words])
    said = capsys.readouterr().out
    assert "--loop.cohort COHORT" in said
    assert "--trainer" not in said


def test_help_on_no_group(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "lop"])
    assert "try --help loop" in capsys.readouterr().out


def test_help_on_all(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "all"])
    said = capsys.readouterr().out
    assert said.startswith("usage: pfl ")
    assert "--trainer.max_epochs" in said
    assert "--loop.cohort" in said


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--model.method.help", "FedPAC"], "--model.method.alignment"),
        (["--data.help", "Digits"], "--data.batch_size"),
        (["--data", "Digits", "--data.partition.help", "IID"], "--partition.num_clients"),
        (["--model.engine.help", "RayEngine"], "--model.engine.workers"),
        (["--model.encoder.help", "FedPACCNN"], "--model.encoder.paddings"),
        (["--trainer.callbacks.help", "EarlyStopping"], "--trainer.callbacks.patience"),
        (["--personalize.help"], "--personalize.epochs"),
        (["--inspect.help"], "--inspect."),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_help_on_a_class(capsys, words, option):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words])
    assert option in capsys.readouterr().out
