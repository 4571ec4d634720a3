"""A LightningCLI of a project's own, with a FederatedLoop in its defaults or in its config: every subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.datamodules import DirichletOverClients
from pfl_lightning.methods import FedPer, FedProx


class Project(L.LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body, self.fc = nn.Linear(3, width), nn.Linear(width, 2)
        self.rates: list[float] = []

    def forward(self, inputs: Any) -> Any:
        return self.fc(self.body(inputs).relu())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        assert all(p is own for p, own in zip(optimizer.param_groups[0]["params"], self.parameters(), strict=True))
        self.log("rate", optimizer.param_groups[0]["lr"])
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


def items(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class ProjectData(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.items = {"fit": items(48, 0), "predict": items(10, 3)}[stage] if stage in ("fit", "predict") else None

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(items(24, 1), batch_size=8)

    def test_dataloader(self) -> Any:
        return DataLoader(items(24, 2), batch_size=8)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=4)


QUIET = ("accelerator=cpu", "enable_progress_bar=false", "enable_model_summary=false", "num_sanity_val_steps=0")


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["main.py"])

    def run(subcommand: str, *words: str, **defaults: Any) -> Any:
        """The project's main, with its one changed line."""
        quiet = [f"--trainer.{option}" for option in QUIET]
        rounds = ["--trainer.max_epochs=2"] if "--trainer.max_epochs=1" not in words else []
        return LightningCLI(Project, ProjectData, args=[subcommand, *quiet, *rounds, *words], trainer_defaults=defaults)

    return run


def loop() -> FederatedLoop:
    return FederatedLoop(method=FedPer, num_clients=3)


def test_every_subcommand_of_a_project_s_own_cli(cli):
    fitted = cli("fit", callbacks=[loop()])
    assert fitted.trainer.lightning_module.num_clients == 3
    (path,) = Path().glob("**/*.ckpt")
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    assert {name: hparams[name] for name in ("width", "lr")} == {"width": 4, "lr": 0.1}
    assert "method" not in hparams  # a LightningCLI takes them for arguments of the module
    found = cli("validate", "--ckpt_path", str(path), callbacks=[loop()]).trainer.callback_metrics
    assert float(found["val_loss"]) == float(fitted.trainer.callback_metrics["val_loss"])
    tested = cli("test", "--ckpt_path", str(path), callbacks=[loop()])
    assert tested.trainer.lightning_module.test_scores.keys() == {0, 1, 2}

    predicted = cli("predict", "--ckpt_path", str(path), callbacks=[loop()])
    fitted.model.eval()
    expected = fitted.model(items(10, 3).tensors[0])
    torch.testing.assert_close(torch.cat(predicted.trainer.predict_loop.predictions), expected)
    assert isinstance(predicted.trainer.lightning_module, Project)


def test_optimizer_and_scheduler_of_the_command_line_are_each_client_s(cli):
    words = ["--optimizer=Adam", "--optimizer.lr=0.05", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    before = nn.utils.parameters_to_vector(Project().parameters())
    with pytest.warns(UserWarning, match="configure_optimizers` will be overridden"):
        fitted = cli(
            "fit",
            *words,
            "--trainer.max_epochs=1",
            callbacks=[FederatedLoop(method="FedAvg", num_clients=3, epochs=2, seed=1)],
        )
    assert float(fitted.trainer.callback_metrics["rate"]) == pytest.approx(0.005)  # in its second epoch
    assert not torch.equal(nn.utils.parameters_to_vector(fitted.model.parameters()), before)


def test_a_callback_of_the_command_line(cli):
    words = ["--trainer.callbacks+=FederatedLoop", "--trainer.callbacks.method=FedPer", "--trainer.callbacks.cohort=2"]
    rule = ["--trainer.callbacks.partition=DirichletOverClients", "--trainer.callbacks.partition.num_clients=3"]
    fitted = cli("fit", *words, *rule, "--trainer.max_epochs=1")
    (found,) = [callback for callback in fitted.trainer.callbacks if isinstance(callback, FederatedLoop)]
    assert isinstance(found.data.partition, DirichletOverClients)
    assert found.cohort == 2


def test_a_callback_of_a_config_file(cli):
    Path("federated.yaml").write_text(
        """
trainer:
  callbacks:
    - class_path: pfl_lightning.FederatedLoop
      init_args: {method: pfl_lightning.methods.FedProx, num_clients: 3}
      dict_kwargs: {mu: 0.2}
"""
    )
    fitted = cli("fit", "--config", "federated.yaml", "--trainer.max_epochs=1", "--trainer.logger=false")
    (client,) = fitted.trainer.lightning_module.models
    assert isinstance(client, FedProx)
    assert client.mu == 0.2
