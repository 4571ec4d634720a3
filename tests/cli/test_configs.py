"""Every config is instantiated by the command line and run through a round, on a little data of the right kind.

Configs with ResNet-18 take over 10 s: a round of the network itself is run, on the CPU.
"""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from _helpers.stl10_archive import write_stl10
from lightning.pytorch.cli import LightningArgumentParser
from PIL import Image

from pfl_lightning.cli import main
from pfl_lightning.datamodules import Digits, Partitioner
from pfl_lightning.errors import ConfigurationError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = {"num_clients": 4, "samples_per_client": 62}


def image_folder(root, per_class=(40, 12)):
    rng = np.random.default_rng(0)
    for part, number in zip(("train", "test"), per_class, strict=True):
        for c in range(10):
            folder = root / part / f"class{c}"
            folder.mkdir(parents=True)
            for k in range(number):
                Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    return root


def domain_folders(root, per_class=30):
    rng = np.random.default_rng(0)
    for domain in ("a", "b", "c", "d"):
        for c in range(4):
            folder = root / domain / f"class{c}"
            folder.mkdir(parents=True)
            for k in range(per_class):
                Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    return root


def idx_files(folder, prefix, classes):
    """Files such as torchvision keeps of MNIST's relatives."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, per_class in (("train", 40), ("test" if prefix else "t10k", 12)):
        labels = np.arange(classes * per_class, dtype=np.uint8) % classes
        images = rng.integers(0, 255, (len(labels), 28, 28), dtype=np.uint8)
        header = struct.pack(">IIII", 2051, *images.shape)
        (folder / f"{prefix}{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, len(labels))
        (folder / f"{prefix}{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def small_data(kind, folder):
    """Options that put a little data in place of the config's own."""
    name = kind.rpartition(".")[2]
    if name == "Digits":
        return {}
    if name == "ImageFolder":
        return {"root": image_folder(folder / "images")}
    if name == "DomainFolders":
        # Halves: in a last batch of two, batch normalization has next to no variance to divide by.
        return {"root": domain_folders(folder / "domains"), "image_size": 32, "batch_size": 31}
    if name == "STL10":
        write_stl10(folder, train=400, test=120)
    elif name == "FashionMNIST":
        idx_files(folder / "FashionMNIST" / "raw", "", 10)
    elif name == "EMNIST":
        idx_files(folder / "EMNIST" / "raw", "emnist-byclass-", 62)
    else:
        pytest.fail(f"say in this test how to make a little {name}")
    return {"root": folder}


def flags(options, prefix=""):
    return [str(word) for name, value in options.items() for word in (f"--{prefix}{name}", value)]


ALWAYS = ("fedpac_cifar10", "fedpac_emnist", "calibre_cifar10", "dcpfl_cifar10", "fedclassavg_cifar10", "dualfed_pacs")
"""Configs beside those of the digits that are run by default: one of each kind of data; others are like them."""


def is_slow(config):
    return not config.stem.endswith("_digits") and config.stem not in ALWAYS


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=c.stem, marks=[pytest.mark.slow] if is_slow(c) else []) for c in CONFIGS],
)
def test_config(tmp_path, monkeypatch, config):
    monkeypatch.setenv("PFL_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PFL_DEBUG", "1")
    content = yaml.safe_load(config.read_text())
    data = content["data"]
    options = {"batch_size": 20} | small_data(data["class_path"], tmp_path / "data")
    rule, prefix = data["init_args"]["partition"]["init_args"], "data.init_args.partition.init_args."
    while "base" in rule:
        rule, prefix = rule["base"]["init_args"], f"{prefix}base.init_args."
    partition = {key: value for key, value in SMALL.items() if key in rule}
    method = {}
    if "public" in data["init_args"]:
        options["public"], method["public_samples"], partition["samples_per_client"] = 60, 40, 48
    assert partition, "a config says how many clients there are"
    arguments = [
        *("fit", "--config", str(config), "--run_dir", str(tmp_path / "runs")),
        *flags(options, "data.init_args."),
        *flags(partition, prefix),
        *flags(method, "model.method.init_args."),
        *flags({"fast_dev_run": "true", "enable_progress_bar": "false", "accelerator": "cpu"}, "trainer."),
    ]
    main(arguments)
    assert not list((tmp_path / "runs").rglob("*.ckpt"))


