"""A text classifier: sentences of words, in batches that are padded dictionaries. The sentences are made here."""

from __future__ import annotations

import random
from itertools import chain

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

TOPICS = {
    "weather": ["rain", "sun", "cloud", "wind", "storm", "snow", "warm", "cold", "degrees", "forecast"],
    "kitchen": ["bread", "soup", "salt", "oven", "pan", "butter", "onion", "spoon", "boil", "taste"],
    "football": ["goal", "team", "match", "keeper", "ball", "coach", "league", "score", "pitch", "fans"],
    "music": ["song", "guitar", "choir", "drum", "chord", "melody", "concert", "singer", "stage", "tune"],
}
FILLERS = ["the", "a", "and", "it", "was", "very", "then", "we", "had", "some", "more", "again", "today", "with"]
WORDS = {word: place for place, word in enumerate([*FILLERS, *chain(*TOPICS.values())], start=1)}  # 0 is padding


def sentences(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Sentences of 4 to 16 words, of which a third are of the topic."""
    draw, found = random.Random(seed), []
    for place in range(number):
        label = place % len(TOPICS)
        own = list(TOPICS.values())[label]
        words = [draw.choice(own if draw.random() < 0.35 else FILLERS) for _ in range(draw.randint(4, 16))]
        found.append({"words": torch.tensor([WORDS[word] for word in words]), "label": torch.tensor(label)})
    return found


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad the sentences of a batch to the longest one."""
    words = pad_sequence([item["words"] for item in items], batch_first=True)
    return {"words": words, "label": torch.stack([item["label"] for item in items])}


class Sentences(L.LightningDataModule):
    """Made sentences."""

    def setup(self, stage: str) -> None:
        """Make them."""
        self.train, self.val, self.test = sentences(1600, 0), sentences(400, 1), sentences(400, 2)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches."""
        return DataLoader(self.train, batch_size=32, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.val, batch_size=100, collate_fn=collate)

    def test_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.test, batch_size=100, collate_fn=collate)


class TopicClassifier(L.LightningModule):
    """Mean of word vectors, a hidden layer, and a linear classifier."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.classifier = nn.Linear(width, len(TOPICS))
        self.val_accuracy = MulticlassAccuracy(len(TOPICS), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(TOPICS), average="micro")

    def forward(self, words: Tensor) -> Tensor:
        """Class scores."""
        present = (words > 0).unsqueeze(-1)
        mean = (self.embedding(words) * present).sum(1) / present.sum(1)
        return self.classifier(F.relu(self.hidden(mean)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self(batch["words"]), batch["label"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        scores = self(batch["words"])
        self.val_accuracy(scores, batch["label"])
        self.log("val_loss", F.cross_entropy(scores, batch["label"]), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Accuracy."""
        self.test_accuracy(self(batch["words"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> dict:
        """Adam with a decaying rate."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)}


def main() -> None:
    """Train and test."""
    L.seed_everything(0)
    module, data = TopicClassifier(), Sentences()
    trainer = L.Trainer(max_epochs=5, logger=CSVLogger("runs", name="text"), log_every_n_steps=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data)


if __name__ == "__main__":
    main()
