"""What a module logs arrives: averaged over steps as a Trainer does it, and over clients by their samples."""

import math
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, named, put
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLIENTS, SEED, GivenCohorts, Toy, quiet_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.fits.logs import LogRecord
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedRep

ENGINES = {"sequential": SequentialEngine, "trainer": TrainerEngine}
both = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


class Logging(Net):
    """Logs in every way that Lightning has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MulticlassAccuracy(5, average="micro")
        self.judged = MulticlassAccuracy(5, average="micro")
        self.several = MetricCollection([MulticlassAccuracy(5, average="micro"), MulticlassRecall(5, average="micro")])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.seen(scores, batch[1])
        self.log("train/loss_own", loss, on_step=True, prog_bar=True)
        self.log("accuracy_seen", self.seen)
        self.log_dict({"samples": float(len(batch[1])), "twice": 2 * loss}, on_step=False, on_epoch=True)
        self.several.update(scores, batch[1])
        self.log_dict(self.several)
        self.log("most", loss, reduce_fx="max")
        self.log("all_samples", float(len(batch[1])), reduce_fx="sum")
        return {"loss": loss, "scores": scores}

    def on_train_epoch_end(self) -> None:
        self.log("epochs_done", float(self.seen.update_called))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.body(batch[0])  # not by forward, whose scores would be counted
        self.judged(self.fc(scores), batch[1])
        self.log("val_acc", self.judged)
        self.log("val_loss", F.cross_entropy(self.fc(scores), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", float(self.judged.compute()))


class InSmallBatches(Data):
    def test_dataloader(self) -> Any:
        return DataLoader(super().test_dataloader().dataset, batch_size=2)


UNEQUAL = {"validation": [5, 2, 9, 1, 20], "test": [8, 8, 3, 16, 40]}


def restate_training(epochs):
    """For each client: loss and accuracy at each step of the last epoch, and the sizes of the batches."""
    data, found = Toy(), []
    for client in range(CLIENTS):
        net, steps = first_net(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5, weight_decay=5e-4)
        per_epoch = -(-len(data.labels[client]) // 4)
        for inputs, labels in batches(data, client, 0, "fit/0", epochs):
            scores = net(inputs)
            loss = F.cross_entropy(scores, labels)
            steps.append((float(loss.detach()), int((scores.argmax(1) == labels).sum()), len(labels)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(steps[-per_epoch:])
    return found


@both
def test_training_values_equal_a_loop_over_all_samples(engine):
    _, trainer = run_project(FedAvg, module=Logging(), engine=engine(), epochs=2)
    steps = restate_training(2)
    every = [step for own in steps for step in own]
    samples = sum(n for _, _, n in every)
    got = {name: float(value) for name, value in trainer.callback_metrics.items()}
    loss = sum(loss * n for loss, _, n in every) / samples
    assert got["train/loss_own"] == pytest.approx(loss, abs=1e-5)
    assert got["twice"] == pytest.approx(2 * loss, abs=1e-5)
    assert got["accuracy_seen"] == pytest.approx(sum(right for _, right, _ in every) / samples, abs=1e-6)
    assert got["MulticlassAccuracy"] == got["MulticlassRecall"] == pytest.approx(got["accuracy_seen"])
    assert got["samples"] == pytest.approx(sum(n * n for _, _, n in every) / samples, abs=1e-5)
    assert got["most"] == pytest.approx(max(loss for loss, _, _ in every), abs=1e-5)
    assert got["all_samples"] == samples
    assert got["epochs_done"] == 1.0


@both
def test_validation_values_are_those_of_all_validation_samples(engine):
    federation, trainer = run_project(FedRep, module=Logging(), engine=engine(), data=InSmallBatches(Toy(**UNEQUAL)))
    data, losses, right, samples = Toy(**UNEQUAL), 0.0, 0, 0
    for client in range(CLIENTS):
        net = first_net()
        put(
            net,
            {
                n.replace("body", "encoder").replace("fc", "head"): p
                for n, p in named(federation.client_model(client)).items()
            },
        )
        inputs, labels = data.tensors(client, "validation")
        scores = net(inputs)
        own = int((scores.argmax(1) == labels).sum())
        got = federation.validation_scores[client]
        assert got.logged["val_acc"] == got.logged["val_end"] == pytest.approx(own / len(labels))
        assert math.isnan(got.accuracy)  # it has an accuracy of its own
        losses += float(F.cross_entropy(scores, labels, reduction="sum"))
        right, samples = right + own, samples + len(labels)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(losses / samples, abs=1e-5)
    assert float(trainer.callback_metrics["val_acc"]) == pytest.approx(right / samples)
    assert "val_accuracy/mean" not in trainer.callback_metrics


def test_a_monitored_value_is_summarized_over_clients():
    federation, trainer = run_project(FedAvg, monitor="val_loss")
    for prefix, scores in (("val", federation.validation_scores), ("test", federation.test_scores)):
        own = torch.tensor([score.logged[f"{prefix}_loss"] for score in scores.values()])
        found = {
            what: float(trainer.callback_metrics[f"{prefix}_loss/{what}"]) for what in ("mean", "std", "min", "max")
        }
        expected = {"mean": own.mean(), "std": own.std(correction=0), "min": own.min(), "max": own.max()}
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)


def test_statistics_of_a_monitored_accuracy_are_all_of_what_the_module_logs():
    class Doubled(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_accuracy", 2 * (self(batch[0]).argmax(1) == batch[1]).float().mean() + 1)

    federation, trainer = run_project(FedAvg, module=Doubled(), monitor="val_accuracy")
    own = [score.logged["val_accuracy"] for score in federation.validation_scores.values()]
    assert min(own) >= 1  # no share of anything, beside accuracies that are known
    assert all(score.accuracy <= 1 for score in federation.validation_scores.values())
    expected = {
        "mean": sum(own) / len(own),
        "worst": min(own),
        "worst_decile": min(own),
        "max": max(own),
        "best": max(own),
    }
    found = {name: float(trainer.callback_metrics[f"val_accuracy/{name}"]) for name in expected}
    assert found == pytest.approx(expected)


def test_logging_leaves_nothing_in_the_module():
    """It is patched in an object and for a time only."""
    module = Logging()
    federation, _ = run_project(FedAvg, module=module, engine=SequentialEngine())
    for found in (module, federation.client_model(1), federation.models[0].module):
        assert "log" not in vars(found)
        assert "training_step" not in vars(found)
        assert not found.seen.update_called
    copy_of(federation.models[0])


def test_a_record_refuses_what_it_cannot_reduce():
    record = LogRecord()
    with pytest.raises(ConfigurationError, match="mean, sum, min, max"):
        record.log("a", 1.0, reduce_fx=torch.median)
    with pytest.raises(ConfigurationError, match="single numbers"):
        record.log("a", torch.ones(2))


def test_a_batch_size_that_is_given_is_the_weight():
    record = LogRecord()
    record.start_batch({"text": torch.zeros(3, 7), "more": [torch.zeros(3)]})
    record.log("a", 1.0)
    record.log("a", 5.0, batch_size=1)
    assert record.values() == {"a": pytest.approx((3 * 1.0 + 5.0) / 4)}


@both
def test_a_metric_that_training_uses_too_begins_anew_in_an_evaluation(engine):
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.right = MulticlassAccuracy(5, average="micro")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.right.update(self(batch[0]), batch[1])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.right(self(batch[0]), batch[1])
            self.log("val_acc", self.right)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.right(self(batch[0]), batch[1])
            self.log("test_acc", self.right)

    federation, _ = run_project(FedAvg, module=Shared(), engine=engine(), fine_tune="all")
    for scores, name in ((federation.validation_scores, "val_acc"), (federation.test_scores, "test_acc")):
        for score in scores.values():
            assert score.logged[name] == pytest.approx(score.accuracy)


class Template(Net):
    """Logs as widely used templates do: by step and epoch, in the progress bar, and the best of all epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.val_acc, self.val_acc_best = MulticlassAccuracy(5, average="micro"), MaxMetric()
        self.train_acc = MulticlassAccuracy(5, average="micro")

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.train_acc(scores, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_acc(self(batch[0]), batch[1])
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/hidden", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)


class Curve(L.Callback):
    """Keeps what the outer Trainer knows after each round; lets the second round spoil the model."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.bar: set[str] = set()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rounds.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.bar |= trainer.progress_bar_metrics.keys()


class Spoiled(Template):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (1.0, 1.0, -3.0)[min(epoch, 2)])
        return [optimizer], [rates]


@both
def test_names_progress_bar_and_best_values_are_those_of_a_plain_run(engine, tmp_path):
    curve = Curve()

    def fit(rounds: int, ckpt_path: Any = None, *callbacks: L.Callback) -> L.Trainer:
        federation, data = federate(Spoiled(), Data(), FedAvg, Toy().partition, seed=SEED, engine=engine())
        trainer = quiet_trainer(rounds, GivenCohorts(range(CLIENTS)), *callbacks, num_sanity_val_steps=2)
        trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        return trainer

    trainer = fit(4, None, curve)
    values = [own["val/acc"] for own in curve.rounds]
    assert values[-1] < max(values)  # there is something to keep
    assert [own["val/acc_best"] for own in curve.rounds] == [max(values[: i + 1]) for i in range(4)]
    assert {"train_loss", "train_loss_step", "train_loss_epoch"} <= curve.rounds[0].keys()
    assert curve.rounds[0]["train_loss"] == curve.rounds[0]["train_loss_epoch"]
    if engine is TrainerEngine:
        assert {"train_acc", "train_acc_step", "train_acc_epoch"} <= curve.rounds[0].keys()
        assert curve.rounds[0]["train_acc"] == curve.rounds[0]["train_acc_epoch"]
    assert {"train_loss", "val/acc", "val/acc_best"} <= curve.bar
    assert "val/hidden" not in curve.bar
    path = tmp_path / "three.ckpt"
    fit(3).save_checkpoint(path)
    assert float(fit(4, path).callback_metrics["val/acc_best"]) == float(trainer.callback_metrics["val/acc_best"])
