"""Transformers of Hugging Face with random weights, in thin modules."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from _helpers.foreign.project import Made, Project

WORDS, LENGTH = 40, 8


class Texts(Dataset):
    """Token ids; half of the texts hold the word 5 where the others hold the word 9."""

    def __init__(self, items: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(10, WORDS, (items, LENGTH), generator=draw)
        self.classes = torch.arange(items) % 2
        self.ids[:, 2] = torch.where(self.classes == 0, 5, 9)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, Any]:
        ids = self.ids[place]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.classes[place]}


class LanguageTexts(Texts):
    """The same texts, each its own target."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": self.ids[place], "labels": self.ids[place]}


class HuggingFace(L.LightningModule):
    """A model whose output has a loss, as most scripts wrap it."""

    def __init__(self, model: Any, lr: float = 1e-2) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss)

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _loaders(kind: type[Texts]) -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(kind(36, 1), batch_size=6),
        "val_dataloaders": DataLoader(kind(12, 2), batch_size=6),
    }


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return HuggingFace(BertForSequenceClassification(config)), _loaders(Texts)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    return HuggingFace(GPT2LMHeadModel(config)), _loaders(LanguageTexts)


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.intermediate_size, config.num_labels = 16, 2
    return HuggingFace(ViTForImageClassification(config)), {
        "train_dataloaders": DataLoader(Pictures(36), batch_size=6),
        "val_dataloaders": DataLoader(Pictures(12), batch_size=6),
    }


class Pictures(Dataset):
    """Noise, brighter in one class."""

    def __init__(self, items: int) -> None:
        self.classes = torch.arange(items) % 2
        self.inputs = torch.randn(items, 1, 8, 8, generator=torch.Generator().manual_seed(items))
        self.inputs += self.classes[:, None, None, None]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"pixel_values": self.inputs[place], "labels": self.classes[place]}


class Sounds(Dataset):
    """Waves of different lengths, higher in one class."""

    def __init__(self, items: int, seed: int) -> None:
        self.items, self.seed = items, seed

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, place: int) -> Any:
        draw = torch.Generator().manual_seed(self.seed + place)
        time = torch.arange(200 + 20 * (place % 4)) / 10
        return torch.sin(time * (1 + 2 * (place % 2))) + 0.1 * torch.randn(len(time), generator=draw), place % 2


def padded(items: list[Any]) -> dict[str, Any]:
    waves, classes = zip(*items, strict=True)
    inputs = torch.nn.utils.rnn.pad_sequence(list(waves), batch_first=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long()
    return {"input_values": inputs, "attention_mask": mask, "labels": torch.tensor(classes)}


def wav2vec() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
        num_labels=2,
    )
    return HuggingFace(Wav2Vec2ForSequenceClassification(config)), {
        "train_dataloaders": DataLoader(Sounds(36, 1), batch_size=6, collate_fn=padded),
        "val_dataloaders": DataLoader(Sounds(12, 2), batch_size=6, collate_fn=padded),
    }


PROJECTS = [
    Project(
        "text classification",
        "transformers",
        "BertForSequenceClassification",
        "token ids",
        bert,
        ("transformers",),
        head="model.classifier",
    ),
    Project("language model", "transformers", "GPT2LMHeadModel", "token ids", gpt2, ("transformers",)),
    Project(
        "images",
        "transformers",
        "ViTForImageClassification",
        "dictionaries",
        vit,
        ("transformers",),
        head="model.classifier",
    ),
    Project(
        "audio",
        "transformers",
        "Wav2Vec2ForSequenceClassification",
        "waves of different lengths",
        wav2vec,
        ("transformers",),
        head="model.classifier",
    ),
]
