"""The papers' methods on a user's module equal the built-in ones, parameter by parameter."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLIENTS, GivenCohorts, Toy, assert_same, for_toy, own_model, quiet_trainer, run
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine, federate
from pfl_lightning.encoders import mlp as projector_module
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import (
    DCPFL,
    FD,
    GPFL,
    DualFed,
    FedAMP,
    FedAvg,
    FedClassAvg,
    FedDBE,
    FedGH,
    FedLC,
    FedPAC,
    FedProto,
    FedRoD,
    FedTGP,
    PFedHN,
)
from pfl_lightning.methods import dualfed as dualfed_module
from pfl_lightning.methods import fedrod as fedrod_module
from pfl_lightning.methods import gpfl as gpfl_module

LR, COHORTS = 0.05, [[0, 2, 3], [1, 2]]
SGD = {"lr": LR, "momentum": 0.5, "weight_decay": 5e-4}
# Options of both, and those of the built-in method alone, which has no optimizer of its own making.
METHODS = {
    "FedProto": (FedProto, {"alignment": 0.7}, {"lr": LR}),
    "FD": (FD, {"gamma": 0.7}, {"lr": LR}),
    "FedPAC": (FedPAC, {"head_lr": 0.1, "head_epochs": 2, "alignment": 0.7}, {"lr": LR}),
    "FedGH": (FedGH, {"server_lr": 0.2}, {"lr": LR}),
    "FedLC": (FedLC, {"tau": 0.7}, {"lr": LR}),
    "FedRoD": (FedRoD, {}, {"lr": LR}),
    "FedTGP": (FedTGP, {"server_epochs": 3}, {"lr": LR}),
    "FedAMP": (FedAMP, {"sigma": 3.0}, {"lr": LR}),
    "PFedHN": (PFedHN, {"server_lr": 0.2, "hidden_size": 7}, SGD),
    "DCPFL": (DCPFL, {"virtual_features": 40, "server_lr": 0.2}, SGD),
    "DCPFL matrices": (DCPFL, {"virtual_features": 40, "factors": False}, SGD),
    "DualFed": (DualFed, {"contrastive": 2.0, "projector_batch_norm": False}, {"lr": LR, "weight_decay": 5e-4}),
    "DualFed logits": (
        DualFed,
        {"stages": "simultaneous", "prediction": "logits", "projector_batch_norm": False, "contrastive": 2.0},
        {"lr": LR, "weight_decay": 5e-4},
    ),
    "FedDBE": (FedDBE, {"mean_momentum": 0.4, "kl_weight": 3.0}, {"lr": LR}),
    "FedDBE, averaged": (FedDBE, {"first_round": "average", "personal_head": True}, {"lr": LR}),
    "GPFL": (GPFL, {"magnitude_weight": 0.3}, {"lr": LR}),
    "FedClassAvg": (
        FedClassAvg,
        {"contrastive": False, "proximal": 0.4},
        {"optimizer": partial(torch.optim.SGD, **SGD), "head_relu": False},
    ),
}


# What methods have beside the module.
OWN = ("personal_head.", "projector.", "global_head.", "client_mean", "valve.", "embeddings.", "conditions")


def as_builtin(state):
    """A module's tensors under the names of encoder and head."""
    return {name.replace("body.", "encoder.").replace("fc.", "head."): tensor for name, tensor in state.items()}


@pytest.fixture
def same_layers(monkeypatch):
    """Layers that methods add begin with the same weights, however many random numbers were drawn before."""

    class Given:
        def reset_parameters(self):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))

    given = {name: type(name, (Given, getattr(torch.nn, name)), {}) for name in ("Linear", "Embedding")}
    names = ("Module", "Sequential", "ReLU", "BatchNorm1d", "LayerNorm")
    layers = SimpleNamespace(**given, **{name: getattr(torch.nn, name) for name in names})
    for method in (fedrod_module, dualfed_module, projector_module, gpfl_module):
        monkeypatch.setattr(method, "nn", layers)


