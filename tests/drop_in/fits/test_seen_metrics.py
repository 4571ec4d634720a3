"""Values that a module reads from its Trainer in local fits and evaluations."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.drop_in.fits.module_calls import names_in_code
from pfl_lightning.methods import FedAvg


def loader(number: int, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES), 6)


class Scaled(Net):
    """Its steps follow the last validation, which it reads in several hooks."""

    read: ClassVar[list[tuple[str, float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = float(self.trainer.callback_metrics.get("val_loss", 1.0))
        self.read.append(("step", scale))
        return scale * super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        for values in (self.trainer.callback_metrics, self.trainer.logged_metrics):
            self.read.append(("epoch", round(float(values["val_loss"]), 5)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


@pytest.fixture(autouse=True)
def _nothing_read(monkeypatch):
    monkeypatch.setattr(Scaled, "read", [])


def test_one_client_reads_what_a_plain_run_reads():
    plain, module = Scaled(), Scaled()
    quiet_trainer(3).fit(plain, loader(24, 1), loader(12, 2))
    read, Scaled.read[:] = list(Scaled.read), []
    assert len({value for _, value in read}) > 3  # it moves
    loop = FederatedLoop(method=FedAvg, num_clients=1, seed=1)
    quiet_trainer(3, loop).fit(module, loader(24, 1), loader(12, 2))
    assert Scaled.read == read
    assert_same(dict(module.state_dict()), dict(plain.state_dict()), atol=0.0)


def test_each_client_reads_its_own():
    loop = FederatedLoop(method=FedAvg, num_clients=3, seed=1)
    quiet_trainer(2, loop).fit(Scaled(), loader(36, 1), loader(18, 2))
    ends = [value for hook, value in Scaled.read if hook == "epoch"][::2]
    assert len(set(ends)) == 6  # 3 clients, 2 rounds


def test_values_can_be_copied_as_a_dictionary():
    class Copying(Net):
        def on_train_epoch_end(self) -> None:
            taken = copy.deepcopy(self.trainer.callback_metrics)
            assert {**taken} == dict(self.trainer.callback_metrics)
            self.trainer.callback_metrics["mine"] = torch.tensor(1.0)
            assert float(self.trainer.callback_metrics["mine"]) == 1.0

    quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=2, seed=1)).fit(Copying(), loader(24, 1), loader(12, 2))


def test_names_in_code_are_those_of_the_author():
    class Own(Net):
        def best(self) -> Any:
            return [self.trainer.callback_metrics[name] for name in ("a", "b")]

    assert "callback_metrics" in names_in_code(Own())
    assert "callback_metrics" not in names_in_code(Net())
