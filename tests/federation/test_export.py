"""Clients' models as plain files."""

import json
import pickletools
import zipfile
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLIENTS, Toy, assert_same, quiet_trainer, run, tiny_encoder
from torch import nn

from pfl_lightning import Federation, export_clients, federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli import main
from pfl_lightning.datamodules import IID, ConceptShift, Digits
from pfl_lightning.encoders import build_encoder
from pfl_lightning.errors import FederationError, UsageError
from pfl_lightning.methods import Calibre, Ditto, FedAvg, FedPer, FedRep
from pfl_lightning.phases import Personalization

NAMES = ("method", "round", "client", "model")
CONFIG = Path(__file__).parents[2] / "configs" / "fedper_digits.yaml"


def read(path):
    return torch.load(path, weights_only=True), json.loads(path.with_suffix(".json").read_text())


def test_encoder_and_head(tmp_path):
    federation = run(partial(FedRep, lr=0.1), 2)
    written = export_clients(federation, tmp_path / "clients")
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == sorted(
        f"client_{client}.{kind}" for client in range(CLIENTS) for kind in ("json", "pt")
    )
    for client, path in enumerate(written):
        state, about = read(path)
        assert_same(state, dict(federation.client_model(client).state_dict()))
        assert {key: about[key] for key in NAMES} == dict(
            zip(NAMES, ("FedRep", 2, client, "tiny_encoder"), strict=True)
        )
        assert (about["mean"], about["std"]) == (None, None)
        plain = nn.ModuleDict({"encoder": tiny_encoder((6,)), "head": nn.Linear(4, 5)})
        plain.load_state_dict(state)
        inputs = torch.randn(3, 6)
        torch.testing.assert_close(plain["head"](plain["encoder"](inputs)), federation.client_model(client)(inputs))


def test_what_a_fine_tuning_makes_of_it_is_written(tmp_path):
    federation = run(partial(FedAvg, fine_tune="head", fine_tune_lr=0.5), 1)
    [path] = export_clients(federation, tmp_path, [2])
    state, _ = read(path)
    assert_same(state, dict(federation.client_model(2).state_dict()))
    assert not torch.equal(state["head.weight"], federation.server.weights.as_state()["head.weight"])


@pytest.mark.parametrize("train", ["linear", "linear+encoder", "head", "all"])
def test_personalized_clients_are_written_inside_of_a_personalization(tmp_path, train):
    federation, data, settings = run(FedAvg, 1), Toy(), Personalization(train, epochs=3, lr=0.1, batch_size=5)
    before = dict(federation.client_model(0).state_dict())
    with federation.personalized(settings):
        quiet_trainer(1).test(federation, data, verbose=False)
        written = export_clients(federation, tmp_path)
    plain = nn.ModuleDict({"encoder": tiny_encoder((6,)), "head": nn.Linear(4, 5)}).eval()
    for client, path in enumerate(written):
        plain.load_state_dict(read(path)[0])
        inputs, targets = data.tensors(client, "test")
        loss = nn.functional.cross_entropy(plain["head"](plain["encoder"](inputs)), targets)
        assert loss.item() == pytest.approx(federation.test_scores[client].loss, abs=1e-6)
    assert_same(dict(federation.client_model(0).state_dict()), before)


def test_a_personalized_client_in_double_precision_and_within_a_test(tmp_path):
    """Asking for a client's model disturbs no test under way."""
    settings = Personalization("head", epochs=3, lr=0.1, batch_size=5)
    federation, data = run(FedAvg, 1, precision="64-true"), Toy()

    class Asks(L.Callback):
        def on_test_batch_end(self, trainer, pl_module, *args):
            pl_module.client_model(0)

    found = []
    for callbacks in ((), (Asks(),)):
        with federation.personalized(settings):
            quiet_trainer(1, *callbacks, precision="64-true").test(federation, data, verbose=False)
        found.append({client: score.loss for client, score in federation.test_scores.items()})
    assert found[0] == found[1]
    with federation.personalized(Personalization("linear", epochs=1)):
        [path] = export_clients(federation, tmp_path, [0])
    assert read(path)[0]["head.weight"].dtype == torch.float64


def test_outputs_have_the_names_that_a_client_gives_them(tmp_path):
    data = Digits(ConceptShift(IID(4), 2))
    federation = Federation(partial(FedAvg, epochs=1), encoder="mlp")
    quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=data)
    for client, path in enumerate(export_clients(federation, tmp_path)):
        order = data.partition.client_view(client, 10).label_map or range(10)
        classes = read(path)[1]["classes"]
        assert [classes[output] for output in order] == [str(number) for number in range(10)]
    assert read(tmp_path / "client_0.pt")[1]["classes"] != read(tmp_path / "client_3.pt")[1]["classes"]


def test_a_head_that_nothing_has_trained_has_no_classes(tmp_path):
    federation = Federation(partial(Calibre, epochs=1), encoder="mlp")
    data = Digits(IID(4), batch_size=100, augment=True)
    quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=data)
    with pytest.warns(UserWarning, match="Calibre trains no head.*export personalized clients"):
        [path] = export_clients(federation, tmp_path, [0])
    assert read(path)[1]["classes"] is None
    with federation.personalized(Personalization(epochs=1)):
        [path] = export_clients(federation, tmp_path, [0])
    assert read(path)[1]["classes"] == [str(number) for number in range(10)]


