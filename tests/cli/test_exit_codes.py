"""What is mistaken in a command line is told in a sentence, and the exit code is 2; what fails exits with 1."""

import sys

import pytest
from _helpers.configs import digits_config

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS

MISTAKES = {
    "--data.help": "options follow a subcommand",
    "--model.method.help FedPAC": "options follow a subcommand",
    "--trainer.max_epochs 3": "options follow a subcommand",
    "fit --model.encoder.help small_cnn": "--model.encoder.help: Expected a dot import path string: small_cnn",
    "compare runs --target-accuracy much": "argument --target-accuracy: must be above 0 and at most 1 (0.8 is 80 %)",
    "compare runs --choice newest": "argument --choice: invalid choice: 'newest'",
    "compare": "the following arguments are required: RUN",
    "methods --gpus": "unrecognized arguments: --gpus (pfl methods --help lists the options)",
    "fit": "the following arguments are required: model.method, model.encoder, data",
    "fit --config missing.yaml": "pfl: --config: there is no file missing.yaml",
    "fit --config config.yaml --data=my_modul.Data": "data: No module named 'my_modul'",
    "methods FedPAK": "there is no method FedPAK; did you mean 'FedPAC'?",
    "study --processes many": "argument --processes: must be a whole number of at least 1, got many",
    "study --processes 0": "argument --processes: must be a whole number of at least 1, got 0",
    "study --seeds": "argument --seeds: expected one argument",
    "study --processes 1": "pfl study needs a study file",
    "study missing.yaml": "missing.yaml cannot be read as YAML: No such file",
    "study empty.yaml": "empty.yaml: expected a mapping, got",
    "reproduce nothing_of_this_name": "no study 'nothing_of_this_name' ships",
    "reproduce digits --scale huge": "has no scale 'huge'",
    "reproduce digits --methods FedPAK": "--methods: the study has no 'FedPAK'",
    "reproduce digits --trainer.max_epochs": "--trainer.max_epochs has no value",
    "fit --config config.yaml --model.method.init_args.lr=-1": "lr must be a finite number of at least 0, got -1.0",
    "fit --config config.yaml --model.method=FedKD --model.method.energy_end=1.2": "energy_end must be between 0 and 1",
    "fit --config config.yaml --model.encoder=nothing": "nothing",
    "fit --config config.yaml --loop.cohort=0": "cohort must be ",
    "fit --config config.yaml --seed_everything=-3": "--seed_everything: -3 is not in bounds",
    "fit --config config.yaml --trainer.check_val_every_n_epoch=0": "check_val_every_n_epoch=0) means something else",
    "fit --config config.yaml --trainer.limit_train_batches=0": "--trainer.limit_train_batches is 0: nothing would be",
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    (tmp_path / "empty.yaml").write_text("")
    digits_config(tmp_path, {})


def refused(capsys, words):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    said = capsys.readouterr().err
    said = said[said.index("pfl: ") :]  # before it Lightning's log may speak, of the seed
    assert "usage" not in said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("command", [*TRAINER_COMMANDS, *OTHER_COMMANDS])
def test_an_option_that_no_command_has(capsys, command):
    assert len(refused(capsys, [command, "--no_such_option", "1"]).splitlines()) <= 3


@pytest.mark.parametrize(("words", "said"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake(capsys, words, said):
    assert said in refused(capsys, words.split()).splitlines()[0]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_no_mistake(monkeypatch, tmp_path, name):
    """As after ``pfl fit ... >&-``."""
    monkeypatch.setattr(sys, name, None)
    main(["fit", "--config", digits_config(tmp_path, {"trainer.fast_dev_run": True})])
    stream = getattr(sys, name)
    assert stream.writable()  # somewhere
    stream.close()


def test_what_cannot_be_done():
    with pytest.raises(SystemExit, match=r"^pfl: .*missing"):  # Python prints it and exits with 1
        main(["compare", "missing"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("fit", "give a config: --config FILE"),
        ("fit --config config.yaml --data=my_modul.Data", "modules are found in the folder where pfl runs, and among"),
    ],
)
def test_what_to_do_stands_below(capsys, words, hint):
    assert refused(capsys, words.split()).splitlines()[1].startswith(hint)


@pytest.mark.parametrize(
    "words",
    [
        "fit --config config.yaml --run_dir empty.yaml/run",
        "fit --config config.yaml --run_dir empty.yaml",
        "partition --config config.yaml --output empty.yaml/folder",
    ],
)
def test_a_folder_that_cannot_be_made(words):
    with pytest.raises(SystemExit, match=r"^pfl: \[Errno \d+\] (Not a directory|File exists): '?empty\.yaml"):
        main(words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trainer.callbacks EarlyStopping --trainer.callbacks.monitor nothing", "metric `nothing` which is not"),
        ("--model.method.lr_scheduler StepLR --model.method.lr_scheduler.step_size 0", "integer modulo by zero"),
    ],
)
def test_what_lightning_and_schedulers_say_of_their_arguments_is_a_sentence(words, said):
    with pytest.raises(SystemExit, match=rf"^pfl: .*{said}"):
        main(["fit", "--config", "config.yaml", *words.split()])


def test_choices_are_those_of_the_argument_that_is_missing(capsys):
    assert "known partitions: ClassesPerClient, " in refused(capsys, ["fit", "--data", "Digits"]).splitlines()[1]


DATA = {
    "no folder": ("ImageFolder", {"root": "nowhere"}, "no image folder at"),
    "no classes in a folder": ("ImageFolder", {"root": "."}, "no "),
    "no domains": ("DomainFolders", {"root": "nowhere"}, "no domain folders"),
    "no partition file": (
        "Digits",
        {"partition": {"class_path": "FromFile", "init_args": {"path": "no.npz"}}},
        "no.npz",
    ),
    "more clients than samples": (
        "Digits",
        {"partition": {"class_path": "IID", "init_args": {"num_clients": 9999}}},
        "9999 clients need 9999 samples",
    ),
    "batches that never fill": ("Digits", {"drop_last": True, "batch_size": 1700}, "drop_last leaves client"),
    "no public folder": ("Digits", {"public": "nowhere"}, "no public images"),
    "an option out of range": ("Digits", {"test_share": 2.0}, "test_share must be "),
}


@pytest.mark.parametrize(("kind", "options", "said"), DATA.values(), ids=DATA)
def test_mistaken_data_are_mistakes_of_the_config(capsys, tmp_path, kind, options, said):
    partition = {"class_path": "IID", "init_args": {"num_clients": 2}}
    digits_config(tmp_path, {"data": {"class_path": kind, "init_args": {"partition": partition, **options}}})
    assert said in refused(capsys, ["fit", "--config", "config.yaml"])


def test_a_config_beside_the_named_one_is_meant(tmp_path, capsys):
    (tmp_path / "fedpac.yaml").write_text("{}")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "--config", str(tmp_path / "fedpack.yaml")])
    assert "fedpack.yaml; did you mean 'fedpac.yaml'?" in capsys.readouterr().err
