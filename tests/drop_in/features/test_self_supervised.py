"""Self-supervised methods on a user's module equal the built-in ones, parameter by parameter."""

import copy
import logging
import pickle
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import (
    CLIENTS,
    SMALL_BYOL,
    SMALL_SIMCLR,
    GivenCohorts,
    Toy,
    assert_same,
    own_model,
    quiet_trainer,
    run,
)
from _helpers.views import ToyViews, flat_encoder
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import PFLSSL, Calibre, FedEMA
from pfl_lightning.phases import Personalization
from pfl_lightning.self_supervised import OBJECTIVES
from pfl_lightning.self_supervised.objective import joined

LR, COHORTS = 0.05, [[0, 2], [1, 2]]
SGD = {"lr": LR, "momentum": 0.5, "weight_decay": 5e-4}
NEEDS = {"mocov2": {"bank": 6}, "smog": {"groups": 5}}  # of what seven samples can give


class FlatNet(Net):
    """The network, for images of one pixel."""

    def __init__(self, lr=LR):
        super().__init__(lr)
        self.body = nn.Sequential(nn.Flatten(), *self.body)


def small(make, **options):
    """Makes an objective whose weights are the same, however many random numbers were drawn before."""

    def objective(encoder):
        made = make(encoder, **{"hidden": 6, "out": 5, **options})
        with torch.no_grad():
            for number, (name, parameter) in enumerate(made.named_parameters()):
                if parameter.ndim > 1:
                    parameter.copy_(torch.linspace(-0.4, 0.5 + 0.1 * number, parameter.numel()).view_as(parameter))
                elif name.endswith("bias"):
                    parameter.zero_()
        if hasattr(made, "target"):  # of a client that never trains, too
            made.target.start(encoder, made.projector)
            made.target.forget()
        return made

    return objective


METHODS = {
    **{
        f"PFLSSL {name}": (PFLSSL, {"objective": small(OBJECTIVES[name], **NEEDS.get(name, {}))}) for name in OBJECTIVES
    },
    "Calibre": (Calibre, {"objective": small(SMALL_SIMCLR), "clusters": 3}),
    "Calibre by samples": (Calibre, {"objective": small(SMALL_BYOL), "clusters": 3, "aggregation": "samples"}),
    "FedEMA": (FedEMA, {"objective": small(SMALL_BYOL)}),
    "FedEMA of targets": (
        FedEMA,
        {"objective": small(SMALL_BYOL), "aggregate_encoder": "target", "update_target": "global"},
    ),
}


def fitted(method, data=None, *, module=None, cohorts=COHORTS, **options):
    """A federation of a user's module on the toy images, whose two views differ by noise."""
    federation, data = federate(module or FlatNet(), data or ToyViews(drop_last=True), method, seed=11, **options)
    federation.tests_in_fits = True
    trainer = quiet_trainer(len(cohorts), GivenCohorts(*cohorts))
    trainer.fit(federation, datamodule=data)
    return federation, trainer


def as_builtin(state):
    """The client's tensors under the names of encoder and head."""
    pairs = (("module.", ""), ("module/", ""), ("body", "encoder"), ("fc.", "head."), ("fc/", "head/"))
    found = {}
    for name, tensor in state.items():
        for own, builtin in pairs:
            name = name.replace(own, builtin)
        found[name] = tensor
    return found


def tensors(federation):
    """All that clients keep and the server sends, but what of the head a target network has copied."""
    found = {}
    for client in range(CLIENTS):
        own = as_builtin(federation.personal.get(client))
        found |= {f"client {client} {name}": t for name, t in own.items()}
        state = as_builtin(own_model(federation, client).state_dict())
        found |= {f"model {client} {name}": t for name, t in state.items()}
    found |= {f"sent {n}": t for n, t in as_builtin(federation.server.broadcast(1, 2).weights).items()}
    return {
        name.replace("copies.0.encoder.", "copies.0."): t for name, t in found.items() if "copies.0.head" not in name
    }


OBJECTIVE = small(SMALL_SIMCLR)
ENGINES = [*((name, TrainerEngine) for name in METHODS), ("Calibre", SequentialEngine), ("FedEMA", VectorizedEngine)]


