"""Predictions of clients' own models, in Python and on the command line."""

import csv
import io
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _helpers.project import run_project
from _helpers.toy import CLIENTS, Toy, for_toy, quiet_trainer, run
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import Federation, predict_clients
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli import main
from pfl_lightning.datamodules import IID, ConceptShift, Digits
from pfl_lightning.errors import ConfigurationError, FederationError, NoSuchClientError, UsageError
from pfl_lightning.methods import APFL, Calibre, FedAvg, FedEM, FedPer, FedProto, KNNPer
from pfl_lightning.phases import Personalization

CONFIG = Path(__file__).parents[2] / "configs" / "fedper_digits.yaml"


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def accuracy_of(rows):
    return sum(row["label"] == row["prediction"] for row in rows) / len(rows)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("method", [partial(FedPer, fine_tune="head"), FedEM, APFL, KNNPer, FedProto])
def test_the_table_has_the_accuracy_of_the_evaluation(recwarn, method, precision):
    method = for_toy(method.func, lr=0.1, **method.keywords) if isinstance(method, partial) else for_toy(method, lr=0.1)
    federation = run(method, 2, precision=precision)
    quiet_trainer(1, precision=precision).test(federation, datamodule=Toy(), verbose=False)
    for client in range(CLIENTS):
        found, score = federation.predict(client), federation.test_scores[client]
        rows = rows_of(found.table())
        assert accuracy_of(rows) == found.accuracy == score.accuracy
        right = [float(row[f"probability {row['label']}"]) for row in rows]
        tolerance = 2e-2 if precision == "bf16-mixed" else 1e-5
        assert -np.log(right).mean() == pytest.approx(score.loss, abs=tolerance)


def test_given_inputs_are_normalized_as_the_clients_own():
    data = Digits(IID(3), batch_size=200)
    federation = Federation(FedAvg, "mlp")
    quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=data)
    data.partition.client_names = ("north", "east", "west")
    test = data.client_data(1).test
    own = federation.predict("east")
    for inputs in (test.raw_inputs, test.raw_inputs.numpy()):
        given = federation.predict("east", inputs)
        assert torch.equal(given.probabilities, own.probabilities)
        assert (given.client, given.labels, given.accuracy) == (1, None, None)
        assert list(rows_of(given.table())[0])[:3] == ["sample", "prediction", "probability 0"]
    assert torch.equal(own.labels, test.targets)
    model = federation.client_model(1).eval()
    with torch.no_grad():
        expected = model(test.loader(len(test)).tensors()[0]).softmax(1)
    torch.testing.assert_close(own.probabilities, expected)


def test_bytes_and_shares_of_them():
    class Bytes(Toy):
        def load(self):
            samples = super().load()
            vars(samples)["train_inputs"] = (20 * samples.train_inputs + 128).clamp(0, 255).byte()
            vars(samples)["test_inputs"] = (20 * samples.test_inputs + 128).clamp(0, 255).byte()
            return samples

    data = Bytes()
    federation = run(FedAvg, 1, data=data)
    inputs = data.client_data(0).test.raw_inputs
    found = federation.predict(0, inputs)
    torch.testing.assert_close(federation.predict(0, inputs.double() / 255).probabilities, found.probabilities)
    for wrong, got in ((inputs.float(), "torch.float32"), (inputs.long(), "torch.int64")):
        with pytest.raises(ConfigurationError, match=rf"inputs of client 0: expected torch.uint8 .*0 to 1, got {got}"):
            federation.predict(0, wrong)


def test_names_are_in_the_clients_own_order():
    data = Digits(ConceptShift(IID(4), 2), batch_size=200)
    federation = Federation(FedAvg, "mlp")
    trainer = quiet_trainer(1, FederatedLoop())
    trainer.fit(federation, datamodule=data)
    for client in range(4):
        test = data.client_data(client).test
        order = data.partition.client_view(client, 10).label_map or range(10)
        names = dict(zip(order, map(str, range(10)), strict=True))
        rows = rows_of(federation.predict(client).table())
        assert [row["label"] for row in rows] == [names[target] for target in test.targets.tolist()]
        assert accuracy_of(rows) == federation.test_scores[client].accuracy


def test_a_personalized_client_and_one_without_a_head(recwarn):
    federation, data = run(for_toy(Calibre), 1), Toy()
    with pytest.raises(ConfigurationError, match="client 2 has no class scores: Calibre trains no head"):
        federation.predict(2)
    with federation.personalized(Personalization("linear", epochs=2)):
        quiet_trainer(1).test(federation, data, verbose=False)
        assert federation.predict(2).accuracy == federation.test_scores[2].accuracy


def test_scores_of_nan_are_no_prediction():
    found = run(FedAvg, 1).predict(0, torch.full((2, 6), float("nan")))
    assert found.classes.tolist() == [-1, -1]
    assert [row["prediction"] for row in rows_of(found.table())] == ["", ""]


