"""Tutorial: a Lightning project as a federation."""

# %% Imports
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from pfl_lightning import export_clients, federate
from pfl_lightning.datamodules import DirichletOverClients
from pfl_lightning.methods import FedBN

Batch = tuple[Tensor, Tensor]


# %% The project, as it is: a LightningDataModule
class BreastCancer(L.LightningDataModule):
    """Thirty measurements of a tumor, malignant or benign."""

    def setup(self, stage: str) -> None:
        """Standardize and split."""
        inputs, targets = load_breast_cancer(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        samples = TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets))
        parts = random_split(samples, [0.6, 0.2, 0.2], torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches."""
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """All samples in order."""
        return DataLoader(self.val, batch_size=64)

    def test_dataloader(self) -> DataLoader:
        """All samples in order."""
        return DataLoader(self.test, batch_size=64)


# %% The project, as it is: a LightningModule
class TumorNet(L.LightningModule):
    """Two layers with batch normalization, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.classifier = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores, (N, 2)."""
        return self.classifier(self.body(inputs))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Cross entropy."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Share of correctly classified samples."""
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


# %% One line makes it a federation
L.seed_everything(0)
rule = DirichletOverClients(num_clients=4, alpha=0.5, samples_per_client=60)
module, data = federate(TumorNet(), BreastCancer(), FedBN, rule, head="classifier", monitor="val_loss", epochs=1)

# %% The same Trainer, callbacks and loggers; max_epochs is the number of rounds
best = ModelCheckpoint("runs/tumor/checkpoints", monitor="val_loss")
logger = CSVLogger("runs", name="tumor", version=0)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
trainer = L.Trainer(max_epochs=3, callbacks=[best], logger=logger, **quiet)
trainer.fit(module, datamodule=data)
for name in ("val_loss", "val_loss/max", "val_accuracy/mean", "val_accuracy/worst"):
    print(f"{name}: {float(trainer.callback_metrics[name]):.3f}")

# %% A model for every client, of the project's own class
model = module.client_model(3)
print("client 3 has a", type(model).__name__)
export_clients(module, "runs/tumor/models")
print(sorted(path.name for path in Path("runs/tumor/models").glob("*.pt")))

net = TumorNet()  # without this package
net.load_state_dict(torch.load("runs/tumor/models/client_3.pt", weights_only=True))
