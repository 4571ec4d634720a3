"""Names of clients in files, tables and errors."""

import csv
import io
import json

import pytest
import torch
from lightning import Trainer
from rich.console import Console
from torch.utils.data import TensorDataset

from pfl_lightning import FederatedLoop, Federation, ResultsWriter, export_clients
from pfl_lightning.datamodules import FromDatasets, partition_table
from pfl_lightning.errors import ClientError
from pfl_lightning.methods import FedPer
from pfl_lightning.runs.results import csv_text, with_names

NAMES = ["=cmd|' /C calc'!A0", "Lyon/../x", "@Nice"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(90, 4), torch.arange(90) % 2)
    data = FromDatasets(train=train, clients=NAMES * 30, batch_size=10)
    federation = Federation(FedPer, "mlp")
    callbacks = [FederatedLoop(), ResultsWriter(str(folder))]
    trainer = Trainer(
        max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(federation, datamodule=data)
    return federation, data, folder


def test_clients_csv_has_names_that_no_spreadsheet_executes(fitted):
    _, data, folder = fitted
    rows = [*csv.DictReader((folder / "clients.csv").open(newline=""))]
    assert [*rows[0]][:2] == ["client", "name"]
    assert [row["name"] for row in rows] == ["'=cmd|' /C calc'!A0", "'@Nice", "Lyon/../x"]
    assert data.client_names == ("=cmd|' /C calc'!A0", "@Nice", "Lyon/../x")


def test_exported_models_carry_names_in_their_json_alone(fitted, tmp_path):
    federation, data, _ = fitted
    paths = export_clients(federation, tmp_path / "models")
    assert [path.name for path in paths] == ["client_0.pt", "client_1.pt", "client_2.pt"]
    assert {file.parent for file in tmp_path.rglob("*.*")} == {tmp_path / "models"}
    found = [json.loads(path.with_suffix(".json").read_text())["name"] for path in paths]
    assert found == [*data.client_names]


def test_tables_and_errors_name_clients(fitted):
    data = fitted[1]
    console = Console(file=io.StringIO(), width=120)
    console.print(partition_table(data.class_counts(), data.class_names, names=data.client_names))
    text = console.file.getvalue()
    assert "name" in text
    assert all(name in text for name in NAMES)
    error = ClientError(2, 0, "its loss is NaN")
    assert error.told(["Lyon", "Nice", "Metz"]) == "client 2 (Metz), round 1: its loss is NaN"
    assert error.told(None) == str(error)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_what_a_spreadsheet_executes_is_quoted(start):
    ((cell, number),) = csv.reader(io.StringIO(csv_text([[f"{start}1+1", -0.5]]), newline=""))
    assert (cell, number) == (f"'{start}1+1", "-0.5")
    assert csv_text([["-", "a-b"]]) == "-,a-b\r\n"


def test_without_names_there_is_no_column():
    assert with_names([["client", "x"], [0, 1]], None) == [["client", "x"], [0, 1]]
