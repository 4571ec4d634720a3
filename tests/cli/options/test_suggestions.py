"""Typos of each kind on the command line and in configs: the error says what was probably meant."""

from pathlib import Path

import pytest

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import TRAINER_COMMANDS
from pfl_lightning.cli.options.nearest import nearest, nearest_options

CONFIG = Path(__file__).parents[3] / "configs" / "fedpac_digits.yaml"

TYPED = {
    "--model.method FedPAK": "'FedPAC'",
    "--model.method fedavg": "'FedAvg'",
    "--model.method pfl_lightning.methods.FedPAK": "'FedPAC'",
    "--model.method.help FedPAK": "'FedPAC'",
    "--model.method.lrr 3": "'lr'",
    "--model.method.learning_rate 3": "'lr'",
    "--model.method.local_epochs 3": "'epochs'",
    "--model.method.optimizer torch.optim.Adm": "'torch.optim.Adam'",
    "--model.method Calibre --model.method.objective SimCRL": "'simclr'",
    "--data Digit": "'Digits'",
    "--data.help digits": "'Digits'",
    "--data.batchsize 3": "'batch_size'",
    "--data.partition DominantClases": "'DominantClasses'",
    "--data.partition.num_client 3": "'num_clients'",
    "--data Digits --data.partition.help DominantClases": "'DominantClasses'",
    "--model.encoder small_cn": "'small_cnn'",
    "--model.encoder MLP": "'mlp'",
    "--model.encoder [small_cnn,mpl]": "'mlp'",
    "--model.engine VectorisedEngine": "'VectorizedEngine'",
    "--engine vectorised": "'vectorized'",
    "--personalize.train liner": "'linear'",
    "--trainer.callbacks+=EarlyStoping": "'EarlyStopping'",
    "--loop.cohrt 3": "'--loop.cohort'",
    "--cohort 3": "'--loop.cohort'",
    "--rounds 3": "'--trainer.max_epochs'",
    "--trainer.max_rounds=3": "'--trainer.max_epochs'",
    "--trainer.epochs 3": "'--trainer.max_epochs'",
    "--trainer.max_epoch 3": "'--trainer.max_epochs'",
    "--trainer.max_epoch=3": "'--trainer.max_epochs'",
    "--seed 3": "'--seed_everything'",
    "--run runs": "'--run_dir'",
    "my_run.yaml": "'--config my_run.yaml'",
    "--lr 3": "'--model.method.lr'",
    "--num_clients 3": "'--data.partition.num_clients'",
}

WRITTEN = {
    "modle: {method: FedAvg}": "'model.method'",
    "trainer: {max_epoch: 3}": "'trainer.max_epochs'",
    "trainer: {rounds: 3}": "'trainer.max_epochs'",
    "data: {init_args: {batchsize: 3}}": "'batch_size'",
    "model: {method: {class_path: FedPAC, init_arg: {lr: 3}}}": "'init_args'",
}


def said_of(capsys, folder, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(CONFIG), "--run_dir", str(folder), *words])
    return stopped.value.code if isinstance(stopped.value.code, str) else capsys.readouterr().err


@pytest.mark.parametrize(("words", "meant"), TYPED.items(), ids=TYPED)
def test_a_typo_on_the_command_line(capsys, tmp_path, monkeypatch, words, meant):
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    assert f"did you mean {meant}?" in said_of(capsys, tmp_path, *words.split())


@pytest.mark.parametrize(("text", "meant"), WRITTEN.items(), ids=WRITTEN)
def test_a_typo_in_a_config(capsys, tmp_path, text, meant):
    (tmp_path / "change.yaml").write_text(text)
    assert f"did you mean {meant}?" in said_of(capsys, tmp_path, "--config", str(tmp_path / "change.yaml"))


@pytest.mark.parametrize("command", [name for name in TRAINER_COMMANDS if name != "fit"])
def test_no_subcommand_takes_the_beginning_of_an_option(capsys, command):
    with pytest.raises(SystemExit, match=r"^2$"):
        main([command, "--config", str(CONFIG), "--trainer.max_epoch", "3"])
    assert "did you mean '--trainer.max_epochs'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("compare runs --outpu x", "did you mean --output?"),
        ("compare runs --outpu=x", "did you mean --output?"),
        ("compare runs --xyzzy", "unrecognized arguments: --xyzzy (pfl compare --help lists the options)"),
        ("methods --hetero", "did you mean --heterogeneous?"),
        ("methods --confi x.yaml", "did you mean --config?"),
    ],
)
def test_nor_do_those_without_a_trainer(capsys, words, meant):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words.split())
    assert meant in capsys.readouterr().err


def test_a_typo_in_the_path_of_a_config(capsys, tmp_path):
    wrong = CONFIG.with_name("fedpac_digit.yaml")
    assert f"did you mean '{CONFIG}'?" in said_of(capsys, tmp_path, "--config", str(wrong))


def test_no_suggestion_for_what_is_like_nothing(capsys, tmp_path):
    assert "did you mean" not in said_of(capsys, tmp_path, "--xyzzy", "3")
    assert nearest("xyzzy", ["FedAvg"]) == ""
    assert nearest_options("xyzzy", ["loop.cohort"]) == []
