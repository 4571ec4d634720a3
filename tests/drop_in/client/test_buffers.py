"""Buffers that a module makes, or sets to tensors of other shapes, while it is trained or tested."""

from typing import Any

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import quiet_trainer
from torch import nn

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.methods import Ditto, FedAvg, LocalOnly

SAID = "changed their shapes in a local fit or an evaluation"


class Bank(Net):
    """Fills a bank with what it has seen, and makes a queue, an optional buffer and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0, 3))
        self.register_buffer("optional", None)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.lengths: list[tuple[int, ...]] = []

    def on_train_start(self) -> None:
        assert tuple(self.bank.shape) == (0, 3)
        assert self.optional is None
        assert self.scratch.tolist() == [0.0]
        assert not hasattr(self, "queue")
        self.register_buffer("queue", torch.zeros(2, 3))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def on_train_epoch_end(self) -> None:
        self.bank = torch.cat([self.bank, torch.ones(4, 3)])
        self.optional = torch.ones(2)
        self.scratch = torch.ones(5)


def said(caplog: Any) -> list[str]:
    return [message for message in caplog.messages if SAID in message]


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("method", [FedAvg, Ditto, LocalOnly])
def test_a_fit_changes_them_for_nobody_else(engine, method, caplog):
    module = Bank()
    federation, _ = run_project(method, 2, module=module, cohorts=(range(5), range(5)), engine=engine())
    names = set(Bank().state_dict())
    assert set(federation.client_model(1).state_dict()) == names == set(federation.global_model().state_dict())
    (message,) = said(caplog)
    for part in (
        "buffers of Bank",
        "bank",
        "queue",
        "counts",
        "optional",
        "give register_buffer the final shape in __init__",
    ):
        assert part in message
    assert "hidden" not in message
    assert "scratch" not in message


def test_the_module_that_was_given_has_the_global_model():
    module, loop = Bank(), FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    quiet_trainer(1, loop).fit(module, Data())
    assert torch.equal(module.fc.weight, loop.federation.global_model().fc.weight)
    assert not torch.equal(module.fc.weight, Bank().fc.weight)


def test_a_run_with_them_is_resumed(tmp_path):
    first = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=2, seed=0))
    first.fit(Bank(), Data())
    first.save_checkpoint(tmp_path / "last.ckpt")
    goes_on, whole = Bank(), Bank()
    quiet_trainer(2, FederatedLoop(method=FedAvg, num_clients=2, seed=0)).fit(
        goes_on, Data(), ckpt_path=tmp_path / "last.ckpt"
    )
    quiet_trainer(2, FederatedLoop(method=FedAvg, num_clients=2, seed=0)).fit(whole, Data())
    assert torch.equal(goes_on.fc.weight, whole.fc.weight)


def test_tables_that_a_test_makes(caplog):
    class Coder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cdf", torch.IntTensor())

        def on_test_epoch_start(self) -> None:
            assert self.cdf.numel() == 0
            self.cdf = torch.arange(4, dtype=torch.int32)

    trainer, module = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=3, seed=0)), Coder()
    trainer.fit(module, Data())
    assert not said(caplog)
    trainer.test(module, Data(), verbose=False)
    trainer.test(module, Data(), verbose=False)
    (message,) = said(caplog)
    assert "evaluation: cdf." in message


def test_a_fit_that_failed_leaves_nothing(caplog):
    """With a client that drops out, whose fit never comes to its end."""

    class Failing(Net):
        fits = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.zeros(2))

        def on_train_start(self) -> None:
            assert tuple(self.bank.shape) == (2,)
            self.bank = torch.zeros(3)
            Failing.fits += 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (torch.nan if Failing.fits == 1 else 1)

    federation, _ = run_project(FedAvg, module=Failing(), cohorts=([0, 1],))
    assert Failing.fits == 2
    assert tuple(federation.global_model().bank.shape) == (2,)
    assert len(said(caplog)) == 1


def test_values_of_the_update_are_those_that_the_fit_began_with():
    class Grows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.full((3,), 2.0))

        def on_train_epoch_end(self) -> None:
            self.center = torch.ones(7)

    federation, _ = run_project(FedAvg, 2, module=Grows(), cohorts=(range(5), range(5)))
    assert federation.global_model().center.tolist() == [2.0] * 3


def test_forms():
    layer = nn.BatchNorm1d(3)
    forms = Transient(layer)
    assert forms.restore_forms(layer) == []
    mean = layer.running_mean
    layer.running_mean.add_(1)
    layer.running_var = None
    layer.num_batches_tracked.resize_(4)
    layer.register_buffer("more", torch.zeros(1))
    assert forms.restore_forms(layer) == ["running_var", "num_batches_tracked", "more"]
    assert layer.running_mean is mean
    assert layer.running_var.tolist() == [1.0] * 3
    assert layer.num_batches_tracked.tolist() == 0
    assert not hasattr(layer, "more")
    del layer.weight
    layer.register_buffer("weight", torch.ones(3))
    assert forms.restore_forms(layer) == []
    assert layer.weight.tolist() == [1.0] * 3
    layer.running_mean = torch.zeros(5)
    assert forms.restore_forms(layer) == ["running_mean"]
    assert layer.running_mean.tolist() == [1.0] * 3
