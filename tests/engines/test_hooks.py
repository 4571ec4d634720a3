"""What of Lightning works inside a local fit, and what is refused instead of being ignored."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.plain import named
from _helpers.toy import Toy, assert_same, run
from lightning.fabric.utilities import registry

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.engines import FitEnvironment
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedRep

ENGINES = [SequentialEngine, TrainerEngine]
STEPS = len(range(0, len(Toy().labels[0]), 4))  # of client 0 in an epoch


class Manual(FedAvg):
    """SGD by manual optimization."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        output = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return output


class TwoOptimizers(Manual):
    """One optimizer for the encoder, one for the head."""

    def configure_optimizers(self):
        make = partial(torch.optim.SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return [make(self.encoder.parameters()), make(self.head.parameters())]

    def training_step(self, batch, batch_idx):
        output = FedAvg.training_step(self, batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(output["loss"])
        for optimizer in self.optimizers():
            optimizer.step()
        return output


class Several(FedAvg):
    configure_optimizers = TwoOptimizers.configure_optimizers


class Skips(FedAvg):
    """Lightning's rule: a training step that returns None skips the batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class OwnStep(FedAvg):
    def optimizer_step(self, *args, **kwargs):
        return super().optimizer_step(*args, **kwargs)


class Plateau(FedAvg):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class NoOptimizer(FedAvg):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (Manual, "manual optimization .Manual.; use TrainerEngine"),
        (OwnStep, "OwnStep overrides optimizer_step.*TrainerEngine"),
        (Plateau, "ReduceLROnPlateau.*TrainerEngine"),
        (NoOptimizer, "one optimizer from configure_optimizers, got None"),
        (Several, "(?s)takes one optimizer.*several need TrainerEngine"),
        (Skips, "Skips.training_step returned None.*TrainerEngine"),
    ],
    ids=["manual", "hook", "plateau", "none", "several", "skipped"],
)
def test_fabric_fit_refuses_what_it_would_do_otherwise(client, message):
    with pytest.raises(ConfigurationError, match=message):
        run(client)


@pytest.mark.parametrize("client", [Manual, TwoOptimizers, OwnStep])
def test_trainer_fit_takes_it(client):
    got = run(client, 2, engine=TrainerEngine())
    expected = run(FedAvg, 2, engine=TrainerEngine())
    assert_same(named(got.client_model(0)), named(expected.client_model(0)), atol=1e-7)


# ---------------------------------------------------------------------- hooks

HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
)


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_are_called_in_lightnings_order(engine):
    called = []

    class Watched(FedAvg):
        def training_step(self, batch, batch_idx):
            called.append(("training_step", batch_idx))
            return super().training_step(batch, batch_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            called.append(("on_after_batch_transfer", dataloader_idx))
            return batch

    for name in HOOKS:
        setattr(Watched, name, lambda self, *args, name=name: called.append((name, len(args))))
    run(partial(Watched, epochs=2), cohorts=[[0]], engine=engine(), limit_val_batches=0)

    expected = [("on_train_start", 0)]
    for _ in range(2):
        expected.append(("on_train_epoch_start", 0))
        for index in range(STEPS):
            expected += [("on_after_batch_transfer", 0), ("on_train_batch_start", 2), ("training_step", index)]
            expected += [("on_after_backward", 0), ("on_before_optimizer_step", 1), ("on_train_batch_end", 3)]
        expected.append(("on_train_epoch_end", 0))
    assert called == [*expected, ("on_train_end", 0)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_that_changes_the_batch_is_heard(engine):
    class Doubled(FedRep):  # its first phase would run on features computed beforehand
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return 2 * batch[0], batch[1]

    def doubled(inputs, targets):
        inputs *= 2

    got = run(Doubled, engine=engine(), limit_val_batches=0)
    expected = run(FedRep, data=Toy(change=doubled), engine=engine(), limit_val_batches=0)
    assert_same(got.personal.get(1), expected.personal.get(1), atol=1e-6)


class Counting(L.Callback):
    """Counts across deep copies."""

    seen: list[tuple[str, int]] = []  # noqa: RUF012

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, *args):
        self.steps += 1

    def on_train_end(self, trainer, pl_module):
        self.seen.append((pl_module.phase.name, self.steps))


def test_callbacks_of_the_inner_trainer_are_fresh_in_every_fit():
    Counting.seen.clear()
    mine = Counting()
    run(partial(FedRep, head_epochs=1, epochs=2), 2, cohorts=[[0]], engine=TrainerEngine(callbacks=[mine]))
    assert Counting.seen == [("head", STEPS), ("encoder", 2 * STEPS)] * 2
    assert mine.steps == 0


def test_gradient_accumulation():
    """Two batches a step are one batch of twice the size, where the batches are full."""
    data = [[0, 1] * 8] * 5
    got = run(partial(FedAvg, epochs=1), data=Toy(data), engine=TrainerEngine(accumulate_grad_batches=2))
    expected = run(partial(FedAvg, epochs=1), data=Toy(data, batch_size=8), engine=TrainerEngine())
    assert_same(named(got.client_model(0)), named(expected.client_model(0)), atol=1e-6)


# ---------------------------------------------------------------------- values


class _Catch(L.Callback):
    def __init__(self):
        self.metrics = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


class Logging(FedAvg):
    """Logs the number of the batch, in three ways."""

    def training_step(self, batch, batch_idx):
        self.log("batch", batch_idx)
        self.log("mean_batch", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)
        self.log_dict({"twice": 2.0 * batch_idx}, on_step=False, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ENGINES)
def test_logged_values_arrive_as_train_metrics(engine):
    catch = _Catch()
    run(partial(Logging, epochs=2), 2, cohorts=[[0], [0, 1]], engine=engine(), callbacks=[catch])
    steps = [len(range(0, len(Toy().labels[client]), 4)) for client in (0, 1)]
    means = [(n - 1) / 2 for n in steps]
    for metrics, expected in zip(catch.metrics, (means[0], sum(means) / 2), strict=True):
        assert metrics["train/mean_batch"] == pytest.approx(expected)
        assert metrics["train/twice"] == pytest.approx(2 * expected)
        assert "train/batch" in metrics
        assert metrics["train/loss"] == pytest.approx(metrics["train/cross_entropy"])
        assert metrics["train/clients_left_out"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_step_may_return_the_loss_alone(engine):
    class Bare(FedAvg):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"]

    catch = _Catch()
    got = run(Bare, engine=engine(), callbacks=[catch])
    assert_same(named(got.client_model(0)), named(run(FedAvg, engine=engine()).client_model(0)))
    assert catch.metrics[0]["train/loss"] > 0


def test_trainer_fit_may_skip_batches():
    class Zero(FedAvg):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx)["loss"] * float(batch_idx != 1)}

    options = {"momentum": 0.0, "weight_decay": 0.0, "epochs": 1}
    got = run(partial(Skips, **options), engine=TrainerEngine())
    expected = run(partial(Zero, **options), engine=TrainerEngine())
    assert_same(named(got.client_model(0)), named(expected.client_model(0)), atol=1e-7)


def test_inner_trainers_look_for_callbacks_of_installed_packages_once(monkeypatch):
    looked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: looked.append(group) or [])
    engine, own = TrainerEngine(), L.Callback()
    one, other = engine.make_trainer(FitEnvironment()), engine.make_trainer(FitEnvironment(), [own])
    assert looked == ["lightning.pytorch.callbacks_factory"]
    assert (one.callbacks, other.callbacks) == ([], [own])
    assert other is not one
    assert other.fit_loop.trainer is other
