"""Exported models that are built again from their files alone, and exported graphs."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from _helpers.project import run_project
from _helpers.toy import CLIENTS, Toy, for_toy, quiet_trainer, run, tiny_encoder
from torch import nn

from pfl_lightning import Federation, export_clients, load_exported
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.encoders import MLP
from pfl_lightning.errors import ConfigurationError, NoSuchClientError
from pfl_lightning.methods import (
    APFL,
    FML,
    MOON,
    Calibre,
    Ditto,
    FedAvg,
    FedBN,
    FedEM,
    FedProto,
    FedRoD,
    HypCluster,
    KNNPer,
)
from pfl_lightning.phases import Personalization

READS = """
import sys, torch
from pfl_lightning import load_exported
inputs = torch.load(sys.argv[1], weights_only=True)
with torch.no_grad():
    torch.save([load_exported(path)(inputs) for path in sys.argv[3:]], sys.argv[2])
"""
GRAPHS = [FedAvg, Ditto, FedEM, APFL, MOON, HypCluster, FedRoD]


def scores(model, inputs):
    with torch.no_grad():
        return model(inputs)


def about(path):
    return json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize(
    ("method", "encoder"),
    [
        (partial(FedAvg, fine_tune="head"), partial(MLP, hidden=(7,), out_features=3)),
        (partial(FedEM, components=2), "small_cnn"),
        (partial(FML, partner="small_cnn"), ["mlp", "small_cnn"]),
        ("FedBN", "resnet18_small"),
    ],
)
def test_a_fresh_process_gives_the_same_scores(tmp_path, method, encoder):
    data = Digits(IID(3), batch_size=200)
    federation = Federation(method, encoder)
    quiet_trainer(1, FederatedLoop(cohort=2)).fit(federation, datamodule=data)
    paths = export_clients(federation, tmp_path)
    inputs = data.client_data(0).test.loader(20).tensors()[0]
    torch.save(inputs, tmp_path / "inputs")
    command = [sys.executable, "-c", READS, *map(str, (tmp_path / "inputs", tmp_path / "scores", *paths))]
    subprocess.run(command, check=True, timeout=300)
    for client, found in enumerate(torch.load(tmp_path / "scores", weights_only=True)):
        assert torch.equal(found, scores(federation.client_model(client).eval(), inputs)), client


def test_what_the_description_says(tmp_path):
    data = Digits(IID(3), batch_size=200)
    data.partition.client_names = ("north", "east", "west")
    federation = Federation(partial(FedAvg, epochs=1), partial(MLP, hidden=(7,)))
    quiet_trainer(1, FederatedLoop()).fit(federation, datamodule=data)
    [path] = export_clients(federation, tmp_path, ["west"])
    found = about(path)
    assert path.name == "client_2.pt"
    assert (found["client"], found["name"], found["input_shape"], found["image_size"]) == (2, "west", [1, 8, 8], [8, 8])
    assert found["mean"] == list(data.transform.mean)
    assert found["recipe"] == {
        "encoder": {"class_path": "pfl_lightning.encoders.mlp.MLP", "init_args": {"hidden": [7]}},
        "method": {"class_path": "pfl_lightning.methods.fedavg.FedAvg", "init_args": {"epochs": 1}},
        "num_classes": 10,
    }
    assert torch.equal(federation.client_model("west").head.weight, federation.client_model(2).head.weight)
    with pytest.raises(NoSuchClientError, match=r"no client wst; did you mean 'west'.*clients are 0 to 2, or 'north'"):
        export_clients(federation, tmp_path, ["wst"])


def test_a_personalized_client(tmp_path):
    federation, data = run(FedAvg, 1, encoder="mlp"), Toy()
    with federation.personalized(Personalization("linear", epochs=2)):
        [path] = export_clients(federation, tmp_path, [1])
        inputs = data.tensors(1, "test")[0]
        assert torch.equal(scores(load_exported(path), inputs), scores(federation.client_model(1).eval(), inputs))


class Wide(nn.Module):
    """An encoder of the user's own, whose optimizer is a function of the user's own."""

    def __init__(self, input_shape, wide=3):
        super().__init__()
        self.out_features = wide
        self.layer = nn.Linear(input_shape[0], wide)

    def forward(self, inputs):
        return self.layer(inputs)


def test_an_encoder_and_an_optimizer_of_the_users_own(tmp_path):
    method = partial(FedBN, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    federation = run(method, 1, encoder=partial(Wide, wide=6))
    [path] = export_clients(federation, tmp_path, [3])
    inputs = Toy().tensors(3, "test")[0]
    assert torch.equal(scores(load_exported(path), inputs), scores(federation.client_model(3), inputs))
    assert about(path)["recipe"]["method"]["init_args"] == {}


@pytest.mark.parametrize(
    ("method", "encoder", "why"),
    [
        (for_toy(KNNPer), "mlp", "predicts with more than the state_dict holds"),
        (for_toy(FedProto), "mlp", "predicts with more than the state_dict holds"),
        (lambda encoder, classes: FedEM(encoder, classes, components=2), "mlp", "size mismatch for mixture"),
        (FedAvg, lambda shape: tiny_encoder(shape), "<lambda>"),
        (FedAvg, tiny_encoder((6,)), "given as a module"),
        (for_toy(Calibre), "mlp", "trains no head"),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, recwarn, method, encoder, why):
    [path] = export_clients(run(method, 1, encoder=encoder), tmp_path, [2])
    with pytest.raises(ConfigurationError, match=f"client_2.pt: client 2's model cannot be built.*{why}"):
        load_exported(path)


@pytest.mark.parametrize("ending", [".pt", ".json"])
@pytest.mark.parametrize("left", [0.0, 0.5, None])
def test_a_damaged_or_missing_file_is_named(tmp_path, ending, left):
    (path,) = export_clients(run("FedPer", 1), tmp_path, [3])
    file = path.with_suffix(ending)
    content = file.read_bytes()
    if left is None:
        file.unlink()
    else:
        file.write_bytes(content[: int(left * len(content))])
    with pytest.raises(ConfigurationError, match=rf"client_3\{ending}.*(the client again|from one export)"):
        load_exported(path)


def test_files_that_do_not_fit(tmp_path):
    [one, two] = export_clients(run(FedAvg, 1, encoder="mlp"), tmp_path, [0, 1])
    whole, state = one.with_suffix(".json").read_text(), torch.load(one, weights_only=True)
    for content, said in (
        (
            whole.replace('"pfl_lightning.methods.fedavg.FedAvg"', '"os.getcwd"'),
            "os.getcwd is not the client of a method",
        ),
        (whole.replace("encoders.mlp.MLP", "encoders.mlp.ML"), "has no 'ML'"),
        (whole.replace('"num_classes": 5', '"num_classes": 4'), "size mismatch"),
        (json.dumps({"client": 0, "model": "mlp"}), "by an earlier version: export it again"),
    ):
        assert content != whole
        one.with_suffix(".json").write_text(content)
        with pytest.raises(ConfigurationError, match=f"client 0's model cannot be built.*{said}"):
            load_exported(one)
    one.with_suffix(".json").write_text(whole)
    torch.save({name: value for name, value in state.items() if name != "head.bias"}, one)
    with pytest.raises(ConfigurationError, match=r"state_dict and description differ in head.bias"):
        load_exported(one)
    assert load_exported(two.with_suffix(".json")).head.out_features == 5


def test_a_module_of_the_users_own(tmp_path):
    federation, _ = run_project(FedAvg)
    [path] = export_clients(federation, tmp_path, [1])
    with pytest.raises(ConfigurationError, match=r"it is your own Net: make one and load the state_dict"):
        load_exported(path)
    with pytest.raises(
        ConfigurationError, match=r"client 1: .*FedAvg cannot be exported as torch_export: it is your own Net"
    ):
        export_clients(federation, tmp_path, [1], "torch_export")


# ---------------------------------------------------------------------- graphs


def graph_of(path, inputs):
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(inputs)
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return torch.from_numpy(session.run(["scores"], {"inputs": inputs.numpy()})[0])


@pytest.mark.parametrize("format", ["torch_export", "onnx"])
@pytest.mark.parametrize("method", GRAPHS)
def test_graphs_predict_as_the_model(tmp_path, method, format):
    if format == "onnx":
        pytest.importorskip("onnxscript")
    federation = run(for_toy(method, lr=0.1), 2)
    [path] = export_clients(federation, tmp_path, [1], format)
    for part in ("test", "train"):  # of another size than the batch that was traced
        inputs = Toy().tensors(1, part)[0]
        expected = scores(federation.client_model(1).eval(), inputs)
        torch.testing.assert_close(graph_of(path, inputs), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(graph_of(path, inputs[:1]), expected[:1], rtol=0, atol=1e-6)
    assert about(path)["client"] == 1


@pytest.mark.parametrize("method", [KNNPer, FedProto])
def test_the_graph_of_torch_has_neighbors_and_prototypes(tmp_path, recwarn, method):
    federation = run(for_toy(method, lr=0.1), 1)
    [path] = export_clients(federation, tmp_path, [1], "torch_export")
    inputs = Toy().tensors(1, "train")[0]
    assert torch.equal(graph_of(path, inputs), scores(federation.client_model(1).eval(), inputs))
    assert not [one for one in recwarn if "exported models of" in str(one.message)]
    pytest.importorskip("onnxscript")
    with pytest.raises(
        ConfigurationError, match=f"client 1: the model of {method.__name__} cannot be exported as onnx"
    ):
        export_clients(federation, tmp_path, [1], "onnx")


def test_a_single_sample_is_enough(tmp_path):
    federation = run(FedAvg, 1, data=Toy(test=[1] * CLIENTS))
    [path] = export_clients(federation, tmp_path, [1], "torch_export")
    inputs = Toy().tensors(1, "train")[0]
    assert torch.equal(graph_of(path, inputs), scores(federation.client_model(1).eval(), inputs))


def test_the_graph_holds_nothing_of_training(tmp_path):
    """Ditto's global model is no part of what is exported."""
    [path] = export_clients(run(Ditto, 1), tmp_path, [0], "torch_export")
    assert {name.partition(".")[0] for name in torch.export.load(path).state_dict} == {"encoder", "head"}


def test_what_has_no_graph(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"client 0: .*Calibre cannot be exported.*no head was trained"):
        export_clients(run(for_toy(Calibre), 1), tmp_path, [0], "torch_export")
    federation = run(FedAvg, 1)
    with pytest.raises(ValueError, match="format must be"):
        export_clients(federation, tmp_path, [0], "onx")

    def encoder(input_shape):
        network = tiny_encoder(input_shape)
        network.register_forward_hook(lambda *args: args[2] + float(args[2].sum() > 0))  # depends on data
        return network

    with pytest.raises(ConfigurationError, match=r"client 0: .*cannot be exported as torch_export .*state_dict"):
        export_clients(run(FedAvg, 1, encoder=encoder), tmp_path, [0], "torch_export")
    monkeypatch.setattr(torch, "allclose", lambda *args, **options: False)
    with pytest.raises(
        ConfigurationError, match=r"client 0: .*the file's scores on its data differ from the model's by"
    ):
        export_clients(federation, tmp_path, [0], "torch_export")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'pfl-lightning\[onnx\]'"):
        export_clients(federation, tmp_path, [0], "onnx")
    assert not list(tmp_path.iterdir())