def test_dittos_global_model_is_left_out(tmp_path):
    federation = run(Ditto, 1)
    state, _ = read(export_clients(federation, tmp_path, [0])[0])
    assert {name.partition(".")[0] for name in state} == {"encoder", "head"}


def test_a_project_s_own_names(tmp_path):
    federation, _ = run_project(FedPer, head="fc")
    for client, path in enumerate(export_clients(federation, tmp_path)):
        state, about = read(path)
        assert about["model"] == "Net"
        own = Net()
        own.load_state_dict(state)
        assert_same(dict(own.state_dict()), dict(federation.client_model(client).state_dict()))
    assert not torch.equal(
        read(tmp_path / "client_0.pt")[0]["fc.weight"], read(tmp_path / "client_1.pt")[0]["fc.weight"]
    )


def test_a_file_loads_without_the_package(tmp_path):
    federation, _ = run_project(FedPer, head="fc")
    [path] = export_clients(federation, tmp_path, [3])
    with zipfile.ZipFile(path) as file:
        [name] = [name for name in file.namelist() if name.endswith("data.pkl")]
        named = [text for code, text, _ in pickletools.genops(file.read(name)) if code.name == "GLOBAL"]
    assert {text.partition(" ")[0].partition(".")[0] for text in named} == {"collections", "torch"}
    assert sorted(read(path)[0]) == sorted(Net().state_dict())


def test_there_must_be_clients(tmp_path):
    with pytest.raises(FederationError, match="there are no clients before"):
        export_clients(Federation(FedAvg, tiny_encoder), tmp_path)
    with pytest.raises(FederationError, match="there are no clients before"):
        export_clients(federate(Net(), Data(), FedAvg, num_clients=2)[0], tmp_path)
    with pytest.raises(IndexError, match="there is no client 7"):
        export_clients(run(FedAvg, 1), tmp_path, [7])
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_not_trained_has_no_round(tmp_path):
    federation = Federation(FedAvg, tiny_encoder)
    trainer = quiet_trainer(1, FederatedLoop(), enable_checkpointing=True)
    trainer.validate(federation, datamodule=Toy(), verbose=False)
    (path,) = export_clients(federation, tmp_path, [0])
    assert read(path)[1]["round"] == 0
    trainer.fit(federation, datamodule=Toy())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = Federation(FedAvg, tiny_encoder)
    quiet_trainer(1).validate(again, datamodule=Toy(), ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    for trained in (federation, again):
        (path,) = export_clients(trained, tmp_path, [0])
        assert read(path)[1]["round"] == 1


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_DEBUG", "1")
    options = [
        *("--config", str(CONFIG), "--run_dir", str(tmp_path / "runs"), "--model.encoder", "mlp"),
        *("--data.init_args.partition.init_args.num_clients", "3"),
        *("--data.init_args.partition.init_args.samples_per_client", "30"),
        *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    ]
    main(["fit", *options, "--trainer.max_epochs", "2", "--model.method.init_args.epochs", "1"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    main(["export", *options, "--ckpt_path", "last", "--output", str(tmp_path / "out")])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    assert "Saved 3 models" in capsys.readouterr().out
    checkpoint = torch.load(tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
    for client in range(3):
        state, about = read(tmp_path / "out" / f"client_{client}.pt")
        assert {key: about[key] for key in NAMES} == dict(zip(NAMES, ("FedPer", 2, client, "mlp"), strict=True))
        for name, value in state.items():
            if name.startswith("encoder."):  # FedPer's is the server's
                assert torch.equal(value, checkpoint["state_dict"][f"server.weights.{name.replace('.', '/')}"]), name
    main(["export", *options, "--ckpt_path", "last", "--clients", "[1,1]"])
    names = sorted(path.name for path in (tmp_path / "runs" / "version_0" / "clients").iterdir())
    assert names == ["client_1.json", "client_1.pt"]
    for words, said in (
        (["--clients", "[3]"], "there is no client 3; clients are 0 to 2"),
        (["--clients", "[]"], "no client is named"),
        (["--output", str(CONFIG)], "File exists"),
    ):
        with pytest.raises((UsageError, OSError), match=said):
            main(["export", *options, "--ckpt_path", "last", *words])
    main(["export", *options, "--ckpt_path", "last", "--output", str(tmp_path / "own"), "--personalize.train", "head"])
    assert "personalized (head)" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="pfl export without --ckpt_path exports a model that was not trained"):
        main(["export", *options, "--output", str(tmp_path / "untrained"), "--clients", "[0]"])


def test_the_files_say_how_inputs_are_normalized(tmp_path):
    """Images read elsewhere and a module that was built by hand give the accuracy of the run."""
    data = Digits(partition=IID(num_clients=2, seed=0), seed=0)
    federation = Federation(FedAvg, "mlp")
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    for client, path in enumerate(export_clients(federation, tmp_path)):
        state, about = read(path)
        test = data.client_data(client).test
        net = nn.ModuleDict({"encoder": build_encoder("mlp", data.input_shape), "head": nn.Linear(64, 10)})
        net.load_state_dict(state)
        stored = test.raw_inputs
        images = stored.double() / 255 if stored.dtype == torch.uint8 else stored.double()
        mean, std = (torch.tensor(about[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        inputs = ((images - mean) / std).float()
        found = net["head"](net["encoder"](inputs)).argmax(1)
        assert (found == test.targets).double().mean() == pytest.approx(federation.test_scores[client].accuracy)
        assert about["classes"] == [str(digit) for digit in range(10)]
