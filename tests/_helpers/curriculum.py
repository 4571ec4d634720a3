"""A Dataset that the project changes while it trains, also in worker processes."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Curriculum(Dataset):
    """Items with the level at which they are read."""

    def __init__(self):
        self.level, self.names = 0, ["easy"]

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, place):
        return INPUTS[place], int(INPUTS[place, 0] > 0), self.level, len(self.names)

    def advance(self):
        self.level += 1
        self.names.append("harder")


class Wrapped(Dataset):
    """The same inside of another one."""

    def __init__(self, inside):
        self.inside = inside

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, place):
        return self.inside[place]

    def advance(self):
        self.inside.advance()


class Items(L.LightningDataModule):
    """Gives the Dataset to the training."""

    def __init__(self, items, workers=0):
        super().__init__()
        self.items, self.workers = items, workers

    def train_dataloader(self):
        return DataLoader(self.items, batch_size=4, num_workers=self.workers)


class Taught(L.LightningModule):
    """Advances the Dataset in each epoch, and logs the level of what it trains on."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.advance()

    def training_step(self, batch, batch_idx):
        inputs, classes, level, names = batch
        self.log("level", level.float().mean(), on_step=False, on_epoch=True)
        self.log("names", names.float().mean(), on_step=False, on_epoch=True)
        return F.cross_entropy(self.head(self.body(inputs)), classes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByAttribute(Taught):
    """Sets an attribute of the loader's Dataset."""

    def on_train_epoch_start(self):
        items = self.trainer.train_dataloader.dataset
        items.level, items.names = items.level + 1, [*items.names, "harder"]


class ByDataModule(Taught):
    """Changes what the data module holds."""

    def on_train_epoch_start(self):
        self.trainer.datamodule.items.advance()


class ByHand(Taught):
    """Holds the Dataset itself, for an engine without a Trainer."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def on_train_epoch_start(self):
        self.items.advance()
