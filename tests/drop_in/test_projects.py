"""Projects of other kinds: images of the package's own data, precision, two losses, a list of layers for a head."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.datamodules import ClassesPerClient, Digits
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedRep


class Images(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.classify = nn.Linear(4 * 36, 10)

    def forward(self, inputs: Any) -> Any:
        return self.classify(self.convolutions(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_images_of_a_federated_data_module(engine):
    data = Digits(ClassesPerClient(4, classes_per_client=2), batch_size=32)
    federation, data = federate(Images(), data, FedRep, engine=engine(), seed=1, head="classify")
    trainer = quiet_trainer(3)
    trainer.fit(federation, datamodule=data)
    assert "test_accuracy/mean" not in trainer.callback_metrics
    trainer.test(federation, datamodule=data, verbose=False)
    assert float(trainer.callback_metrics["test_accuracy/mean"]) > 0.8
    assert [row.encoder for row in federation.architectures] == ["Images"]
    with torch.no_grad():
        for client in (0, 3):
            own, part = federation.client_model(client).eval(), data.client_data(client).test
            inputs, classes = part.loader(1000).tensors()
            right = float((own(inputs).argmax(1) == classes).float().mean())
            assert federation.test_scores[client].accuracy == pytest.approx(right)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precision_is_the_outer_trainer_s(precision):
    def weights(engine):
        module = Net()
        federation, _ = run_project(FedAvg, module=module, engine=engine(), trainer={"precision": precision})
        found = dict(federation.global_model().state_dict())
        assert found["fc.weight"].dtype == (torch.float64 if precision == "64-true" else torch.float32)
        given = module.state_dict()
        assert all(given[name].dtype == value.dtype for name, value in found.items())
        assert_same(given, found, atol=0.0)
        return found

    assert_same(weights(SequentialEngine), weights(TrainerEngine), atol=1e-12 if precision == "64-true" else 1e-3)


def test_running_statistics_of_a_frozen_part_are_held():
    """In the phase of the head the encoder is as it was received, its running statistics included."""
    for engine in (SequentialEngine, TrainerEngine):
        seen = []

        class Watched(Net):
            def on_train_end(self, seen=seen):
                seen.append({name: value.clone() for name, value in self.state_dict().items()})

        module = Watched(norm=True)
        start = {name: value.clone() for name, value in module.state_dict().items()}
        data = Data(drop_last=True)
        run_project(FedRep, module=module, data=data, engine=engine(), cohorts=[[0]], head="fc")
        head, encoder = seen
        for name, value in start.items():
            assert torch.equal(head[name], value) == (not name.startswith("fc.")), name
            assert torch.equal(encoder[name], head[name]) == name.startswith("fc."), name


class TwoLosses(Net):
    """Steps by itself, and returns a dictionary without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        return {"generator": loss.detach(), "discriminator": loss.detach(), "scores": self(batch[0])}


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_a_manual_step_may_return_anything(method):
    _, trainer = run_project(method, module=TwoLosses())
    assert {"train/generator", "train/discriminator", "train_loss"} & set(trainer.callback_metrics) == {
        "train/generator",
        "train/discriminator",
    }


def test_callbacks_of_local_fits_are_the_engine_s():
    class Halving(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            with torch.no_grad():
                pl_module.fc.bias.fill_(3.0)

    federation, _ = run_project(FedAvg, engine=TrainerEngine(callbacks=[Halving()]))
    assert federation.global_model().fc.bias.tolist() == pytest.approx([3.0] * 5)


class Sequences(L.LightningDataModule):
    """Pairs of a sequence of its own length and a class."""

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(3)
        lengths = torch.randint(1, 6, (80,), generator=draw).tolist()
        self.items = [(torch.randn(n, 3, generator=draw) + place % 2, place % 2) for place, n in enumerate(lengths)]

    def loader(self, items: Any, **options: Any) -> Any:
        return DataLoader(items, batch_size=7, collate_fn=nested, **options)

    def train_dataloader(self) -> Any:
        return self.loader(self.items[:60], shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(self.items[60:])


def nested(items: Any) -> Any:
    ordered = sorted(items, key=lambda item: -len(item[0]))  # as packed sequences need them
    lengths = torch.tensor([len(item[0]) for item in ordered])
    padded = pad_sequence([item[0] for item in ordered], batch_first=True)
    return {"text": (padded, lengths), "label": torch.tensor([item[1] for item in ordered]), "extra": [{"n": lengths}]}


class Recurrent(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.answer = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, text: Any) -> Any:
        _, last = self.recurrent(pack_padded_sequence(text[0], text[1].cpu(), batch_first=True))
        return self.answer(last[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["text"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert torch.equal(batch["extra"][0]["n"], batch["text"][1])
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch["label"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_nested_batches_of_sequences_of_different_lengths(engine):
    federation, data = federate(
        Recurrent(),
        Sequences(),
        FedPer,
        ClassesPerClient(3, classes_per_client=2),
        engine=engine(),
        seed=1,
        epochs=3,
    )
    trainer = quiet_trainer(4)
    trainer.fit(federation, datamodule=data)
    assert float(trainer.callback_metrics["val_accuracy/mean"]) > 0.8
    with torch.no_grad():
        for client in range(3):
            own, part = federation.client_model(client), data.client_data(client).validation
            items = [data.items[60:][place] for place in part.indices.tolist()]
            scores = torch.cat([own((inputs[None], torch.tensor([len(inputs)]))) for inputs, _ in items])
            classes = torch.tensor([label for _, label in items])
            got = federation.validation_scores[client]
            assert got.accuracy == pytest.approx(float((scores.argmax(1) == classes).float().mean()))
            assert got.logged["val_loss"] == pytest.approx(float(F.cross_entropy(scores, classes)), abs=1e-5)
