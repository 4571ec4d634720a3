"""Exported models of a table predict new rows from their files alone."""

import csv
import io
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from _helpers.toy import quiet_trainer

from pfl_lightning import Federation, export_clients, exported_inputs, load_exported, predict_exported
from pfl_lightning.cli import main
from pfl_lightning.datamodules import IID, Digits, FromTable
from pfl_lightning.errors import ConfigurationError

pd = pytest.importorskip("pandas")


def rows(count, seed):
    rng = np.random.default_rng(seed)
    age, ward = rng.normal(60, 12, count), rng.choice(["surgery", "heart", "eyes"], count).astype(object)
    age[::9], ward[::11] = np.nan, None
    site = rng.choice(["Lyon", "Nice", "Metz"], count, p=[0.5, 0.3, 0.2])
    state = np.where(np.nan_to_num(age, nan=60) + rng.normal(0, 3, count) > 60, "ill", "well")
    return pd.DataFrame({"site": site, "age": age, "code": rng.integers(0, 3, count), "ward": ward, "state": state})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A federation, its exported models where there is no table, and new rows."""
    folder = tmp_path_factory.mktemp("tables")
    rows(150, 0).to_csv(folder / "patients.csv", index=False)
    path = str(folder / "patients.csv")
    data = FromTable(path, target="state", client="site", categorical=["code"])
    with pytest.warns(UserWarning, match="missing numbers"):
        data.setup()
    federation = Federation("FedPer", "mlp", seed=1)
    quiet_trainer(2).fit(federation, datamodule=data)
    export_clients(federation, folder / "models")
    (folder / "patients.csv").unlink()
    return federation, data, folder / "models", rows(40, 1).drop(columns=["site", "state"])


@pytest.mark.parametrize("client", range(3))
def test_new_rows_are_predicted_as_by_the_federation(exported, client, tmp_path):
    federation, data, models, new = exported
    expected = federation.predict(client, data.inputs_of(new))
    new.to_csv(tmp_path / "new.csv", index=False)
    path = models / f"client_{client}.pt"
    for given in (new, new[["ward", "code", "age"]], tmp_path / "new.csv"):
        assert torch.equal(exported_inputs(path, given), data.inputs_of(new))
        found = predict_exported(path, given)
        assert torch.equal(found.probabilities, expected.probabilities)
        assert (found.class_names, found.client, found.labels) == (("ill", "well"), client, None)
    with torch.no_grad():
        assert torch.equal(load_exported(path)(exported_inputs(path, new)).softmax(1), expected.probabilities)


def test_the_description_says_what_features_are(exported):
    _, _, models, new = exported
    columns = json.loads((models / "client_0.json").read_text())["table"]["columns"]
    features = []
    for own in columns:  # as somebody without this package would
        values = new[own["name"]]
        if own["categories"]:
            texts = values.astype(object).where(values.notna(), "missing").astype(str)
            features += [(texts == category).to_numpy(float) for category in own["categories"]]
        else:
            features.append(((values.fillna(own["fill"]) - own["mean"]) / own["std"]).to_numpy())
    torch.testing.assert_close(
        exported_inputs(models / "client_0.json", new), torch.tensor(np.array(features).T).float()
    )


def test_the_command_line_needs_the_files_alone(exported, tmp_path, monkeypatch, capsys):
    federation, data, models, new = exported
    monkeypatch.chdir(tmp_path)
    for name in ("client_1.pt", "client_1.json"):
        shutil.copy(models / name, tmp_path)
    new.to_csv("new.csv", index=False)
    main(["predict", "--exported", "client_1.pt", "--inputs", "new.csv"])
    assert "Saved 40 predictions of client Metz in predictions/client_1_new.csv" in capsys.readouterr().out
    table = list(csv.DictReader(io.StringIO((tmp_path / "predictions/client_1_new.csv").read_text())))
    expected = federation.predict(1, data.inputs_of(new))
    assert [row["prediction"] for row in table] == [data.class_names[c] for c in expected.classes]
    assert [float(row["probability ill"]) for row in table] == pytest.approx(expected.probabilities[:, 0].tolist())


def test_each_row_is_predicted_by_the_model_of_its_client(tmp_path, monkeypatch, capsys):
    """All clients by one command, where the table says whose a row is; its number in the table is kept."""
    monkeypatch.chdir(tmp_path)
    rows(150, 0).to_csv("patients.csv", index=False)
    new = rows(40, 1).drop(columns="state").assign(site=["Nice", "Metz", "Paris", " Nice"] * 10)
    new.to_csv("new.csv", index=False)
    new.drop(columns="site").to_csv("nobodys.csv", index=False)
    source = ["--data", "FromTable", "--data.path", "patients.csv", "--data.target", "state", "--data.client", "site"]
    words = [
        "--model.method",
        "FedPer",
        "--model.encoder",
        "mlp",
        *source,
        "--run_dir",
        "run",
        "--seed_everything",
        "1",
    ]
    main(["fit", *words, "--trainer.max_epochs", "1"])
    predict = ["predict", *words, "--ckpt_path", "last"]
    with pytest.warns(UserWarning, match="do not have are left out: 10 of 40, in the column 'site' Paris"):
        main([*predict, "--inputs", "new.csv", "--output", "each"])
    assert "Saved 20 predictions of client 2 (Nice) in each/client_2_new.csv" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == ["client_1_new.csv", "client_2_new.csv"]
    for client, name in ((1, "Metz"), (2, "Nice")):
        own = new[new["site"].str.strip() == name]
        own.to_csv("own.csv", index=False)
        main([*predict, "--inputs", "own.csv", "--output", "own", "--client", name])
        files = (Path("own", f"client_{client}_own.csv"), Path("each", f"client_{client}_new.csv"))
        expected, found = ([*csv.reader(io.StringIO(file.read_text()))] for file in files)
        assert [row[0] for row in found[1:]] == [str(row) for row in own.index]
        assert [row[1:] for row in found] == [row[1:] for row in expected]
    main([*predict, "--output", "tests"])
    assert len(list((tmp_path / "tests").iterdir())) == 3
    for inputs, said in (("nobodys.csv", "no column 'site', which says"), ("new.npy", "name the client")):
        with pytest.raises(SystemExit):
            main([*predict, "--inputs", inputs])
        assert said in capsys.readouterr().err


def test_another_process_predicts(exported, tmp_path):
    _, _, models, new = exported
    new.to_csv(tmp_path / "new.csv", index=False)
    code = "import sys; from pfl_lightning import predict_exported as p; print(p(*sys.argv[1:]).table(), end='')"
    arguments = [sys.executable, "-c", code, str(models / "client_2.pt"), str(tmp_path / "new.csv")]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == predict_exported(models / "client_2.pt", new).table().splitlines()


def test_rows_that_do_not_fit(exported):
    _, _, models, new = exported
    path = models / "client_0.pt"
    with pytest.raises(ValueError, match=r"rows have no column 'age', .*; did you mean 'agee'"):
        predict_exported(path, new.rename(columns={"age": "agee"}))
    with pytest.raises(ValueError, match=r"'age' has .* instead of numbers"):
        predict_exported(path, new.assign(age="old"))
    with pytest.warns(UserWarning, match="no training row has.*'ward' 40 of 40 rows"):
        predict_exported(path, new.assign(ward="teeth"))
    with pytest.raises(ConfigurationError, match=r"expected rows with its columns, .* got a Tensor"):
        predict_exported(path, torch.zeros(2, 3))


def test_rows_of_other_clients_are_said(exported, tmp_path):
    _, data, models, new = exported
    mixed = new.assign(site=[" Lyon", "Nice", "Paris", None] * 10)
    mixed.to_csv(tmp_path / "mixed.csv", index=False)
    said = r"by the model of Lyon, too: 20 of 40, in the column 'site' Nice, Paris; remove them"
    with pytest.warns(UserWarning, match=said):
        predict_exported(models / "client_0.pt", tmp_path / "mixed.csv")
    with pytest.warns(UserWarning, match=said):
        data.inputs_of(mixed, "Lyon")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict_exported(models / "client_0.pt", new.assign(site="Lyon"))
        data.inputs_of(mixed)


def test_the_command_says_what_is_wrong_with_rows_and_ends_with_2(exported, tmp_path, capsys):
    _, _, models, new = exported
    new.drop(columns="age").to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(SystemExit, match="2"):
        main(["predict", "--exported", str(models / "client_0.pt"), "--inputs", str(tmp_path / "rows.csv")])
    assert "pfl: rows have no column 'age'" in capsys.readouterr().err


def test_batches_of_other_data(tmp_path):
    data = Digits(IID(3), batch_size=500)
    federation = Federation("FedAvg", "mlp", seed=0)
    quiet_trainer(1).fit(federation, datamodule=data)
    (path,) = export_clients(federation, tmp_path, clients=[1])
    own = data.client_data(1).test
    found = predict_exported(path, own.raw_inputs.numpy())
    assert torch.equal(found.probabilities, federation.predict(1).probabilities)
    with pytest.raises(ConfigurationError, match=r"shape \(N, 1, 8, 8\), got \(2, 8\)"):
        predict_exported(path, torch.zeros(2, 8))
    with pytest.raises(ConfigurationError, match=r"expected a batch \(N, ...\), got a DataFrame"):
        predict_exported(path, pd.DataFrame({"a": [1]}))
