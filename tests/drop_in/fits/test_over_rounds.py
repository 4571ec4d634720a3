"""Schedules, counts and optimizers that continue from a client's local fit to its next."""

import warnings
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from _helpers.plain import RoundsAsEpochs, named
from _helpers.project import Data, Net, run_project
from _helpers.toy import SEED, GivenCohorts, Toy, assert_same, quiet_trainer, whole_state
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.fits.over_rounds import Continuity, FitProgress
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedRep, LocalOnly

ROUNDS = 4
ONE = ([0] * 6 + [1] * 5 + [2] * 8,)
"""Labels of the only client."""


class Cosine(Net):
    """Adam; the rate warms up by steps, and then falls by epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=self.total)]

    @property
    def total(self) -> int:
        return self.trainer.max_epochs

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step < 7:
            for group in self.optimizers().param_groups:
                group["weight_decay"] = 0.001 * self.global_step


class FixedCosine(Cosine):
    total = ROUNDS

    on_train_batch_start = L.LightningModule.on_train_batch_start


class ByEpoch(Net):
    """What is trained depends on the epoch; two schedules, one of them by steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / (1 + self.current_epoch + self.trainer.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        warm, fall = LambdaLR(optimizer, lambda step: (step + 1) / 8), CosineAnnealingLR(optimizer, T_max=20)
        schedule = SequentialLR(optimizer, [warm, fall], milestones=[7])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OneCycle(Net):
    """A cycle over the whole run, which also moves the momentum."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Held(Net):
    """Keeps its scheduler to itself, and steps it after every step of the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        self.warm_up = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 9))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.warm_up.step()


class Manual(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1]) / (1 + self.global_step)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD(self.body.parameters(), lr=0.05, momentum=0.5)
        return [body, torch.optim.Adam(self.fc.parameters(), lr=0.01)], [
            torch.optim.lr_scheduler.StepLR(body, 1, gamma=0.5)
        ]


def project(method: Any, rounds: int, module: Any, data: Any = None, **options: Any) -> Any:
    return run_project(method, rounds, module=module, data=data or Data(Toy(ONE, validation=3, test=3)), **options)


ONE_CLIENT = {"cohorts": [[0]], "optimizer_state": "keep"}


@pytest.mark.parametrize("module", [Cosine, ByEpoch, OneCycle, Held, Manual])
@pytest.mark.parametrize("epochs", [1, 2])
def test_rounds_of_one_client_are_epochs_of_a_plain_run_bit_by_bit(module, epochs):
    federation, _ = project(FedAvg, ROUNDS, module(), epochs=epochs, **ONE_CLIENT)
    plain = module()
    loader = RoundsAsEpochs(Toy(ONE, validation=3, test=3), 0, ROUNDS, epochs)
    quiet_trainer(ROUNDS * epochs).fit(plain, train_dataloaders=loader)
    assert_same(named(federation.global_model()), named(plain))


def test_the_plain_loop_continues_schedules_and_optimizers():
    federation, _ = project(FedAvg, ROUNDS, FixedCosine(), engine=SequentialEngine(), **ONE_CLIENT)
    plain = FixedCosine()
    quiet_trainer(ROUNDS).fit(plain, train_dataloaders=RoundsAsEpochs(Toy(ONE, validation=3, test=3), 0, ROUNDS))
    assert_same(named(federation.global_model()), named(plain))


class Counting(Net):
    """Notes what it is told of its epochs and rates, outside of itself: attributes are reset."""

    seen: ClassVar[list[Any]] = []

    def on_train_epoch_start(self) -> None:
        rate = self.optimizers().param_groups[0]["lr"]
        self.seen.append((self.current_epoch, self.global_step, self.trainer.max_epochs, round(rate, 6)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.08)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 0, 3, 0.08), (1, 3, 3, 0.04), (2, 6, 3, 0.02)]),
        ({"schedule": "restart"}, [(0, 0, 1, 0.08)] * 3),
        ({"engine": TrainerEngine(max_steps=2)}, [(0, 0, 3, 0.08), (1, 2, 3, 0.08), (2, 4, 3, 0.08)]),
    ],
)
def test_counts_go_on_over_the_rounds_that_a_client_takes_part_in(options, expected, monkeypatch):
    monkeypatch.setattr(Counting, "seen", [])
    run_project(LocalOnly, 3, module=Counting(), cohorts=[[0]], **options)  # it has 11 samples: 3 batches
    assert Counting.seen == expected


def test_rounds_without_a_client_do_not_count_for_it(monkeypatch):
    monkeypatch.setattr(Counting, "seen", [])
    run_project(LocalOnly, 3, module=Counting(), cohorts=([0, 3], [3], [0]))
    assert Counting.seen == [
        (0, 0, 3, 0.08),
        (0, 0, 3, 0.08),
        (1, 4, 3, 0.04),  # client 3 again
        (1, 3, 3, 0.04),
    ]


def test_phases_count_by_themselves(monkeypatch):
    monkeypatch.setattr(Counting, "seen", [])
    run_project(FedRep, 2, module=Counting(), cohorts=[[0]], head_epochs=2, head="fc")
    epochs = [(epoch, most) for epoch, _, most, _ in Counting.seen]
    assert epochs == [(0, 4), (1, 4), (0, 2), (2, 4), (3, 4), (1, 2)]