def states(federation, wanted):
    """Each client's own model, and tensors of the server by their shape."""
    found = {}
    for client in range(CLIENTS):
        own = own_model(federation, client)
        module = as_builtin(own.module.state_dict()) if wanted == "module" else own.state_dict()
        module |= {name: w for name, w in own.state_dict().items() if name.startswith(OWN)}
        names = [name for name in module if name.startswith(("encoder.", "head.", *OWN))]
        found |= {f"client {client} {name}": module[name].clone() for name in names}
    named = as_builtin({n.removeprefix("module."): w for n, w in federation.server.broadcast(1, 2).weights.items()})
    return found | {f"sent {name}": tensor.clone() for name, tensor in named.items()}


@pytest.mark.repeated
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])
@pytest.mark.parametrize("name", METHODS)
def test_a_module_trains_as_the_built_in_method(name, engine, same_layers):
    method, options, of_builtin = METHODS[name]
    options = {**options, "epochs": 2}
    builtin = run(
        partial(method, **options, **of_builtin), 2, cohorts=COHORTS, engine=SequentialEngine(cache_features=False)
    )
    federation, trainer = run_project(method, 2, module=Net(LR), cohorts=COHORTS, engine=engine(), **options)
    # Bit by bit on most processors; some round products of the same numbers differently.
    assert_same(states(federation, "module"), states(builtin, "builtin"), atol=1e-6)
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
    assert type(federation.client_model(1)) is Net
    for client in (0, 1):
        assert federation.test_scores[client].accuracy == builtin.test_scores[client].accuracy


@pytest.mark.parametrize("data", ["items", "tensors"])
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_two_views_are_two_readings_of_an_item(data, engine):
    options = {"proximal": 0.4, "epochs": 2}
    sgd = partial(torch.optim.SGD, **SGD)
    builtin = run(partial(FedClassAvg, optimizer=sgd, head_relu=False, **options), 2, cohorts=COHORTS)
    own = Data() if data == "items" else Toy()
    division = {} if data == "items" else {"num_clients": None}
    federation, trainer = fitted(FedClassAvg, own, engine=engine(), rounds=2, cohorts=COHORTS, **division, **options)
    assert_same(states(federation, "module"), states(builtin, "builtin"), atol=1e-6)
    assert trainer.callback_metrics["train/contrastive"] > 0


def fitted(method, data, *, module=None, rounds=1, cohorts=(range(CLIENTS),), **options):
    """A federation of a module on data that are divided already, or on those of the project."""
    if isinstance(data, Data):
        return run_project(method, rounds, module=module or Net(LR), data=data, cohorts=cohorts, **options)
    options.pop("num_clients", None)
    federation, data = federate(module or Net(LR), data, method, seed=11, **options)
    trainer = quiet_trainer(rounds, GivenCohorts(*cohorts))
    trainer.fit(federation, datamodule=data)
    return federation, trainer


class Noisy(torch.utils.data.Dataset):
    """Items under a random transform, counted."""

    def __init__(self, toy):
        samples = toy.load()
        self.inputs, self.targets, self.reads = samples.train_inputs, samples.train_targets, 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, place):
        self.reads += 1
        return self.inputs[place] + 0.1 * torch.randn(6), self.targets[place]


class NoisyData(Data):
    """Training items under the random transform."""

    def setup(self, stage):
        super().setup(stage)
        self.noisy = getattr(self, "noisy", None) or Noisy(self.toy)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.noisy, batch_size=4, shuffle=True)


def test_views_differ_by_the_transform_and_are_left_out_by_an_option():
    seen = []

    class Seeing(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert len(batch) == 2  # a batch of the project, not two views of it
            if self.trainer.training:
                seen.append(batch[0])
            return batch

    data = NoisyData()
    fitted(FedClassAvg, data, module=Seeing(), cohorts=[[0]])
    assert data.noisy.reads >= 2 * 11
    first, second = seen[-2:]
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, atol=1.0, rtol=0)
    data = NoisyData()
    _, trainer = fitted(FedClassAvg, data, cohorts=[[0]], contrastive=False)
    assert "train/contrastive" not in trainer.callback_metrics


class Topics(L.LightningModule):
    """Takes dictionaries by its step alone, without a forward; an entry says the class."""

    def __init__(self):
        super().__init__()
        self.net = Net(LR)

    def scores(self, batch):
        return self.net.fc(self.net.body(batch["words"]))

    def training_step(self, batch, batch_idx):
        self.log("train_loss", loss := F.cross_entropy(self.scores(batch), batch["topic"]))
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.scores(batch), batch["topic"]))

    def configure_optimizers(self):
        return self.net.configure_optimizers()