def test_what_is_refused():
    with pytest.raises(FederationError, match="there are no clients before"):
        Federation(FedAvg, "mlp").predict(0)
    federation = run(FedAvg, 1, data=Toy(test=[0, *[3] * (CLIENTS - 1)]))
    for shape in ((6,), (3, 5), (0, 6), (2, 6, 1)):
        said = rf"inputs of client 1: expected torch.float32 of shape \(N, 6\).*of shape \({shape[0]},"
        with pytest.raises(ConfigurationError, match=said):
            federation.predict(1, torch.zeros(shape))
    with pytest.raises(ConfigurationError, match="client 0 has no test samples: pass inputs"):
        federation.predict(0)
    with pytest.raises(NoSuchClientError, match="there is no client 5; clients are 0 to 4"):
        federation.predict(5)
    with pytest.raises(NoSuchClientError, match="there is no client west; clients are 0 to 4"):
        federation.predict("west")
    own, _ = run_project(FedAvg)
    with pytest.raises(ConfigurationError, match=r"client 1 has your own Net: predict_clients\("):
        own.predict(1)


def test_predict_clients_gives_the_same_of_batches_with_labels():
    federation, data = run(FedPer, 1), Toy()
    loader = DataLoader(TensorDataset(*data.tensors(3, "test")), batch_size=7)
    found = torch.cat(predict_clients(federation, loader, clients=[3])[3])
    assert torch.equal(found.softmax(1), federation.predict(3).probabilities)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_DEBUG", "1")
    options = [
        *("--config", str(CONFIG), "--run_dir", str(tmp_path / "runs"), "--model.encoder", "mlp"),
        *("--data.init_args.partition.init_args.num_clients", "3"),
        *("--data.init_args.partition.init_args.samples_per_client", "30"),
        *("--model.method.init_args.epochs", "1", "--trainer.enable_model_summary", "false"),
    ]
    main(["fit", *options, "--trainer.max_epochs", "1", "--loop.cohort", "2"])
    main(["test", *options, "--ckpt_path", "last"])
    run = tmp_path / "runs" / "version_0"
    tested = rows_of((run / "test_clients.csv").read_text())
    idle = next(int(row["client"]) for row in tested if row["rounds_trained"] == "0")
    for client in range(3):
        with warnings.catch_warnings(record=True, action="always") as caught:
            main(["predict", *options, "--ckpt_path", "last", "--client", str(client)])
        told = [one for one in caught if "has trained in no round of this checkpoint" in str(one.message)]
        assert bool(told) == (client == idle)
        rows = rows_of((run / "predictions" / f"client_{client}.csv").read_text())
        assert accuracy_of(rows) == float(tested[client]["test_accuracy"])
        assert f"accuracy {100 * accuracy_of(rows):.2f} %" in capsys.readouterr().out
    trained = str((idle + 1) % 3)
    inputs = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "some.npy", inputs)
    torch.save(torch.from_numpy(inputs), tmp_path / "other.pt")
    words = ["predict", *options, "--ckpt_path", "last", "--client", trained, "--output", str(tmp_path / "out")]
    for name in ("some.npy", "other.pt"):
        main([*words, "--inputs", str(tmp_path / name)])
    one, two = (tmp_path / "out" / f"client_{trained}_{name}.csv" for name in ("some", "other"))
    assert one.read_text() == two.read_text()
    assert len(rows_of(one.read_text())) == 5
    (tmp_path / "bad.npy").write_text("no array")
    np.save(tmp_path / "wide.npy", np.zeros((5, 1, 9, 9), np.float32))
    for name, said in (
        ("bad.npy", "--inputs .*bad.npy"),
        ("none.npy", "--inputs .*No such file"),
        ("some.csv", "expected .npy, .pt or a folder of images"),
        (".", "the folder has no images"),
        ("wide.npy", r"expected torch.uint8 of shape \(N, 1, 8, 8\).* got .*\(5, 1, 9, 9\)"),
    ):
        with pytest.raises(UsageError, match=said):
            main([*words, "--inputs", str(tmp_path / name)])
    with pytest.raises(UsageError, match="there is no client 7; clients are 0 to 2"):
        main([*words, "--client", "7"])


def test_a_folder_of_images(tmp_path):
    from pfl_lightning.cli.trainer import read_inputs

    class Data:
        input_shape, image_size = (1, 8, 8), 8

    for name, shade in (("b.png", 10), ("a.png", 200)):
        Image.new("L", (16, 16), shade).save(tmp_path / name)
    found, names = read_inputs(tmp_path, Data())
    assert names == ["a.png", "b.png"]
    assert found.shape == (2, 1, 8, 8)
    assert found[:, 0, 0, 0].tolist() == [200, 10]