def test_a_new_fit_begins_anew_and_a_longer_one_goes_on(monkeypatch):
    monkeypatch.setattr(Counting, "seen", [])
    federation, trainer = run_project(LocalOnly, 2, module=Counting(), cohorts=[[0]])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(federation, datamodule=trainer.datamodule)
    quiet_trainer(1, GivenCohorts([0])).fit(federation, datamodule=trainer.datamodule)
    assert [(epoch, most) for epoch, _, most, _ in Counting.seen] == [(0, 2), (1, 2), (2, 3), (0, 1)]


@pytest.mark.parametrize(("method", "store"), [(FedAvg, {"client_state_memory_gb": 0.0}), (Ditto, {})])
def test_a_resumed_run_goes_on_bit_by_bit(method, store, tmp_path):
    cohorts = ([0, 1], [1, 3], [0, 1])

    def fit(rounds: int, ckpt_path: Any = None) -> Any:
        federation, data = federate(
            ByEpoch(), Data(), method, Toy().partition, seed=SEED, optimizer_state="keep", schedule="continue"
        )
        for name, value in store.items():
            setattr(federation, name, value)
        trainer = quiet_trainer(rounds, GivenCohorts(*cohorts))
        trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        return federation, trainer

    whole, _ = fit(3)
    _, trainer = fit(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = fit(3, tmp_path / "two.ckpt")
    assert resumed.clients.resume_states.rows.on_disk == bool(store)
    assert_same(whole_state(resumed), whole_state(whole))
    for client in range(5):
        assert resumed.clients.resume_states.get(client) == whole.clients.resume_states.get(client)


@pytest.mark.parametrize("options", [("schedule", "continue", "restart"), ("optimizer_state", "reset", "keep")])
def test_a_resumed_run_with_another_option_is_told(options, tmp_path):
    name, *values = options

    def told(value: str, rounds: int, ckpt_path: Any = None) -> list[str]:
        federation, data = federate(ByEpoch(), Data(), FedAvg, Toy().partition, seed=SEED, **{name: value})
        trainer = quiet_trainer(rounds)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(tmp_path / f"{value}.ckpt")
        return [str(each.message) for each in caught if f"made with {name}" in str(each.message)]

    for there in values:
        told(there, 1)
        for here in values:
            found = told(here, 2, tmp_path / f"{there}.ckpt")
            expected = f"the checkpoint was made with {name} {there!r}, this run has {here!r}: what follows will differ"
            assert [text.startswith(expected) for text in found] == ([True] if here != there else [])


def test_workers_hand_on_what_clients_go_on_with(monkeypatch):
    pytest.importorskip("ray")
    from _helpers.fake_cluster import fake_ray_engine

    engine, _ = fake_ray_engine(monkeypatch, engine=TrainerEngine())
    options = {"cohorts": ([0, 1], [1, 2], [0, 1]), "optimizer_state": "keep"}
    expected, _ = run_project(FedAvg, 3, module=ByEpoch(), **options)
    got, _ = run_project(FedAvg, 3, module=ByEpoch(), engine=engine, **options)
    assert_same(whole_state(got), whole_state(expected))
    states, before = got.clients.resume_states, expected.clients.resume_states
    assert [states.get(client) for client in range(5)] == [before.get(client) for client in range(5)]


def test_nothing_is_stored_where_nothing_goes_on():
    federation, _ = run_project(FedAvg, 1, schedule="restart")
    assert federation.clients.resume_states is None
    federation, _ = run_project(FedAvg, 2, cohorts=[[1]])
    kept, _ = run_project(FedAvg, 2, cohorts=[[1]], optimizer_state="keep")
    counts = [federation.clients.resume_states.get(client) != b"" for client in range(5)]
    assert counts == [False, True, False, False, False]
    assert kept.clients.resume_states.rows.num_bytes > federation.clients.resume_states.rows.num_bytes


def test_a_client_that_fails_keeps_what_it_had():
    class Failing(ByEpoch):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 2 else loss

    before, _ = run_project(LocalOnly, 2, module=Failing(), cohorts=[[0, 1]], optimizer_state="keep")
    cohorts = ([0, 1], [0, 1], [0, 1, 2])
    with pytest.warns(UserWarning, match="left out of the aggregation"):
        after, _ = run_project(LocalOnly, 3, module=Failing(), cohorts=cohorts, optimizer_state="keep")
    for client in (0, 1):
        had = [
            FitProgress(Continuity("continue", "reset"), each.clients.resume_states.get(client), "").counts
            for each in (before, after)
        ]
        assert had[0].epochs == 2
        assert had[0] == had[1]
        assert after.clients.resume_states.get(client) == before.clients.resume_states.get(client)


def test_optimizers_that_differ_between_fits_are_refused():
    class Changing(Net):
        def configure_optimizers(self):
            parameters = list(self.parameters())
            if self.current_epoch:
                return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
            return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(ConfigurationError, match=r"what Changing\.configure_optimizers returns differs"):
        run_project(FedAvg, 2, module=Changing())


def test_objects_in_a_schedule_are_refused_in_a_sentence():
    class Odd(LambdaLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": Toy}

    class Keeping(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [Odd(optimizer, lambda epoch: 1.0)]

    with pytest.raises(ConfigurationError, match="of Keeping keeps objects in its state_dict"):
        run_project(FedAvg, 2, module=Keeping())


@pytest.mark.parametrize("options", [{"schedule": "stop"}, {"optimizer_state": "forget"}])
def test_unknown_choices_are_refused(options):
    with pytest.raises((ConfigurationError, ValueError), match="must be"):
        run_project(FedAvg, module=Net(), **options)