class TopicData(Data):
    """Items that are dictionaries."""

    def train_dataloader(self):
        pairs = zip(self.samples.train_inputs, self.samples.train_targets, strict=True)
        items = [{"words": words, "topic": int(topic)} for words, topic in pairs]
        return torch.utils.data.DataLoader(items, batch_size=4, shuffle=True)

    val_dataloader = train_dataloader
    test_dataloader = None


def topic(item):
    """The class of an item, or the classes of a batch."""
    return item["topic"]


@pytest.mark.parametrize("method", [FedProto, FedPAC, FedRoD])
def test_labels_say_the_class_of_an_item_and_of_a_batch(method):
    federation, trainer = fitted(method, TopicData(), module=Topics(), num_clients=3, cohorts=[range(3)], labels=topic)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    assert federation.clients.models[0].num_classes == 5
    with pytest.raises(ConfigurationError, match=r"a batch here is a dict .* labels= is not given: set labels="):
        fitted(method, TopicData(), module=Topics(), num_clients=3, cohorts=[range(3)])
    wrong = r"labels= gave a tensor of shape \(4, 6\) and type torch.float32"
    with pytest.raises(ConfigurationError, match=wrong):
        fitted(
            method,
            [torch.utils.data.DataLoader(silo, batch_size=4) for silo in silos()],
            module=Topics(),
            cohorts=[range(2)],
            labels=lambda item: item["words"],
        )


def silos():
    data = TopicData()
    data.setup("fit")
    items = data.train_dataloader().dataset
    return items[:12], items[12:24]


def test_silos_take_labels_of_batches():
    loaders = [torch.utils.data.DataLoader(silo, batch_size=4) for silo in silos()]
    federation, _ = fitted(FedProto, loaders, module=Topics(), cohorts=[range(2)], labels=topic)
    assert bool(federation.server.present[0])


def test_the_balanced_loss_counts_classes_that_no_partition_has_read():
    one, _ = fitted(FedRoD, TopicData(), module=Topics(), num_clients=3, cohorts=[range(3)], labels=topic)
    model = one.clients.models[0]
    assert sorted(model.user_module._class_counts) == [0, 1, 2]
    for client, counts in model.user_module._class_counts.items():
        assert counts.tolist() == one.data.client_data(client).train.class_counts(5).tolist()


def test_a_named_layer_has_the_features():
    whole, _ = fitted(FedProto, Data(), cohorts=COHORTS, rounds=2)
    named, _ = fitted(FedProto, Data(), cohorts=COHORTS, rounds=2, features="body")
    assert_same(states(named, "module"), states(whole, "module"))
    wider, _ = fitted(FedProto, Data(), cohorts=COHORTS, features="body.1", head="fc", prediction="classifier")
    assert wider.server.prototypes.shape == (5, 5)
    with pytest.raises(ConfigurationError, match=r"FedGH passes features through the head itself: 'fc' takes 4"):
        fitted(FedGH, Data(), features="body.1")


class TwoScores(Net):
    """A step that calls its head on more rows than the batch has classes."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0].repeat(2, 1)), batch[1].repeat(2))


class Steering(Net):
    """Steps its optimizer by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TwoScores, r"a batch has 4 classes, and the input of 'fc' has 8 rows: set features="),
        (
            Steering,
            "needs the head of Steering",
        ),
    ],
)
def test_what_has_no_features_is_told(module, message):
    with pytest.raises(ConfigurationError, match=message):
        fitted(FedProto, Data(), module=module())


def test_a_method_with_steps_of_its_own_is_refused():
    class Own(FedAvg):
        model_agnostic = False

    with pytest.raises(ConfigurationError, match="Own trains an encoder by its own steps"):
        federate(Net(), Data(), Own, num_clients=2)


