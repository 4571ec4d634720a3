"""What is frozen neither travels nor is stored for each client, and is in memory and in checkpoints once."""

import copy
from typing import Any

import pytest
import torch
from _helpers.fake_cluster import fake_ray_engine
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, SEED, GivenCohorts, Toy, assert_same, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine, export_clients, federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedProx, FedRep, LocalOnly

WIDTH = 200
QUICK = {"engine": SequentialEngine()}
PARTITION = Toy().partition
HEAD_BYTES = 4 * (FEATURES + 1) * CLASSES
METHODS = pytest.mark.parametrize("method", [FedAvg, FedPer, LocalOnly, Ditto])


class Frozen(Net):
    """A frozen network of 160 kB in front of a layer and a head that train."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        backbone = [nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
        self.backbone = nn.Sequential(*backbone).requires_grad_(False).eval()
        self.body = nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh())

    def forward(self, inputs: Any) -> Any:
        return self.fc(self.body(self.backbone(inputs)))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.backbone.eval()
        return self


def bytes_of(module):
    return sum(4 * p.numel() for p in module.parameters() if p.requires_grad)


def sent_by(trainer):
    """Bytes of the last round, up and down."""
    [traffic] = [callback.traffic for callback in trainer.callbacks if isinstance(callback, FederatedLoop)]
    return [sum(traffic.up.values()), sum(traffic.down.values())]


def weights_in(module):
    """Where the frozen weights of a module are in memory."""
    return [p.data_ptr() for p in module.backbone.parameters()]


def all_weights(federation):
    models = {client: federation.client_model(client) for client in range(federation.num_clients)}
    own = {f"{client}.{name}": tensor for client, m in models.items() for name, tensor in m.state_dict().items()}
    return own | dict(federation.global_model().state_dict())


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@METHODS
def test_only_what_trains_travels_and_is_stored(method, engine):
    module = Frozen()
    federation, trainer = run_project(method, module=module, engine=engine(), head="fc")
    sent = {FedPer: bytes_of(module) - HEAD_BYTES, LocalOnly: 0}.get(method, bytes_of(module))
    assert sent_by(trainer) == [CLIENTS * sent] * 2
    kept = {FedPer: HEAD_BYTES, FedAvg: 0}.get(method, bytes_of(module))
    assert federation.personal.num_bytes == CLIENTS * kept
    assert federation.architectures[0].shared * 4 == sent


@METHODS
def test_results_are_those_of_parameters_that_travel(method):
    got, _ = run_project(method, 2, module=Frozen(), head="fc", **QUICK)
    expected, _ = run_project(method, 2, module=Frozen(), head="fc", frozen=(), **QUICK)
    assert_same(all_weights(got), all_weights(expected))


@METHODS
def test_there_is_one_copy(method):
    module = Frozen()
    federation, _ = run_project(method, module=module, head="fc", **QUICK)
    models = [*federation.models[0].user_module.networks(), federation.global_model()]
    models += [federation.client_model(1), *(model.module for _, model in federation.client_models([0]))]
    for model in models:
        assert weights_in(model) == weights_in(module)
        assert not any(p.requires_grad for p in model.backbone.parameters())
    trained = [model.body[0].weight.data_ptr() for model in (module, *models)]
    assert len(set(trained)) == len(trained)


@METHODS
def test_a_checkpoint_has_it_once_and_goes_on_exactly(method, tmp_path):
    cohorts, frozen = [[0, 2, 3], [1, 2]], sum(4 * p.numel() for p in Frozen().backbone.parameters())

    def run(rounds, seed, ckpt_path=None):
        federation, data = federate(Frozen(seed), Data(), method, PARTITION, head="fc", seed=SEED, **QUICK)
        saver = ModelCheckpoint(tmp_path / str(seed), filename="{epoch}", save_top_k=-1)
        trainer = quiet_trainer(rounds, GivenCohorts(*cohorts), saver, enable_checkpointing=True)
        trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        return federation

    whole, path = run(2, seed=0), tmp_path / "0" / "epoch=0.ckpt"
    assert frozen < path.stat().st_size < 1.7 * frozen
    assert_same(all_weights(run(2, seed=1, ckpt_path=path)), all_weights(whole))  # frozen weights, too


def test_files_of_clients_are_complete(tmp_path):
    federation, _ = run_project(FedPer, module=Frozen(), head="fc", **QUICK)
    paths = export_clients(federation, tmp_path)
    net = Frozen(seed=1)
    net.load_state_dict(torch.load(paths[2], weights_only=True))
    assert_same(net.state_dict(), federation.client_model(2).state_dict())


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_workers_get_it_once(method, monkeypatch):
    engine, _ = fake_ray_engine(monkeypatch)
    got, _ = run_project(method, 2, module=Frozen(), head="fc", engine=engine)
    expected, _ = run_project(method, 2, module=Frozen(), head="fc", **QUICK)
    assert_same(all_weights(got), all_weights(expected))
    fits, evaluations = 2 * CLIENTS, 2 * CLIENTS
    assert engine.bytes_sent < (fits + evaluations) * (4 * bytes_of(Frozen()) + 8000)


# ---------------------------------------------------------------------- buffers


class Normed(Net):
    """A frozen normalization in the encoder."""

    def __init__(self, evaluated: bool) -> None:
        super().__init__(norm=True)
        self.body[1].requires_grad_(False)
        if evaluated:
            self.body[1].eval()


@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.parametrize("evaluated", [True, False])
def test_running_statistics_travel_where_they_move(evaluated, method):
    federation, _ = run_project(method, module=Normed(evaluated), data=Data(drop_last=True), head="fc", **QUICK)
    prefix = "global_model" if method is Ditto else "module"
    moving = f"{prefix}.body.1.running_mean" in federation.models[0].shared_names()
    assert moving is not evaluated
    assert f"{prefix}.body.1.weight" not in federation.models[0].shared_names()
    module = federation.global_model()
    assert bool(module.body[1].running_mean.any()) is moving


def test_a_wholly_frozen_encoder_has_constant_statistics():
    """Of a part in which nothing trains, statistics are not updated, whatever its mode."""
    module = Net(norm=True)
    module.body.requires_grad_(False)
    _, trainer = run_project(FedAvg, module=module, data=Data(drop_last=True), head="fc")
    assert sent_by(trainer) == [CLIENTS * HEAD_BYTES] * 2


# ---------------------------------------------------------------------- what changes all the same


class Thaws(Frozen):
    """Lets a frozen layer train in its own fits."""

    def on_train_start(self) -> None:
        self.backbone[3].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_changed_parameter_is_an_error():
    with pytest.raises(
        ConfigurationError, match=r"fit of client 0 in round 1 changed module\.backbone\.3\..*frozen=\(\)"
    ):
        run_project(FedAvg, module=Thaws(), head="fc")
    module = Thaws()
    before = module.backbone[3].weight.clone()
    federation, _ = run_project(FedAvg, module=module, head="fc", frozen=())
    assert not torch.equal(federation.global_model().backbone[3].weight, before)


class Taught(Net):
    """A teacher that is the moving average of the network, written into its memory or put in its place."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        for own, other in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            if self.in_place:
                own.data.mul_(0.5).add_(other.data, alpha=0.5)
            else:
                own.data = own.data * 0.5 + other.data * 0.5


