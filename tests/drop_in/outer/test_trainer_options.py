"""Options of the outer Trainer mean in a federation what a Lightning user means by them, or are refused."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same, quiet_trainer, run
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.tuner import Tuner
from torch.nn import functional as F

from pfl_lightning import Federation, SequentialEngine, TrainerEngine, federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg


class Counting(Net):
    """Counts its batches by stage; copies of it count together."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts.add("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counts.add("val")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.counts.add("test")
        super().test_step(batch, batch_idx)


class Counts(dict[str, int]):
    """Of how many batches each stage was."""

    def __deepcopy__(self, memo: Any) -> "Counts":
        return self

    def add(self, stage: str) -> None:
        self[stage] = self.get(stage, 0) + 1


class LateTimer(Timer):
    """Does not look at the clock before the first round."""

    def on_fit_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        pass


REFUSED = [
    ({"overfit_batches": 2}, r"overfit_batches=2.*engine=TrainerEngine\(limit_train_batches=2\)"),
    ({"overfit_batches": 0.5}, r"overfit_batches=0.5.*engine=TrainerEngine\(limit_train_batches=0.5\)"),
    ({"max_steps": 7}, r"TrainerEngine\(max_steps=7\)\).* Rounds are limited by max_epochs"),
    ({"min_steps": 7}, "min_steps=7.*use min_epochs"),
    ({"val_check_interval": 0.5}, "val_check_interval=0.5.*use check_val_every_n_epoch"),
    ({"reload_dataloaders_every_n_epochs": 2}, "epochs=2.*clients keep the items of the first"),
    ({"val_check_interval": 1}, "val_check_interval=1.*use check_val_every_n_epoch"),
]
OF_BATCHES = [
    {"limit_train_batches": 1},
    {"limit_train_batches": 0.5, "limit_val_batches": 1, "limit_test_batches": 1},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


@pytest.mark.parametrize("options", OF_BATCHES, ids=str)
def test_what_is_about_batches_holds_in_local_fits(options):
    """As if the engine had been given it; the Trainer has its own options again when it is done."""
    named, handed, plain = Counting(), Counting(), Counting()
    expected, _ = run_project(FedAvg, module=named, data=Data(batch_size=4), engine=TrainerEngine(**options))
    found, trainer = run_project(FedAvg, module=handed, data=Data(batch_size=4), trainer=options)
    other, _ = run_project(FedAvg, module=plain, data=Data(batch_size=4))
    assert handed.counts == named.counts
    assert_same(dict(found.global_model().state_dict()), dict(expected.global_model().state_dict()), atol=0.0)
    assert not torch.equal(found.global_model().fc.weight, other.global_model().fc.weight)
    assert {name: getattr(getattr(trainer, name), "value", getattr(trainer, name)) for name in options} == options
    assert found.engine.limit_train_batches is None


def test_a_fast_run_takes_a_batch_of_each_client():
    module = Counting()
    federation, data = federate(module, Data(batch_size=4), FedAvg, num_clients=3, seed=1)
    trainer = quiet_trainer(5, fast_dev_run=2)
    trainer.fit(federation, datamodule=data)
    assert module.counts["train"] == 3 * 2
    assert 3 <= module.counts["val"] <= 3 * 2  # as many as there are
    assert (trainer.current_epoch, trainer.max_steps) == (1, 2)


def test_engines_without_such_an_option_refuse_it():
    with pytest.raises(ConfigurationError, match=r"engine=TrainerEngine\(limit_train_batches=3\)\).*\(cohort=...\)"):
        run_project(FedAvg, engine=SequentialEngine(), trainer={"limit_train_batches": 3})
    with pytest.raises(ConfigurationError, match=r"use .*TrainerEngine\(limit_train_batches=1, limit_v"):
        run_project(FedAvg, engine=SequentialEngine(), trainer={"fast_dev_run": True})
    options = {"gradient_clip_val": 0.05}
    expected, _ = run_project(FedAvg, engine=SequentialEngine(**options))
    found, _ = run_project(FedAvg, engine=SequentialEngine(), trainer=options)
    assert_same(dict(found.global_model().state_dict()), dict(expected.global_model().state_dict()), atol=0.0)


def test_an_engine_that_says_something_else_is_asked_about():
    with pytest.raises(ConfigurationError, match=r"Trainer\(limit_train_batches=3\)"):
        run_project(FedAvg, engine=TrainerEngine(limit_train_batches=2), trainer={"limit_train_batches": 3})


class Validated(Data):
    def val_dataloader(self) -> Any:
        return self.test_dataloader()


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_count_clients_is_refused_with_the_right_option(options, message):
    module = Counting()
    with pytest.raises(ConfigurationError, match=message):
        run_project(FedAvg, module=module, data=Validated(), trainer=options)
    assert not module.counts


@pytest.mark.parametrize(
    "options", [{"val_check_interval": 0.5}, {"val_check_interval": 99, "check_val_every_n_epoch": None}]
)
def test_an_interval_of_validations_that_there_are_not_says_nothing(options):
    _, trainer = run_project(FedAvg, num_clients=2, trainer=options)
    assert options.items() <= vars(trainer).items()  # given back
    assert "val_loss" in trainer.callback_metrics  # of items that are set aside, after the round


def test_every_named_option_of_the_engine_is_one():
    TrainerEngine(
        limit_train_batches=3,
        limit_val_batches=2,
        limit_test_batches=2,
        max_steps=7,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
    )
    with pytest.raises(ValueError, match="max_steps"):
        TrainerEngine(max_steps=0)


def counts(**engine: Any) -> dict[str, int]:
    """Batches by stage in a round of two clients, who have several batches of each."""
    module = Counting()
    data = Data(batch_size=4)
    federation, trainer = run_project(
        FedAvg, module=module, data=data, num_clients=2, cohorts=[[0, 1]], engine=TrainerEngine(**engine)
    )
    in_fit = dict(module.counts)
    module.counts.clear()
    trainer.test(federation, datamodule=trainer.datamodule, verbose=False)
    return {**in_fit, "test alone": module.counts["test"]}


def test_limits_of_the_engine_are_of_each_client():
    whole = counts()
    assert whole["train"] > 4
    assert counts(limit_train_batches=2) == {**whole, "train": 2 * 2}
    assert counts(max_steps=1) == {**whole, "train": 2 * 1}
    by_test = counts(limit_test_batches=1)
    assert (by_test["train"], by_test["val"], by_test["test alone"]) == (whole["train"], whole["val"], 2 * 1)
    by_val = counts(limit_val_batches=1)
    assert (by_val["train"], by_val["val"], by_val["test alone"]) == (whole["train"], 2 * 1, whole["test alone"])


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches"])
def test_none_at_all_means_the_same_of_clients(name):
    module = Counting()
    run_project(FedAvg, module=module, trainer={name: 0})
    assert name.split("_")[1] not in module.counts


def test_evaluations_are_counted_in_rounds_and_clients():
    options = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 1}
    validated = []

    class Watched(Net):
        def on_validation_start(self) -> None:
            validated.append(1)

    run_project(FedAvg, 4, module=Watched(), num_clients=3, cohorts=[range(3)] * 4, trainer=options)
    assert len(validated) == 1 + 2 * 3