class Dropping(Net):
    """Dropout in the head, an optimizer of what trains alone, and a schedule."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Sequential(torch.nn.Dropout(0.3), self.fc)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("method", [DCPFL, FedRoD, DualFed], ids=lambda method: method.__name__)
def test_what_a_method_adds_trains_by_the_modules_own_optimizer(method, precision):
    federation, _ = run_project(
        for_toy(method), module=Dropping(), cohorts=[[0]], epochs=2, head="fc", trainer={"precision": precision}
    )
    before = {name: tensor.clone() for name, tensor in own_model(federation, 4).state_dict().items()}  # untrained
    after = own_model(federation, 0).state_dict()
    beside = [name for name in before if name.startswith(("personal_head.", "projector."))]
    assert (method is DCPFL) == (not beside)
    assert all(not torch.equal(after[name], before[name]) for name in beside)
    assert all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_uploaded_scores_are_without_dropout(engine):
    """What FD's client sends is the mean score that its trained module has in evaluation mode."""

    class DeepHead(Net):
        def __init__(self):
            super().__init__()
            width, classes = self.fc.in_features, self.fc.out_features
            self.fc = torch.nn.Sequential(torch.nn.Linear(width, 9), torch.nn.Dropout(0.5), torch.nn.Linear(9, classes))

    federation, _ = run_project(FD, module=DeepHead(), cohorts=[[3]], engine=engine(), head="fc")
    sent, module = federation.server.broadcast(0, 1), own_model(federation, 3).module.eval()
    inputs, labels = Toy().tensors(3)
    with torch.no_grad():
        scores = module(inputs)
    expected = torch.stack([scores[labels == c].mean(0) for c in sent.classes])
    torch.testing.assert_close(sent.scores, expected, rtol=0, atol=1e-5)


def test_federate_draws_no_random_numbers():
    module = Net()
    state = torch.get_rng_state()
    federate(module, Data(), FedRoD, num_clients=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_client_is_what_it_is_after_a_journey():
    federation, _ = fitted(FedRoD, Data(), cohorts=COHORTS)
    model = federation.clients.models[0]
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other) is type(model)
        assert other.head is other.module.fc
        assert_same(dict(other.state_dict()), dict(model.state_dict()))


class Unforwarded(L.LightningModule):
    """The network without a forward: its steps alone know how features and scores are computed."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = Net(LR).body, Net(LR).fc

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.fc(self.body(batch[0])), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **SGD)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_fedpac_needs_no_forward(engine):
    """Its statistics come from the training step, and are those that a forward would give."""
    options = {"cohorts": COHORTS, "engine": engine(), "epochs": 2, "head_lr": 0.1, "head_epochs": 2, "alignment": 0.7}
    without, _ = run_project(FedPAC, 2, module=Unforwarded(), **options)
    plain, _ = run_project(FedPAC, 2, module=Net(LR), **options)
    assert_same(states(without, "module"), states(plain, "module"), atol=0.0)
    assert type(without.client_model(0)) is Unforwarded
    sent, expected = (each.server.broadcast(1, 2) for each in (without, plain))
    assert torch.equal(sent.centroids, expected.centroids)
    assert bool(sent.present.any())
    losses = [{client: score.logged for client, score in each.test_scores.items()} for each in (without, plain)]
    assert losses[0] == losses[1]


class Masked(Net):
    """Takes (inputs, mask, classes); forward does without the mask."""

    def forward(self, inputs, mask=None):
        return super().forward(inputs if mask is None else inputs * mask)

    def training_step(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        return F.cross_entropy(self(batch[0], *batch[1:-1]), batch[-1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0], *batch[1:-1]), batch[-1]))

    test_step = None


class Scaling(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] / 3, batch[1]), batch_idx)


class MaskedData(Data):
    def train_dataloader(self):
        items = zip(self.samples.train_inputs, self.samples.train_targets, strict=True)
        return torch.utils.data.DataLoader([(x, (x > 0).float(), int(y)) for x, y in items], batch_size=4, shuffle=True)

    test_dataloader = None


def last(batch):
    return batch[-1]


OTHER = "statistics use features of (Masked|Scaling).forward"


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("method", [FedPAC, FedProto])
def test_statistics_of_other_features_than_the_step_s_are_told_once(method, engine):
    masked = {"data": MaskedData(), "module": Masked(), "num_clients": 3, "cohorts": [range(3)], "labels": last}
    for options in (masked, {"data": Data(), "module": Scaling(), "cohorts": COHORTS}):
        with pytest.warns(UserWarning, match=OTHER) as caught:
            fitted(method, rounds=2, engine=engine(), **options)
        said = [str(each.message) for each in caught if "statistics use features" in str(each.message)]
        assert len(said) == 1
        assert said[0].startswith("client 0, round 1: ")


def test_a_step_with_the_features_of_forward_is_not_run_for_them(recwarn):
    module = Masked()
    federation, _ = fitted(FedPAC, Data(), module=module, cohorts=[[0]], epochs=1, head_epochs=0)
    assert not [each for each in recwarn if "features" in str(each.message)]
    assert federation.client_model(0).steps == 3  # 11 items in batches of 4


class Twice(Net):
    """A loss of two passes."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * self(batch[0].flip(0)).square().mean()