@pytest.mark.repeated
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_a_module_trains_as_the_built_in_method(name, engine):
    method, options = METHODS[name]
    data = ToyViews(drop_last=True)
    builtin = run(partial(method, epochs=1, **options, **SGD), 2, cohorts=COHORTS, data=data, encoder=flat_encoder)
    federation, trainer = fitted(method, engine=engine(), epochs=1, **options)
    assert_same(tensors(federation), tensors(builtin), atol=0.0)
    assert trainer.callback_metrics["train/self_supervised"].isfinite()
    assert type(federation.client_model(1)) is FlatNet
    for client in range(CLIENTS):  # by nearest neighbors
        assert federation.test_scores[client].accuracy == pytest.approx(builtin.test_scores[client].accuracy)


@pytest.mark.parametrize("engine", [TrainerEngine, SequentialEngine])
def test_the_rate_of_a_round_is_a_share_of_the_modules_own(engine):
    options = {"objective": small(SMALL_BYOL), "lr_schedule": "cosine", "epochs": 1}
    data = ToyViews(drop_last=True)
    builtin = run(partial(FedEMA, **options, **SGD), 2, cohorts=COHORTS, data=data, encoder=flat_encoder)
    federation, _ = fitted(FedEMA, engine=engine(), schedule="restart", **options)
    assert_same(tensors(federation), tensors(builtin), atol=0.0)
    with pytest.raises(ConfigurationError, match=r"rates continue from a client's last fit: use .*schedule='restart'"):
        fitted(FedEMA, cohorts=[[0]], engine=engine(), **options)


def test_a_new_head_is_that_of_the_built_in_method():
    options, data = {"objective": OBJECTIVE, "clusters": 3, "epochs": 1}, ToyViews(drop_last=True)
    builtin = run(partial(Calibre, **options, **SGD), data=data, encoder=flat_encoder, cohorts=[[0]])
    federation, _ = fitted(Calibre, cohorts=[[0]], **options)
    tuned, expected = (after_a_new_head(one) for one in (federation, builtin))
    for client in range(CLIENTS):
        assert tuned[client].accuracy == pytest.approx(expected[client].accuracy)
        assert tuned[client].logged["test_loss"] == pytest.approx(expected[client].loss, rel=1e-5)


def after_a_new_head(federation):
    """Every client's scores after a personalization."""
    trainer = federation.trainer
    with federation.personalized(Personalization("linear", epochs=2, lr=0.1, batch_size=4)):
        trainer.test(federation, datamodule=trainer.datamodule, verbose=False)
    return dict(federation.test_scores)


def test_two_views_are_two_readings_of_an_item(caplog):
    options = {"objective": OBJECTIVE, "clusters": 3, "epochs": 1}
    data = Toy()
    with pytest.warns(UserWarning, match="the views are equal"):
        builtin = run(partial(Calibre, **options, **SGD), 2, cohorts=COHORTS, data=data)
    with caplog.at_level(logging.WARNING, "pfl_lightning"):
        federation, _ = run_project(Calibre, 2, module=Net(LR), cohorts=COHORTS, **options)
    assert_same(tensors(federation), tensors(builtin), atol=1e-6)
    told = [record.getMessage() for record in caplog.records if "two views" in record.getMessage()]
    assert len(told) == 1
    assert "both are equal: the training Dataset has no random transform" in told[0]


class Noisy(torch.utils.data.Dataset):
    """Items under a random transform."""

    def __init__(self, samples):
        self.inputs, self.targets = samples.train_inputs, samples.train_targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, place):
        return {"words": self.inputs[place] + 0.1 * torch.randn(6), "topic": int(self.targets[place])}