def test_all_is_said_by_a_float():
    module, plain = Counting(), Counting()
    run_project(
        FedAvg, module=module, trainer={"limit_train_batches": 1.0, "limit_val_batches": 1.0, "val_check_interval": 1.0}
    )
    run_project(FedAvg, module=plain)
    assert module.counts == plain.counts


def test_limits_of_evaluations_need_an_evaluation_by_steps():
    federation = Federation(FedAvg, lambda data: torch.nn.Flatten(), engine=TrainerEngine(limit_val_batches=2))
    federation.clients = None
    with pytest.raises(ConfigurationError, match=r"limit_val_batches .* modules given to federate.*eval_cohort"):
        federation.engine.start([FedAvg.__new__(FedAvg)], None, None)


def test_a_timer_ends_the_run_after_a_round():
    loop = FederatedLoop()
    federation, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    timer = LateTimer(duration={"microseconds": 1}, interval="epoch")
    quiet_trainer(50, timer, loop).fit(federation, datamodule=data)
    assert loop.rounds == 1
    again, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    quiet_trainer(1, Timer()).fit(again, datamodule=data)  # it only measures
    assert_same(federation.global_model().state_dict(), again.global_model().state_dict())


def test_max_time_ends_the_run_after_a_round_also_when_it_is_resumed(tmp_path):
    """The time of a resumed run is that of both parts."""

    def timed(rounds, hours, passed=0.0, **options):
        loop = FederatedLoop()
        trainer = quiet_trainer(rounds, loop, max_time={"hours": hours}, **options)
        (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
        monkeypatched = timer.time_elapsed
        timer.time_elapsed = lambda *stage: monkeypatched(*stage) + (passed if loop.rounds or loop._in_round else 0.0)
        return trainer, loop

    federation, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    trainer, loop = timed(50, hours=1, passed=2 * 3600)
    trainer.fit(federation, datamodule=data)
    assert (loop.rounds, trainer.current_epoch) == (1, 1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    again, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    trainer, loop = timed(50, hours=1)
    trainer.fit(again, datamodule=data, ckpt_path=tmp_path / "first.ckpt")
    assert trainer.current_epoch == 1
    trainer, loop = timed(3, hours=3)
    again, data = federate(Net(), Data(), FedAvg, num_clients=3, seed=1)
    trainer.fit(again, datamodule=data, ckpt_path=tmp_path / "first.ckpt")
    assert trainer.current_epoch == 3


def test_a_timer_ends_every_federation_after_a_round():
    timer = LateTimer(duration={"microseconds": 1})
    federation = run(partial(FedAvg, lr=0.1), 5, callbacks=[timer])
    assert federation.trainer.current_epoch == 1
    quiet_trainer(1, timer).test(federation, datamodule=federation.trainer.datamodule, verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overfit_batches": 2}, r"use FederatedLoop\(..., engine=TrainerEngine"),
        ({"max_steps": 7}, r"engine, FederatedLoop\(..., engine=TrainerEngine\(max_steps=7\)\)"),
        ({"callbacks": [ThroughputMonitor(len)]}, r"FederatedLoop\(..., local_callbacks=\[ThroughputMonitor"),
    ],
    ids=["overfit_batches", "max_steps", "callback"],
)
def test_messages_name_the_form_that_the_project_has(options, message):
    own = options.pop("callbacks", [])
    loop = FederatedLoop(method=FedAvg, num_clients=3)
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(1, loop, *own, **options).fit(Net(), datamodule=Data())


class Watching(Net):
    """Sees the switches of torch in its step."""

    seen: list[tuple[bool, bool]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).seen.append((torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_detect_anomaly_and_deterministic_hold_inside_local_fits(engine):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        Watching.seen = []
        run_project(FedAvg, module=Watching(), engine=engine(), trainer={"detect_anomaly": True, "deterministic": True})
        assert set(Watching.seen) == {(True, True)}
    finally:
        torch.use_deterministic_algorithms(before)
    Watching.seen = []
    run_project(FedAvg, module=Watching(), engine=engine())
    assert set(Watching.seen) == {(False, before)}


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_benchmark_holds_inside_local_fits(engine, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen = set()

    class Benchmarked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.add(torch.backends.cudnn.benchmark)
            return super().training_step(batch, batch_idx)

    run_project(FedAvg, module=Benchmarked(), engine=engine(), trainer={"benchmark": True})
    assert seen == {True}


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_precision_holds_inside_local_fits(engine):
    types = set()

    class Typed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            scores = self(batch[0])
            types.add(scores.dtype)
            return F.cross_entropy(scores, batch[1])

    run_project(FedAvg, module=Typed(), engine=engine(), trainer={"precision": "bf16-mixed"})
    assert types == {torch.bfloat16}


def test_a_round_trains_without_warnings_about_optimizers():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, seed=1)
    trainer = quiet_trainer(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(federation, datamodule=data)
    assert not [warning for warning in said if "optimizer" in str(warning.message)]


SEARCHING = [
    (BatchSizeFinder(), "BatchSizeFinder is for .* a plain training run"),
    (LearningRateFinder(), "LearningRateFinder is for .* a plain training run"),
]
WRONG = [
    *SEARCHING,
    (GradientAccumulationScheduler({0: 2}), r"TrainerEngine\(callbacks=\[GradientAccumulationScheduler"),
    (StochasticWeightAveraging(0.1), r"TrainerEngine\(callbacks=\[StochasticWeightAveraging\(...\)\]\)"),
    (ModelPruning("l1_unstructured"), r"TrainerEngine\(callbacks=\[ModelPruning"),
    (BackboneFinetuning(), r"TrainerEngine\(callbacks=\[BackboneFinetuning"),
]


@pytest.mark.parametrize(("callback", "message"), WRONG, ids=lambda value: type(value).__name__)
def test_callbacks_that_have_nothing_to_work_on_outside(callback, message):
    own = Federation(FedAvg, lambda shape: torch.nn.Flatten())
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(1, callback).fit(own, datamodule=Digits(IID(2)))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        *SEARCHING,
        (GradientAccumulationScheduler({0: 2}), r"local_callbacks=\[GradientAccumulationScheduler\(...\)\]"),
        (ThroughputMonitor(len), r"local_callbacks=\[ThroughputMonitor\(...\)\]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_mean_batches(callback, message):
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2)
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(1, callback).fit(federation, datamodule=data)


def test_callbacks_of_the_module_are_checked_too():
    class Searching(Net):
        def configure_callbacks(self) -> Any:
            return LearningRateFinder()

    with pytest.raises(ConfigurationError, match=r"LearningRateFinder is for .* a plain training run"):
        run_project(FedAvg, module=Searching())


def test_weight_averaging_of_newer_versions():
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    own = Federation(FedAvg, lambda shape: torch.nn.Flatten())
    with pytest.raises(ConfigurationError, match=r"TrainerEngine\(callbacks=\[EMAWeightAveraging\(...\)\]\)"):
        quiet_trainer(1, callbacks.EMAWeightAveraging()).fit(own, datamodule=Digits(IID(2)))


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_the_tuner_says_so_too(search):
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2)
    trainer = quiet_trainer(1)
    with pytest.raises(ConfigurationError, match=r"of a plain training run, .*: run it with your"):
        getattr(Tuner(trainer), search)(federation, datamodule=data)


class WithBackbone(Net):
    """Has what callbacks look for, and logs its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.body

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


INSIDE = [
    StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
    GradientAccumulationScheduler({0: 2}),
    ModelPruning("l1_unstructured", amount=0.5),
    BackboneFinetuning(unfreeze_backbone_at_epoch=1),
]


def fitted(**options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The global model after a round of three local epochs, and the rate that was logged last."""
    federation, trainer = run_project(FedAvg, epochs=3, module=WithBackbone(), head="fc", **options)
    return dict(federation.global_model().state_dict()), float(trainer.callback_metrics["lr"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", INSIDE, ids=lambda callback: type(callback).__name__)
def test_the_engine_takes_them(callback):
    before, rate = fitted()
    after, _ = fitted(engine=TrainerEngine(callbacks=[callback]))
    assert rate == pytest.approx(0.05)
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