ON_DIGITS = [path for path in CONFIGS if "_digits" in path.stem]


@pytest.mark.parametrize("config", ON_DIGITS, ids=lambda path: path.stem)
def test_the_digits_suffice_for_the_clients_of_a_config(tmp_path, config):
    """As it is, not made smaller: public samples, for instance, are not there for the clients."""
    given = yaml.safe_load(config.read_text())["data"]["init_args"]
    rule = LightningArgumentParser()
    rule.add_argument("--partition", type=Partitioner)
    partition = rule.instantiate(rule.parse_object({"partition": given["partition"]})).partition
    names = ("validation_share", "drop_last", "novel_clients", "public", "seed")
    data = Digits(partition, given["batch_size"], **{name: given[name] for name in names if name in given})
    data.setup("fit")
    assert all(len(data.client_data(client).train) > 0 for client in range(data.num_clients))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_short_and_says_what_it_is(config):
    text = config.read_text()
    content = yaml.safe_load(text)
    assert len(text.splitlines()) <= 40
    assert text.startswith("#")
    assert content["run_dir"] == f"runs/{config.stem}"
    assert {"method", "encoder"} <= content["model"].keys()
    assert content["trainer"]["max_epochs"] > (-1 if "personalize" in content else 1)


def test_there_are_configs():
    assert {"fedpac_digits", "fedpac_cifar10"} <= {path.stem for path in CONFIGS}


# ---------------------------------------------------------------------- a run and what it leaves

TINY = [
    *("--model.encoder", "mlp", "--model.method.init_args.epochs", "1"),
    *flags({"num_clients": 4, "samples_per_client": 30}, "data.init_args.partition.init_args."),
    *flags({"enable_progress_bar": "false", "enable_model_summary": "false"}, "trainer."),
]


def tiny_run(run_dir, *more, subcommand="fit"):
    config = next(path for path in CONFIGS if path.stem == "fedpac_digits")
    main([subcommand, "--config", str(config), "--run_dir", str(run_dir), *TINY, *more])