class NoisyData(Data):
    """Dictionaries, noisy in the training."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Noisy(self.samples), batch_size=4, shuffle=True, **self.options)

    val_dataloader = train_dataloader
    test_dataloader = None


class Topics(L.LightningModule):
    """Takes dictionaries by its step alone, trains by Adam, and keeps its first layer as it is."""

    def __init__(self):
        super().__init__()
        self.net = Net(LR)
        self.scale = nn.utils.weight_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6).requires_grad_(False).eval()
        self.seen = 0

    def scores(self, batch):
        return self.net.fc(self.net.body(self.norm(self.scale(batch["words"]))))

    def training_step(self, batch, batch_idx):
        self.log("train_loss", loss := F.cross_entropy(self.scores(batch), batch["topic"]))
        self.seen += len(batch["topic"])
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.scores(batch), batch["topic"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def topic(item):
    """The class of an item, or the classes of a batch."""
    return item["topic"]


@pytest.mark.parametrize(("objective", "factory"), [("simclr", None), ("byol", Topics), ("smog", None)])
def test_modules_without_a_forward_and_with_what_they_keep(objective, factory, caplog):
    made = partial(OBJECTIVES[objective], hidden=6, out=5, **NEEDS.get(objective, {}))
    options = {"labels": topic, "head": "net.fc", "num_clients": 3, "module_factory": factory}
    federation, trainer = run_project(
        PFLSSL, 2, module=Topics(), data=NoisyData(drop_last=True), objective=made, epochs=1, **options
    )
    assert not [record for record in caplog.records if "two views" in record.getMessage()]
    assert 0 < trainer.callback_metrics["val_accuracy/mean"] <= 1
    assert "val_loss" not in trainer.callback_metrics
    model, first = federation.clients.models[0], Topics()
    other = pickle.loads(pickle.dumps(model)) if factory is None else copy.deepcopy(model)
    for client in (model, other):
        assert torch.equal(client.module.norm.running_mean, first.norm.running_mean)
        if objective != "simclr":
            assert client.objective.target.copies[1].training
            assert not client.objective.target.copies[0].module.norm.training
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert not torch.equal(model.module.net.body[0].weight, first.net.body[0].weight)
    assert torch.equal(model.module.net.fc.weight, first.net.fc.weight)
    assert "val_loss" in after_a_head(federation)


def after_a_head(federation):
    """What the module logs after a personalization."""
    trainer = federation.trainer
    with federation.personalized(Personalization("head", epochs=1)):
        trainer.validate(federation, datamodule=trainer.datamodule, verbose=False)
    return trainer.callback_metrics


class NoisyPairs(Data):
    """Pairs of noisy inputs and a class."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Noisy(self.samples), batch_size=4, shuffle=True, collate_fn=as_pairs)


def as_pairs(items):
    return torch.stack([item["words"] for item in items]), torch.tensor([item["topic"] for item in items])


def test_what_the_objective_has_trains_by_the_modules_optimizer():
    before = {}

    def objective(encoder):
        made = small(SMALL_BYOL)(encoder)
        before.update({name: parameter.detach().clone() for name, parameter in made.named_parameters()})
        return made

    method = partial(FedEMA, objective=objective)
    federation, _ = run_project(method, module=Net(LR), cohorts=[[0]], epochs=1, data=NoisyPairs())
    after = own_model(federation, 0).state_dict()
    assert {name.split(".")[0] for name in before} == {"projector", "predictor"}
    assert not [name for name, first in before.items() if torch.equal(after[f"objective.{name}"], first)]
    assert not any("fc" in name for name in after if name.startswith("own."))


class Graph:
    """A batch of another kind."""

    def __init__(self, words, topic):
        self.words, self.topic = words, topic


def test_batches_that_cannot_be_joined_are_told():
    with pytest.raises(
        ConfigurationError, match=r"passes both views .* a Graph, and two of these cannot be joined: use an"
    ):
        joined((Graph(1, 2),), (Graph(1, 2),))


class Bare(Data):
    """Inputs alone, without classes: tuples, or tensors."""

    collate = None

    def train_dataloader(self):
        items = torch.utils.data.TensorDataset(self.samples.train_inputs)
        return torch.utils.data.DataLoader(items, batch_size=4, shuffle=True, collate_fn=self.collate)

    test_dataloader = None


class BareTensors(Bare):
    collate = staticmethod(lambda items: torch.stack([item[0] for item in items]))