def test_a_second_call_of_the_head_in_a_step_is_told_once():
    for features in (None, "body"):
        with pytest.warns(UserWarning, match="a training step of Twice computes features 2 times") as caught:
            fitted(FedPAC, Data(), module=Twice(), rounds=2, cohorts=COHORTS, features=features, head="fc")
        said = [str(each.message) for each in caught if "computes features" in str(each.message)]
        assert len(said) == 1
        assert said[0].startswith("client 0, round 1: ")


class Shaking(Topics):
    """Without a forward, so that its step, which draws, is all there is."""

    def scores(self, batch):
        return super().scores({"words": batch["words"] + torch.rand(())})


def test_what_the_step_alone_computes_is_compared_with_nothing(recwarn):
    fitted(FedPAC, TopicData(), module=Shaking(), num_clients=3, cohorts=[range(3)], labels=topic)
    assert not [each for each in recwarn if "features" in str(each.message)]


class OneArgument(L.LightningModule):
    """Takes both inputs as a pair."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)

    def forward(self, pair):
        return self.head(self.body(torch.cat(tuple(pair), 1)).relu())

    def scores(self, pair):
        return self(pair)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.scores(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoArguments(OneArgument):
    """Takes them one by one, so that forward(batch[0]) fails."""

    def forward(self, first, second):
        return super().forward((first, second))

    def scores(self, pair):
        return self(*pair)


class Triples(TwoArguments):
    """Batches have three entries, of which the last one is the class."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[:2], batch[2]), batch_idx)


def two_inputs(module, method, flat=False, **options):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(60, 4, generator=generator), torch.randn(60, 2, generator=generator)
    rows = zip(first, second, torch.arange(60) % 3, strict=True)
    items = [(a, b, int(y)) if flat else ((a, b), int(y)) for a, b, y in rows]
    torch.manual_seed(1)
    given = L.LightningDataModule()
    given.train_dataloader = given.val_dataloader = lambda: torch.utils.data.DataLoader(items, 10)
    federation, data = federate(module(), given, method, num_clients=3, seed=0, **options)
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    return federation, trainer


@pytest.mark.parametrize("method", [FedPAC, FedProto, FedGH])
def test_a_forward_of_two_arguments_is_as_good_as_one_of_a_pair(method):
    pair, trainer = two_inputs(OneArgument, method)
    assert "val_accuracy/mean" in trainer.callback_metrics
    single, other = two_inputs(TwoArguments, method)
    assert_same(single.models.state_dict(), pair.models.state_dict())
    assert other.callback_metrics["val_accuracy/mean"] == trainer.callback_metrics["val_accuracy/mean"]


def test_batches_of_three_entries_are_told_to_have_no_accuracy():
    with pytest.warns(
        UserWarning, match=r"no accuracy is computed: batches have 3 entries, .* give \(inputs, classes\)"
    ):
        _, trainer = two_inputs(Triples, FedAvg, flat=True)
    assert "val_loss" in trainer.callback_metrics
    assert "val_accuracy/mean" not in trainer.callback_metrics
    pair, _ = two_inputs(OneArgument, FedPAC)
    labeled, _ = two_inputs(Triples, FedPAC, flat=True, labels=lambda item: item[2])
    assert_same(labeled.models.state_dict(), pair.models.state_dict())
    with pytest.raises(ConfigurationError, match=r"such as lambda batch: batch\[2\]"):
        two_inputs(Triples, FedPAC, flat=True)
