"""Clients that bring a Dataset each, under the package's own methods: read once, as one Dataset is."""

import pickle

import pytest
import torch
import yaml
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from pfl_lightning import Federation, federate
from pfl_lightning.cli import main
from pfl_lightning.datamodules import FromDatasets, FromSilos
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg

NAMES = ("Lyon", "Metz", "Nice")


class Site(TensorDataset):
    def __init__(self, number: int, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        super().__init__(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES)


SITES, TESTS = [Site(30, 1), Site(50, 2), Site(41, 3)], [Site(8, 4), None, Site(12, 5)]


def owners(sites):
    return [name for name, site in zip(NAMES, sites, strict=True) for _ in range(0 if site is None else len(site))]


def fitted(data, method, **options):
    federation, trainer = Federation(method, "mlp", seed=1), quiet_trainer(2)
    trainer.fit(federation, datamodule=data, **options)
    trainer.test(federation, datamodule=data, verbose=False)
    return federation


@pytest.mark.parametrize("method", ["FedAvg", "FedPAC"])
@pytest.mark.parametrize(
    ("tests", "options"), [([], {"test_share": 0.3}), (TESTS, {"novel_clients": 1, "validation_share": 0.2})]
)
def test_the_same_numbers_as_one_dataset_whose_items_say_whose_they_are(method, tests, options):
    own = fitted(FromSilos(SITES, batch_size=7, test_silos=tests, client_names=NAMES, **options), method)
    whole = {"train": ConcatDataset(SITES), "clients": owners(SITES)}
    if tests:
        whole |= {"test": ConcatDataset([t for t in tests if t is not None]), "test_clients": owners(tests)}
    other = fitted(FromDatasets(batch_size=7, **whole, **options), method)
    assert (own.fingerprints, own.data.novel) == (other.fingerprints, other.data.novel)
    assert own.data.client_names == NAMES
    assert list(own.test_scores) == list(other.test_scores)
    for client, score in own.test_scores.items():
        assert repr(score) == repr(other.test_scores[client])
        for mine, its in zip(
            own.client_model(client).parameters(), other.client_model(client).parameters(), strict=True
        ):
            assert torch.equal(mine, its)
    assert sorted(own.test_scores) == ([0, 2] if tests else [0, 1, 2])


def test_one_object_serves_both_forms():
    data = FromSilos(SITES, validation_share=0.2)
    federation = fitted(data, FedAvg)
    assert (data.input_shape, data.num_classes, len(federation.data.client_data(0).test)) == ((INPUTS,), CLASSES, 8)
    module, data = federate(Net(), data, FedAvg)
    quiet_trainer(1).fit(module, datamodule=data)
    assert [len(data.client_data(client).test) for client in range(3)] == [
        0,
        0,
        0,
    ]  # items, of which none are for tests
    again = fitted(data, FedAvg)
    assert again.fingerprints == federation.fingerprints
    for client, score in again.test_scores.items():
        assert score.loss == federation.test_scores[client].loss


def test_test_silos_under_federate():
    module, data = federate(Net(), FromSilos(SITES, test_silos=TESTS), FedAvg)
    quiet_trainer(1).fit(module, datamodule=data)
    assert [len(data.client_data(client).test) for client in range(3)] == [8, 0, 12]
    inputs = torch.cat([batch[0] for batch in data.client_data(2).test.loader(5)])
    assert torch.equal(inputs, TESTS[2].tensors[0])


def test_a_worker_gets_no_datasets():
    data = FromSilos(SITES, client_names=NAMES)
    data.read_whole()
    read = pickle.loads(pickle.dumps(data))
    assert read._silos is None
    assert torch.equal(read.client_data(1).train.raw_inputs, data.client_data(1).train.raw_inputs)


class Words(list):
    pass


@pytest.mark.parametrize(
    ("silo", "message"),
    [
        (
            DataLoader(SITES[1]),
            r"the data set of client 1 \(Metz\) is a DataLoader, expected a Dataset; the package's own",
        ),
        (
            Words(["a", "b"]),
            r"item 0 of the data set of client 1 \(Metz\) is a str, expected a pair \(input, class\); the",
        ),
        (
            TensorDataset(torch.rand(4, 2), torch.arange(4)),
            r"client 1 \(Metz\) are torch.float32 of shape \(2,\), those ",
        ),
        (
            TensorDataset(torch.rand(4, INPUTS), torch.rand(4)),
            r"the class in item 0 of the data set of client 1 \(Metz\)",
        ),
    ],
)
def test_what_cannot_be_read_is_said_with_its_silo(silo, message):
    data = FromSilos([SITES[0], silo, SITES[2]], client_names=NAMES)
    with pytest.raises(ConfigurationError, match=message) as raised:
        fitted(data, FedAvg)
    assert "federate a LightningModule" in str(raised.value)


def test_mistaken_arguments():
    with pytest.raises(ValueError, match="an entry for each of 3 silos, got 1"):
        FromSilos(SITES, test_silos=[SITES[0]])
    with pytest.raises(ValueError, match="a name for each of 3 clients, got 2"):
        FromSilos(SITES, client_names=NAMES[:2])
    with pytest.raises(ValueError, match="test items of client 0, whose silo is a DataLoader"):
        FromSilos([DataLoader(SITES[0])], test_silos=[SITES[1]])
    with pytest.raises(ConfigurationError, match="test_share of FromSilos: only the package's own methods"):
        federate(Net(), FromSilos(SITES, test_share=0.3), FedAvg)


def test_a_config_names_them_and_a_run_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    site = f"{__name__}.Site"
    silos = [{"class_path": site, "init_args": {"number": 30 + 5 * seed, "seed": seed}} for seed in range(3)]
    config = {
        "run_dir": "run",
        "model": {"method": "FedPAC", "encoder": "mlp", "seed": 0},
        "data": {
            "class_path": "FromSilos",
            "init_args": {"silos": silos, "client_names": [*NAMES], "novel_clients": 1},
        },
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
    }
    (tmp_path / "silos.yaml").write_text(yaml.safe_dump(config))
    main(["partition", "--config", "silos.yaml"])
    assert "Metz" in capsys.readouterr().out
    main(["fit", "--config", "silos.yaml"])
    main(["fit", "--config", "silos.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"])
    rows = (tmp_path / "run/version_0/clients.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["name", *NAMES]
    main(["predict", "--config", "silos.yaml", "--ckpt_path", "last", "--client", "Nice"])
    assert (tmp_path / "run/version_0/predictions/client_2.csv").is_file()