class StepOnly(L.LightningModule):
    """Takes inputs alone, by its step."""

    def __init__(self):
        super().__init__()
        self.net = Net(LR)
        self.seen = []
        self.register_buffer("mask", torch.full((6,), -torch.inf), persistent=False)
        self.register_buffer("threshold", torch.tensor(torch.inf))

    def training_step(self, batch, batch_idx):
        inputs = batch if isinstance(batch, torch.Tensor) else batch[0]
        if self.training:
            self.seen.append(self.trainer.current_epoch)
        return self.net(inputs).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


@pytest.mark.parametrize(("method", "data"), [(PFLSSL, BareTensors), (Calibre, Bare), (FedEMA, BareTensors)])
def test_modules_without_a_forward_on_items_without_classes(method, data, caplog):
    options = {"objective": small(SMALL_BYOL)} | ({"clusters": 2} if method is Calibre else {})
    options |= {"head": "net.fc", "num_clients": 2, "epochs": 1}
    federation, trainer = run_project(method, 2, module=StepOnly(), data=data(), **options)
    assert trainer.callback_metrics["train/self_supervised"].isfinite()
    model = federation.clients.models[0]
    assert not torch.equal(model.module.net.body[0].weight, StepOnly().net.body[0].weight)
    assert model.objective.target.copies[0].module.seen == []  # what one client leaves is not the next one's
    assert [text for text in caplog.messages if "no accuracy of" in text]


def test_a_plateau_on_what_the_modules_steps_log_is_refused():
    class Plateau(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    with pytest.raises(ConfigurationError, match=WATCH):
        run_project(PFLSSL, module=Plateau(), objective=OBJECTIVE)


WATCH = r"but PFLSSL trains \w+ by its own objective, .* val_accuracy/mean \(mode='max'\)"


class Stops(Net):
    """Brings its callback, and must not be trained."""

    def configure_callbacks(self):
        return EarlyStopping("val_loss")

    def on_train_start(self):
        raise AssertionError("a local fit has begun")


class Logs(L.Callback):
    """A callback of the user's own, which may log anything."""

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("val_loss", 3.0)


def watched_by(*callbacks, rounds=1, **options):
    module = options.pop("module", Net(LR))
    federation, data = federate(module, Data(), PFLSSL, num_clients=2, objective=OBJECTIVE, head="fc", **options)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet_trainer(rounds, *callbacks, enable_checkpointing=saves, num_sanity_val_steps=1)
    trainer.fit(federation, datamodule=data)
    return trainer


@pytest.mark.parametrize("where", ["module", "outside", "checkpoint", "inside", "engine"])
def test_callbacks_that_watch_what_the_modules_steps_log_are_refused_before_a_round(where, tmp_path):
    watches = EarlyStopping("val_loss", strict=False)
    callbacks = {"outside": [watches], "checkpoint": [ModelCheckpoint(tmp_path, monitor="val_loss")]}.get(where, [])
    options = {"inside": {"local_callbacks": [watches]}, "engine": {"engine": TrainerEngine(callbacks=[watches])}}
    with pytest.raises(ConfigurationError, match=WATCH):
        watched_by(*callbacks, module=Stops() if where == "module" else Net(LR), **options.get(where, {}))


def test_callbacks_may_watch_what_there_is(tmp_path):
    stops = EarlyStopping("val_accuracy/mean", mode="max", patience=0, min_delta=1.0)
    trainer = watched_by(stops, ModelCheckpoint(tmp_path, monitor="train/self_supervised"), rounds=5)
    assert trainer.current_epoch == 2  # the second round is not better by 1
    assert len(list(tmp_path.iterdir())) == 1
    watched_by(Logs(), EarlyStopping("val_loss"))
    watched_by(EarlyStopping("val_loss"), fine_tune="head")  # then evaluations are by the module's own steps


def test_two_views_of_several_loaders_are_refused():
    class Two(Data):
        def train_dataloader(self):
            return {"one": super().train_dataloader(), "other": super().train_dataloader()}

    with pytest.raises(ValueError, match="two views of each item need one training loader"):
        run_project(PFLSSL, module=Net(), data=Two(), objective=OBJECTIVE, num_clients=2, partition=None, head="fc")
