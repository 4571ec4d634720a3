"""``Trainer(reload_dataloaders_every_n_epochs=...)``: the project's loaders are asked for again between rounds."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import SEED, Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg


class Curriculum(L.LightningDataModule):
    """Other items in every epoch, in other batches."""

    def __init__(self, grows: bool = False, draws: bool = False) -> None:
        super().__init__()
        self.grows, self.draws, self.epochs = grows, draws, []

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        self.epochs.append(epoch)
        generator = None if self.draws else torch.Generator().manual_seed(epoch)
        number = 24 + self.grows * epoch
        inputs = torch.rand(number, INPUTS, generator=generator)
        return DataLoader(TensorDataset(inputs, torch.arange(number) % CLASSES), 4 + epoch // 2 * 2)

    def val_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(99 + self.trainer.current_epoch)
        inputs = torch.rand(12, INPUTS, generator=generator)
        return DataLoader(TensorDataset(inputs, torch.arange(12) % CLASSES), 4)


def fitted(rounds: int, data: Any, *, every: int = 1, clients: int = 1, **fit: Any) -> tuple[Any, Any]:
    """A federation's Trainer and module after a fit."""
    loop = FederatedLoop(method=FedAvg, num_clients=clients, optimizer_state="keep", seed=SEED)
    trainer, module = quiet_trainer(rounds, loop, reload_dataloaders_every_n_epochs=every), Net()
    trainer.fit(module, data, **fit)
    assert trainer.reload_dataloaders_every_n_epochs == every
    return trainer, module


@pytest.mark.parametrize("every", [1, 2, 0])
def test_one_client_is_the_plain_run(every):
    plain, own = Net(), Curriculum()
    other = quiet_trainer(4, reload_dataloaders_every_n_epochs=every)
    other.fit(plain, own)
    data = Curriculum()
    trainer, module = fitted(4, data, every=every)
    assert data.epochs == own.epochs == [0, *([epoch for epoch in (1, 2, 3) if every and epoch % every == 0])]
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in plain.state_dict().items())
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(other.callback_metrics["val_loss"].item())


@pytest.mark.parametrize(("every", "ended"), [(1, 2), (2, 3)])
def test_what_a_loader_draws_is_the_same_after_a_resume(every, ended, tmp_path):
    _, whole = fitted(ended + 1, Curriculum(draws=True), every=every, clients=2)
    trainer, _ = fitted(ended, Curriculum(draws=True), every=every, clients=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    torch.rand(7)
    path = str(tmp_path / "last.ckpt")
    _, resumed = fitted(ended + 1, Curriculum(draws=True), every=every, clients=2, ckpt_path=path)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_resume_asks_for_the_loaders_of_the_epoch_in_which_the_run_had_asked(tmp_path):
    _, whole = fitted(4, Curriculum(), every=2, clients=2)
    trainer, _ = fitted(3, Curriculum(), every=2, clients=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    data = Curriculum()
    trainer, resumed = fitted(4, data, every=2, clients=2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert data.epochs == [0, 2]
    assert trainer.current_epoch == 4
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


class Shrinks(Curriculum):
    """Has a sampler of fewer items in its second epoch, or no loader."""

    def __init__(self, loader: bool) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        own = super().train_dataloader()
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        if epoch and not self.loader:
            return iter(own)
        return DataLoader(own.dataset, own.batch_size, sampler=SubsetRandomSampler(range(20 - epoch)))


def test_other_items_of_a_sampler_and_what_is_no_loader_are_refused():
    with pytest.raises(ValueError, match=r"gave \[20\] items at first and gives \[19\] in round 2"):
        fitted(2, Shrinks(True), clients=2)
    with pytest.raises(TypeError, match=r"train_dataloader gives a .*, expected a DataLoader"):
        fitted(2, Shrinks(False), clients=2)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match=r"gave \[24\] items at first and gives \[25\] in round 2"):
        fitted(2, Curriculum(grows=True), clients=2)