@pytest.mark.parametrize("in_place", [True, False])
def test_a_teacher_that_follows_its_student_travels(in_place):
    module = Taught(in_place)
    got, _ = run_project(FedAvg, module=module, head="fc", num_clients=2)
    expected, _ = run_project(FedAvg, module=Taught(in_place), head="fc", num_clients=2, frozen=())
    assert_same(all_weights(got), all_weights(expected))
    assert "module.teacher.0.weight" in got.models[0].shared_names()
    with pytest.raises(ConfigurationError, match=r"changed module\.teacher"):
        run_project(FedAvg, module=Taught(in_place), head="fc", frozen=["teacher"])


class ThawsInSetup(Frozen):
    """Lets everything train once the data are known."""

    def setup(self, stage: str) -> None:
        self.backbone.requires_grad_(True)


def test_what_setup_thaws_trains():
    module = ThawsInSetup()
    before = module.backbone[3].weight.clone()
    federation, data = federate(module, Data(), FedAvg, num_clients=2, head="fc", seed=1)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    assert not torch.equal(federation.global_model().backbone[3].weight, before)


def test_patterns_are_checked():
    with pytest.raises(
        ConfigurationError, match=r"frozen='head' matches no parameter with requires_grad=False of Frozen"
    ):
        federate(Frozen(), Data(), FedAvg, num_clients=2, frozen=["head"])


def test_a_phase_without_parameters_is_an_error():
    module = Net()
    module.body.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="phase 'encoder' of FedRep has nothing to train"):
        run_project(FedRep, module=module, head="fc")


def test_a_factory_shares_it_too():
    module = Frozen()
    federation, _ = run_project(FedProx, module=module, head="fc", module_factory=Frozen, **QUICK)
    assert weights_in(federation.models[0].module) == weights_in(module) == weights_in(federation.global_model())
    expected, _ = run_project(FedProx, module=Frozen(), head="fc", **QUICK)
    assert_same(all_weights(federation), all_weights(expected))
