"""The stage after the training: a head on frozen features, or more, on every client's own data."""

import csv
import json
from functools import partial

import pytest
import torch
import yaml
from fake_cluster import fake_ray_fit
from torch.nn import functional as F
from toy import CLIENTS, Toy, assert_same, linear_encoder, quiet_trainer, run, tiny_encoder, whole_state

from pfl_lightning import FabricFit, TrainerFit, VectorizedFit
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli import main
from pfl_lightning.methods import FedAvg, FedBABU, FedClassAvg, FedPer, FedRoD, LGFedAvg
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import seeded_generator

SEED = 11


def personalize(federation, settings, engine=None, data=None):
    federation.local_fit = engine or FabricFit()
    with federation.personalized(settings):
        quiet_trainer(1).test(federation, data or Toy(), verbose=False)
    return dict(federation.test_scores)


def plain_probe(federation, client, settings):
    """Test loss after the stage, in plain torch: a new head on the features of the client's own encoder."""
    data = Toy()
    encoder = federation.load_client(client, federation.round).eval().encoder
    with torch.no_grad():
        features = {part: encoder(data.tensors(client, part)[0]) for part in ("train", "test")}
    targets = {part: data.tensors(client, part)[1] for part in ("train", "test")}
    head = torch.nn.Linear(4, 5)
    head.load_state_dict({name: value.clone() for name, value in first_head(federation, settings).items()})
    optimizer = torch.optim.SGD(
        head.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    generator = seeded_generator(SEED, "personalize/0", federation.round, client)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(targets["train"]), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head(features["train"][rows]), targets["train"][rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(head(features["test"]), targets["test"]))


def first_head(federation, settings):
    """The new head that all clients start from."""
    found = []

    class Looks(FabricFit):
        def start(self, models, data, environment):
            found.append({name: value.clone() for name, value in models[0].head.state_dict().items()})

    personalize(federation, settings, Looks())
    return found[0]


@pytest.mark.parametrize("method", [FedAvg, FedPer, LGFedAvg], ids=lambda method: method.__name__)
def test_a_new_head_is_that_of_a_plain_loop(method):
    settings = Personalization(epochs=4, lr=0.1, weight_decay=0.01, batch_size=5)
    federation = run(partial(method, lr=0.05, epochs=1), 2)
    expected = [plain_probe(federation, client, settings) for client in range(CLIENTS)]
    scores = personalize(federation, settings)
    assert [score.loss for score in scores.values()] == pytest.approx(expected, abs=1e-6)


def engines(monkeypatch):
    return {
        "TrainerFit": TrainerFit(),
        "VectorizedFit": VectorizedFit(forward="vmap"),
        "RayFit": fake_ray_fit(monkeypatch, 2)[0],
    }


@pytest.mark.parametrize("name", ["TrainerFit", "VectorizedFit", "RayFit"])
@pytest.mark.parametrize("train", ["linear", "head", "all"])
@pytest.mark.parametrize("method", [FedPer, FedRoD, FedClassAvg], ids=lambda method: method.__name__)
def test_engines_agree(method, train, name, monkeypatch):
    federation = run(partial(method, lr=0.05, epochs=1), 2)
    settings = Personalization(train, epochs=2, lr=0.05, batch_size=6)
    expected = personalize(federation, settings)
    found = personalize(federation, settings, engines(monkeypatch)[name])
    assert [s.accuracy for s in found.values()] == [s.accuracy for s in expected.values()]
    assert [s.loss for s in found.values()] == pytest.approx([s.loss for s in expected.values()], abs=1e-5)


def test_all_and_head_are_the_methods_own_fine_tuning():
    """FedAvg-FT, FedBABU and the stage share one mechanism."""
    for train in ("head", "all"):
        options = {"lr": 0.05, "epochs": 1, "momentum": 0.9, "weight_decay": 0.0}
        tuned = run(partial(FedAvg, fine_tune=train, fine_tune_epochs=3, **options), 2, data=Toy(batch_size=6))
        plain = run(partial(FedAvg, **options), 2, data=Toy(batch_size=6))
        settings = Personalization(train, epochs=3, lr=0.05, batch_size=6)
        assert personalize(plain, settings, data=Toy(batch_size=6)) == tuned.test_scores


def test_the_federation_stays_as_it_was():
    federation = run(partial(FedBABU, lr=0.05, epochs=1), 2)
    before, own = whole_state(federation), dict(federation.test_scores)
    for train in ("linear", "all"):
        personalize(federation, Personalization(train, lr=0.5))
    assert_same(whole_state(federation), before)
    quiet_trainer(1).test(federation, Toy(), verbose=False)
    assert federation.test_scores == own


def test_several_encoders_and_novel_clients():
    data = Toy(novel_clients=2)
    options = {"encoder": [tiny_encoder, linear_encoder], "loop": FederatedLoop()}
    federation = run(partial(LGFedAvg, lr=0.05, epochs=1), 2, data=data, **options)
    scores = personalize(federation, Personalization(lr=0.1, batch_size=6), data=Toy(novel_clients=2))
    assert sorted(scores) == list(range(CLIENTS))
    metrics = federation.trainer.callback_metrics
    novel = sum(scores[client].accuracy for client in data.novel) / 2
    assert float(metrics["novel_test_accuracy/mean"]) == pytest.approx(novel)
    vectorized = personalize(federation, Personalization(lr=0.1, batch_size=6), VectorizedFit(forward="vmap"))
    assert [s.loss for s in vectorized.values()] == pytest.approx([s.loss for s in scores.values()], abs=1e-5)


def test_features_are_computed_once():
    rows = []

    def encoder(shape):
        module = tiny_encoder(shape)
        module.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
        return module

    federation = run(partial(FedAvg, lr=0.05, epochs=1), 1, encoder=encoder)
    rows.clear()
    personalize(federation, Personalization(epochs=10, batch_size=4))
    sizes = [len(own) for own in Toy().labels]
    looks = sum(2 * min(16, size) for size in sizes)  # whether the encoder is as in evaluation mode
    assert sum(rows) == sum(sizes) + looks + 8 * CLIENTS  # training samples once, test samples once


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"train": "tail"}, "personalize.train must be"),
        ({"epochs": 0}, "personalize.epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "personalize.batch_size must be at least 1"),
        ({"lr": 0.0}, "personalize.lr must be"),
        ({"momentum": -0.1}, "personalize.momentum must be"),
    ],
)
def test_arguments_are_checked(options, error):
    with pytest.raises(ValueError, match=error):
        Personalization(**options)


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")
    data = {
        "novel_clients": 2,
        "partition": {
            "class_path": "pfl_lightning.datamodules.IID",
            "init_args": {"num_clients": 5, "samples_per_client": 30},
        },
    }
    content = {
        "run_dir": str(tmp_path / "runs"),
        "model": {
            "method": {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {"epochs": 1}},
            "encoder": "mlp",
        },
        "data": {"class_path": "pfl_lightning.datamodules.Digits", "init_args": data},
        "trainer": {"max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def results(tmp_path):
    folder = tmp_path / "runs" / "version_0"
    with (folder / "personalized.csv").open() as file:
        return json.loads((folder / "personalized.json").read_text()), list(csv.DictReader(file))


def test_fit_goes_on_with_the_stage_and_personalize_repeats_it(tmp_path, config, capsys):
    main(["fit", "--config", str(config), "--personalize.epochs", "3"])
    assert "personalized (a linear head, 3 epochs)" in capsys.readouterr().out
    found, rows = results(tmp_path)
    assert (found["participating"]["num_clients"], found["novel"]["num_clients"]) == (3, 2)
    assert found["personalization"]["epochs"] == 3
    accuracies = [float(row["test_accuracy"]) for row in rows if row["novel"] == "0"]
    assert found["participating"]["mean"] == pytest.approx(sum(accuracies) / 3)
    variance = sum((value - sum(accuracies) / 3) ** 2 for value in accuracies) / 3
    assert found["participating"]["variance"] == pytest.approx(variance)
    main(["personalize", "--config", str(config), "--ckpt_path", "last", "--personalize.epochs", "3"])
    assert results(tmp_path) == (found, rows)


def test_fit_alone_and_the_stage_alone(tmp_path, config):
    main(["fit", "--config", str(config)])
    assert not (tmp_path / "runs" / "version_0" / "personalized.json").exists()
    main(["personalize", "--config", str(config), "--ckpt_path", "last"])
    assert results(tmp_path)[0]["personalization"] == {
        "train": "linear",
        "epochs": 10,
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "batch_size": 32,
    }


def test_without_a_checkpoint_it_says_so(tmp_path, config):
    """Each client alone, for as many epochs as the stage has: the baseline Script-Fair."""
    with pytest.warns(UserWarning, match="a model that was not trained"):
        main(["personalize", "--config", str(config), "--personalize.train", "all"])
    assert results(tmp_path)[0]["participating"]["num_clients"] == 3


def test_each_client_alone_from_the_same_start(tmp_path, config):
    """Script-Fair and Script-Convergent: a fit of no rounds, then the stage, for both kinds of clients."""
    more = ["--config", str(config), "--model.method", "pfl_lightning.methods.LocalOnly", "--personalize.train", "all"]
    main(["fit", *more, "--personalize.epochs", "3", "--trainer.max_epochs", "0"])
    found, rows = results(tmp_path)
    assert (found["participating"]["num_clients"], found["novel"]["num_clients"]) == (3, 2)
    with pytest.warns(UserWarning, match="a model that was not trained"):
        main(["personalize", *more, "--personalize.epochs", "3", "--run_dir", str(tmp_path / "other")])
    again = json.loads((tmp_path / "other" / "version_0" / "personalized.json").read_text())
    assert again == found
    losses = {row["client"]: float(row["test_loss"]) for row in rows}
    main(["fit", *more, "--personalize.epochs", "30", "--trainer.max_epochs", "0", "--run_dir", str(tmp_path / "long")])
    with (tmp_path / "long" / "version_0" / "personalized.csv").open() as file:
        longer = {row["client"]: float(row["test_loss"]) for row in csv.DictReader(file)}
    assert all(longer[client] < losses[client] for client in losses)


def test_a_config_with_the_stage_can_be_told_to_train_alone(tmp_path, config):
    content = yaml.safe_load(config.read_text()) | {"personalize": {"train": "head", "epochs": 2}}
    config.write_text(yaml.safe_dump(content))
    main(["fit", "--config", str(config), "--personalize", "null"])
    assert not (tmp_path / "runs" / "version_0" / "personalized.json").exists()
    main(["personalize", "--config", str(config), "--ckpt_path", "last"])
    found = results(tmp_path)[0]
    assert (found["personalization"]["train"], found["personalization"]["epochs"]) == ("head", 2)
    main(["fit", "--config", str(config), "--run_dir", str(tmp_path / "both")])
    both = json.loads((tmp_path / "both" / "version_0" / "personalized.json").read_text())
    assert both == found
