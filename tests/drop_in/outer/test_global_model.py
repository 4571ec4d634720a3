"""The global model, and every client's own, in the author's own class."""

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import WEIGHTS_ONLY, assert_same, quiet_trainer
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.drop_in.client.roles import find_roles
from pfl_lightning.drop_in.client.user_module import UserModule
from pfl_lightning.errors import FederationError
from pfl_lightning.methods import FedAvg, FedPer, FedProx, LGFedAvg, LocalOnly


class Counting(Net):
    """Batch normalization, whole numbers that say something, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.register_buffer("table", torch.tensor([3, 1, 2]))
        self.register_buffer("on", torch.tensor(True))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        own = self.norm(self.frozen(batch[0][:, :2])).square().mean()  # a gradient would reach all of them
        return super().training_step(batch, batch_idx) + own


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_whole_numbers_are_not_averaged(engine):
    start = Counting()
    first = copy.deepcopy(start.state_dict())
    federation, _ = run_project(FedAvg, 2, module=start, data=Data(drop_last=True), engine=engine())
    state = start.state_dict()
    assert state["table"].tolist() == [3, 1, 2]
    assert bool(state["on"])
    assert [int(federation.client_model(k).steps) for k in (0, 1)] == [4, 8]  # batches of two rounds, each its own
    assert int(state["steps"]) == 0
    # The counter of batch normalization travels: after each round the rounded mean, weighted by samples.
    sizes, mean = [len(own) for own in Data().toy.labels], 0.0
    for _ in range(2):
        counts = [mean + size // 4 for size in sizes]
        mean = round(sum(size * count for size, count in zip(sizes, counts, strict=True)) / sum(sizes))
    assert int(state["body.1.num_batches_tracked"]) == mean
    for name in ("frozen.weight", "frozen.bias", "norm.weight", "norm.running_mean"):
        assert torch.equal(state[name], first[name]), name
    for own in (federation.client_model(0), federation.global_model()):
        assert not own.norm.training
        assert {n for n, p in own.named_parameters() if not p.requires_grad} == {
            n for n, p in Counting().named_parameters() if not p.requires_grad
        }


def test_what_never_travels_keeps_its_first_value_in_the_global_model():
    for method, same, other in ((FedPer, "fc.", "body."), (LGFedAvg, "body.", "fc.")):
        start, module = Net(), Net()
        federation, _ = run_project(method, module=module, head="fc")
        for name, value in module.state_dict().items():
            assert torch.equal(value, start.state_dict()[name]) == name.startswith(same), (method, name)
            assert torch.equal(value, federation.client_model(1).state_dict()[name]) == name.startswith(other)


def test_the_author_s_module_is_not_trained_in_place():
    module = Net()
    weights = module.fc.weight
    one, _ = run_project(FedAvg, module=module)
    assert module.fc.weight is weights
    before = weights.clone()
    copied = one.client_model(0)
    with torch.no_grad():
        copied.fc.weight.zero_()
    assert torch.equal(module.fc.weight, before)
    assert module._trainer is None
    assert all(p.requires_grad for p in copied.parameters())


def test_testing_a_checkpoint_gives_its_global_model(tmp_path):
    module = Net()
    federation, data = federate(module, Data(), FedAvg, num_clients=3, seed=1)
    trainer = quiet_trainer(1, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(federation, datamodule=data)
    path = tmp_path / "one.ckpt"
    trainer.save_checkpoint(path)
    other = Net()
    with torch.no_grad():
        other.fc.bias.fill_(7.0)
    again, data = federate(other, Data(), FedAvg, num_clients=3, seed=1)
    quiet_trainer(1).test(again, datamodule=data, ckpt_path=path, **WEIGHTS_ONLY)
    assert_same(dict(other.state_dict()), dict(module.state_dict()))


def test_a_resumed_fit_is_the_uninterrupted_one(tmp_path):
    def project(rounds, ckpt_path=None):
        module = Net()
        federation, data = federate(module, Data(), FedProx, num_clients=3, seed=1, cohort=2, mu=0.1)
        trainer = quiet_trainer(rounds, default_root_dir=tmp_path)
        trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        return module, trainer

    _, trainer = project(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = project(3, tmp_path / "one.ckpt")
    whole, _ = project(3)
    assert_same(dict(resumed.state_dict()), dict(whole.state_dict()))


def test_a_client_survives_copying_and_pickling():
    module = Net()
    client = UserModule(module, find_roles(module, "fc")).new_client(FedProx, 5, {"mu": 0.3})
    for other in (copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
        assert type(other) is type(client)
        assert other.mu == 0.3
        assert_same(dict(other.state_dict()), dict(client.state_dict()))


def test_layers_that_are_made_in_setup_are_made_once():
    setups = []

    class Late(Net):
        def __init__(self) -> None:
            L.LightningModule.__init__(self)
            self.lr = 0.05

        def setup(self, stage: str) -> None:
            setups.append(stage)
            self.body, self.fc = nn.Linear(6, 4), nn.Linear(4, 5)
            assert self.trainer.datamodule.toy is not None

    module = Late()
    federation, _ = run_project(FedPer, 2, module=module, head="fc")
    assert setups == ["fit"]
    one, two = federation.client_model(0), federation.client_model(1)
    assert torch.equal(one.body.weight, two.body.weight)
    assert not torch.equal(one.fc.weight, two.fc.weight)
    assert torch.equal(federation.global_model().body.weight, one.body.weight)
    assert_same(dict(module.state_dict()), dict(federation.global_model().state_dict()))


def test_before_a_fit_there_is_no_global_model():
    federation, _ = federate(Net(), Data(), FedAvg, num_clients=2)
    with pytest.raises(FederationError, match="there is no global model before"):
        federation.global_model()


def test_a_loop_of_the_trainer_s_own_drives_the_rounds():
    federation, data = federate(Net(), Data(), LocalOnly, num_clients=4, seed=1)
    trainer = quiet_trainer(1, FederatedLoop(cohort=1))
    trainer.fit(federation, datamodule=data)
    trained = [k for k in range(4) if not torch.equal(federation.client_model(k).fc.weight, Net().fc.weight)]
    assert len(trained) == 1
    assert sum(isinstance(callback, FederatedLoop) for callback in trainer.callbacks) == 1


def test_novel_clients_are_reported_apart():
    from pfl_lightning.datamodules import IID, FromLoaders

    data = FromLoaders(IID(4), datamodule=Data(), novel_clients=1)
    federation, data = federate(Net(), data, FedAvg, seed=1)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    [novel] = data.novel
    assert float(trainer.callback_metrics["novel_test_loss"]) == pytest.approx(
        federation.test_scores[novel].logged["test_loss"]
    )
    assert "test_loss" in trainer.callback_metrics
