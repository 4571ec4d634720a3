"""Typos of each kind on the command line and in configs: the error says what was probably meant."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from pfl_lightning.cli import main
from pfl_lightning.cli.commands import TRAINER_COMMANDS
from pfl_lightning.cli.messages import OF_CLASSES, nearest_option
from pfl_lightning.names import nearest
from pfl_lightning.phases import Personalization

CONFIG = Path(__file__).parents[2] / "configs" / "fedpac_digits.yaml"

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
    "--model.method.optimizer Adm": "'torch.optim.Adam'",
    "--trainer.logger TensorBoardLoger": "'TensorBoardLogger'",
    "--output_dir runs": "'--run_dir'",
    "--ckpt_path lst": "'last'",
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
    "--personalize.trian head": "'train'",
    "--personalize head": "'--personalize.train'",
    "--personalise.epochs 3": "'--personalize.epochs'",
    "--personalization.epochs 3": "'--personalize.epochs'",
    "--train head": "'--personalize.train'",
    "--fine_tune.epochs 3": "'--model.method.fine_tune_epochs'",
    "--finetune all": "'--model.method.fine_tune'",
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
    "--data.num_clients 3": "'partition.num_clients'",
    "--model FedAvg": "'--model.method'",
    "--checkpoint last": "'--ckpt_path'",
    "--epochs 3": "'--model.method.epochs'",
    "--num_epochs 3": "'--model.method.epochs'",
    "--trainer.epoch 3": "'--trainer.max_epochs'",
    "--learning-rate 3": "'--model.method.lr'",
    "--seeds 0,1": "'--seed_everything'",
    "--participation 0.5": "'--loop.cohort'",
    "--device cuda": "'--trainer.accelerator'",
    "--devices 1": "'--trainer.devices'",
    "--augment true": "'--data.augment'",
}

WRITTEN = {
    "modle: {method: FedAvg}": "'model.method'",
    "trainer: {max_epoch: 3}": "'trainer.max_epochs'",
    "trainer: {rounds: 3}": "'trainer.max_epochs'",
    "data: {init_args: {batchsize: 3}}": "'batch_size'",
    "model: {method: {init_args: {learning_rate: 3}, class_path: Ditto}}": "'lr'",
    "model: {method: {init_args: {optimizer: {class_path: torch.optim.SGD}, epoch: 3}, class_path: Ditto}}": "'epochs'",
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


@pytest.mark.parametrize("typed", ["--outpt", "--output_dir"])
def test_commands_that_write_elsewhere_have_an_output(capsys, typed):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["partition", "--config", str(CONFIG), typed, "x"])
    assert "did you mean '--output'?" in capsys.readouterr().err


def test_base_classes_are_no_choices(capsys, tmp_path):
    assert "PartitionTransform" not in said_of(capsys, tmp_path, "--data.partition", "Nothing")


def test_options_beside_the_path_of_their_class(capsys, tmp_path):
    (tmp_path / "change.yaml").write_text("model: {method: {class_path: FedPAC, lr: 0.1}}")
    said = said_of(capsys, tmp_path, "--config", str(tmp_path / "change.yaml"))
    assert "the options of a class go below init_args: {class_path: NAME, init_args: {lr: 0.1}}" in said
    assert "options of FederatedClient" not in said


OF_PERSONALIZATION = {
    "--train head": "personalize.train",
    "--epochs 3": "personalize.epochs",
    "--learning_rate 3": "personalize.lr",
    "--batchsize 3": "personalize.batch_size",
    "--augment true": "personalize.augment",
    "--weight-decay 0": "personalize.weight_decay",
    "--model.method.epochs2": "model.method.epochs",
    "--cohrt 3": "loop.cohort",
}


@pytest.mark.parametrize(("words", "meant"), OF_PERSONALIZATION.items(), ids=OF_PERSONALIZATION)
def test_pfl_personalize_means_its_own_options(words, meant):
    assert nearest_option(words.split()[0], ["loop.cohort"], "personalize") == meant


def test_pfl_personalize_proposes_its_own_options(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["personalize", "--config", str(CONFIG), "--epochs", "3"])
    assert "did you mean '--personalize.epochs'?" in capsys.readouterr().err


def test_the_options_of_personalization_are_known():
    named = {name.partition(".")[2] for name in OF_CLASSES if name.startswith("personalize.")}
    assert named == {field.name for field in fields(Personalization)}


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
        ("compare runs --target 0.8", "did you mean --target-accuracy?"),
        ("compare runs --accuracy 0.8", "did you mean --target-accuracy?"),
        ("compare runs --xyzzy", "unrecognized arguments: --xyzzy (pfl compare --help lists the options)"),
        ("compare runs --best", "unrecognized arguments: --best (pfl compare --help lists the options)"),
        ("compare runs --folder x", "unrecognized arguments: --folder x (pfl compare --help lists the options)"),
        ("methods --hetero", "did you mean --heterogeneous?"),
        ("methods --novel-clients", "did you mean --novel?"),
        ("methods scaffold1", "did you mean 'SCAFFOLD'?"),
        ("methods FedZebra", "there is no method FedZebra (pfl methods lists those of the package)"),
        ("study x.yaml --train head", "did you mean --personalize.train?"),
        ("study x.yaml --personalise.epochs 3", "did you mean --personalize.epochs?"),
        ("study x.yaml --out x", "did you mean --output?"),
        ("study x.yaml --report", "did you mean --report-only?"),
        ("study x.yaml --resume", "runs resume by themselves"),
        ("study x.yaml --xyzzy 1", "unknown option --xyzzy: options of the study are in pfl study --help"),
        ("reproduce digits --seed 0", "did you mean --seeds?"),
        ("reproduce digts", "did you mean 'digits'?"),
        ("reproduce fedpac_tabel10", "did you mean 'fedpac-table10'?"),
        ("plot runs", "known: fit, validate"),
    ],
)
def test_nor_do_those_without_a_trainer(capsys, words, meant):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words.split())
    assert meant in capsys.readouterr().err


def test_no_suggestion_for_what_is_like_nothing(capsys, tmp_path):
    assert "did you mean" not in said_of(capsys, tmp_path, "--xyzzy", "3")
    assert nearest("xyzzy", ["FedAvg"]) == ""
    assert nearest_option("xyzzy", ["loop.cohort"]) == ""


def test_a_data_set_of_torchvision_takes_its_options(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"size": 40, "image_size": [1, 4, 4], "transform": {"class_path": "torchvision.transforms.ToTensor"}}
    train = {"class_path": "torchvision.datasets.FakeData", "init_args": arguments}
    partition = {"class_path": "IID", "init_args": {"num_clients": 2}}
    data = {"class_path": "FromDatasets", "init_args": {"train": train, "partition": partition}}
    config = {"model": {"method": "FedAvg", "encoder": "mlp"}, "data": data}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    main(["partition", "--config", "own.yaml"])
    assert "Saved " in capsys.readouterr().out
    arguments["transfrom"] = arguments.pop("transform")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        main(["partition", "--config", "own.yaml"])
    assert "did you mean 'transform'? options of FakeData: " in capsys.readouterr().err