@pytest.fixture(autouse=True)
def _loud(monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")


def test_a_run_leaves_its_config_partition_results_events_and_checkpoints(tmp_path):
    tiny_run(tmp_path, "--trainer.max_epochs", "3")
    [version] = tmp_path.iterdir()
    names = {path.name for path in version.iterdir() if not path.name.startswith("events")}
    assert names >= {"checkpoints", "config.yaml", "partition.npz", "results.json", "clients.csv"}
    assert list(version.glob("events*"))
    checkpoints = version / "checkpoints"
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["epoch"] == 2
    assert len(list(checkpoints.glob("best-round-*.ckpt"))) == 1
    resolved = yaml.safe_load((version / "config.yaml").read_text())
    assert resolved["trainer"]["max_epochs"] == 3
    assert resolved["trainer"]["devices"] == 1  # on a machine of several GPUs Lightning's default would take them all
    assert resolved["data"]["init_args"]["partition"]["init_args"]["num_clients"] == 4


def test_the_same_config_gives_the_same_numbers_and_another_seed_others(tmp_path):
    def play(name, *more):
        tiny_run(tmp_path / name, "--trainer.max_epochs", "2", *more)
        version = tmp_path / name / "version_0"
        return torch.load(version / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    first, again, other = play("a"), play("b"), play("c", "--seed_everything", "1")
    weights = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(first[name], again[name]) for name in weights)
    assert not torch.equal(first["models.0.head.weight"], other["models.0.head.weight"])


def test_last_follows_a_run_that_began_at_its_best_round(tmp_path):
    """From the first, best round on; then `last` must mean the newest state, not that of the first run."""
    tiny_run(tmp_path, "--trainer.max_epochs", "2")
    checkpoints = tmp_path / "version_0" / "checkpoints"
    tiny_run(tmp_path, "--trainer.max_epochs", "4", "--ckpt_path", "best")
    tiny_run(tmp_path, "--trainer.max_epochs", "5", "--ckpt_path", "last")
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["epoch"] == 4
    assert [path.name for path in checkpoints.glob("last*")] == ["last.ckpt"]


def test_last_is_the_last_round_however_good(tmp_path):
    """A figure that never improves: the best round is the first one."""
    tiny_run(tmp_path, "--trainer.max_epochs", "3", "--checkpoint.monitor", "train/clients_left_out")
    checkpoints = tmp_path / "version_0" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best-round-1.ckpt", "last.ckpt"]
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["epoch"] == 2


def test_a_finished_run_keeps_the_settings_that_made_its_results(tmp_path):
    """Nothing would train under others, and the results would be told as theirs; more rounds may follow."""

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".yaml", ".csv")}

    tiny_run(tmp_path, "--trainer.max_epochs", "2")
    before, resumed = files(), ["--trainer.max_epochs", "2", "--ckpt_path", "last"]
    for option, value in (("model.method.lr", "0.5"), ("data.batch_size", "7")):
        with pytest.raises(ConfigurationError, match=f"no round left after its 2 rounds.*{option[:5]}.*{value}"):
            tiny_run(tmp_path, *resumed, f"--{option}", value)
    assert files() == before
    tiny_run(tmp_path, *resumed, "--model.client_state_memory_gb", "1")
    tiny_run(tmp_path, "--trainer.max_epochs", "3", "--ckpt_path", "last", "--model.method.lr", "0.5")
    assert "lr" in (tmp_path / "version_0" / "changes.json").read_text()


def test_validate_and_test_take_the_checkpoint(tmp_path, capsys):
    tiny_run(tmp_path, "--trainer.max_epochs", "2")
    tiny_run(tmp_path, "--ckpt_path", "last", subcommand="test")
    said = capsys.readouterr().out
    assert "FedPAC: test accuracy, in %" in said
    assert f"Results: {tmp_path / 'version_0'}/test.json, test_clients.csv" in said
    tiny_run(tmp_path, "--ckpt_path", "best", subcommand="validate")
    assert "FedPAC: validation accuracy, in %" in capsys.readouterr().out
    assert (tmp_path / "version_0" / "validate.json").is_file()


def test_without_validation_parts(tmp_path):
    tiny_run(tmp_path, "--trainer.max_epochs", "2", "--data.init_args.validation_share", "0")
    assert (tmp_path / "version_0" / "results.json").is_file()
    checkpoints = tmp_path / "version_0" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(("cohort", "clients"), [("2", 2), ("0.7", 3), ("1", 1), ("1.0", 4)])
def test_a_cohort_by_number_or_by_rate(tmp_path, cohort, clients):
    import json

    more = ["--trainer.max_epochs", "1", "--loop.cohort", cohort, "--model.method", "pfl_lightning.methods.FedAvg"]
    tiny_run(tmp_path, *more)
    results = json.loads((tmp_path / "version_0" / "results.json").read_text())
    parameters = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert results["bytes"]["up"] == clients * parameters * 4


def test_the_partition_says_how_many_images_without_labels_a_client_has(tmp_path, capsys):
    config = next(path for path in CONFIGS if path.stem == "calibre_stl10")
    small = small_data("STL10", tmp_path / "data") | {"batch_size": 20, "partition.init_args.num_clients": 4}
    main(["partition", "--config", str(config), "--run_dir", str(tmp_path / "runs"), *flags(small, "data.init_args.")])
    said = capsys.readouterr().out
    assert "30 unlabeled" in " ".join(said.split())
    rows = [line.split()[:5] for line in said.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]
    assert sorted(row[4] for row in rows) == ["0", "0", "15", "15"]
    assert "unlabeled" in np.load(next((tmp_path / "runs").rglob("partition.npz"))).files
