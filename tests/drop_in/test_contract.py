"""A local fit under TrainerEngine equals a Trainer's; SequentialEngine names what it does not take."""

import itertools
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.plain import batches, first_net, named
from _helpers.project import Data, Net, run_project
from _helpers.toy import CLIENTS, Toy, assert_same, quiet_trainer
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedProx, FedRep, LocalOnly

EPOCHS, MU = 3, 0.5


class Scheduled(Net):
    """Adam, with a rate that falls after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Net):
    """A rate that falls with what is logged."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


class Manual(Net):
    """Two optimizers, stepped by hand; the second one every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.log("train_loss", loss)
        body.step()
        body.zero_grad()
        if batch_idx % 2:
            head.step()
            head.zero_grad()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD(self.body.parameters(), lr=0.05, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(body, 1, gamma=0.5)
        return [body, torch.optim.Adam(self.fc.parameters(), lr=0.01)], [schedule]


class Hooked(Net):
    """Hooks that change what is trained, and a step without the batch's number."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1, batch[1]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.fc.bias.mul_(0.99)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.trainer.global_step < 2:  # a warm-up
            optimizer.param_groups[0]["lr"] = 0.01 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Unused(Net):
    """Skips batches, and trains a part of the network in the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)


class Epochs:
    """The batches of one client, as the federation orders them, for a Trainer that knows nothing of it."""

    def __init__(self, client: int) -> None:
        self.steps = batches(Toy(), client, 0, "fit/0", EPOCHS)
        self.number = -(-len(Toy().labels[client]) // 4)

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        return itertools.islice(self.steps, self.number)


PROJECTS = {
    "scheduled": (Scheduled, {}),
    "plateau": (Plateau, {}),
    "manual": (Manual, {}),
    "hooked": (Hooked, {}),
    "unused": (Unused, {}),
    "accumulated": (Net, {"accumulate_grad_batches": 2}),
    "clipped": (Net, {"gradient_clip_val": 0.05}),
    "clipped by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


@pytest.mark.parametrize(("module", "options"), PROJECTS.values(), ids=PROJECTS)
def test_local_fits_are_those_of_a_trainer(module, options):
    federation, _ = run_project(LocalOnly, module=module(), engine=TrainerEngine(**options), epochs=EPOCHS)
    for client in (0, 3):
        alone = module()
        quiet_trainer(EPOCHS, **options).fit(alone, train_dataloaders=Epochs(client))
        assert_same(named(federation.client_model(client)), named(alone), atol=1e-6)
        moved = (alone.fc.weight - module().fc.weight).abs().max()
        assert moved > 1e-3  # there was something to compare


def test_a_method_adds_its_gradient_to_a_module_that_steps_by_itself():
    federation, _ = run_project(FedProx, module=Manual(), engine=TrainerEngine(), epochs=EPOCHS, mu=MU)
    sizes, states = [], []
    for client in range(CLIENTS):
        alone = Manual()
        start = named(alone)

        class Proximal(L.Callback):
            """mu (w - w^t), before every step of an optimizer."""

            def on_before_optimizer_step(self, trainer, pl_module, optimizer, start=start):
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for name, p in pl_module.named_parameters():
                    if id(p) in own:
                        p.grad += MU * (p.detach() - start[name])

        quiet_trainer(EPOCHS, Proximal()).fit(alone, train_dataloaders=Epochs(client))
        sizes.append(len(Toy().labels[client]))
        states.append(named(alone))
    mean = {n: sum(k * s[n] for k, s in zip(sizes, states, strict=True)) / sum(sizes) for n in states[0]}
    assert_same(named(federation.global_model()), mean, atol=1e-6)


def test_a_phase_sets_the_rate_that_a_schedule_starts_from():
    class Halved(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    for engine in (SequentialEngine, TrainerEngine):
        options = {"head_epochs": 2, "head_lr": 0.08, "engine": engine(), "head": "fc"}
        federation, _ = run_project(FedRep, module=Halved(), cohorts=[[0]], **options)
        net, rates = first_net(), (0.08, 0.04)
        per_epoch = -(-len(Toy().labels[0]) // 4)
        for index, (inputs, labels) in enumerate(batches(Toy(), 0, 0, "fit/0", 2)):
            rate = rates[index // per_epoch]
            loss = F.cross_entropy(net(inputs), labels)
            gradients = torch.autograd.grad(loss, list(net.head.parameters()))
            with torch.no_grad():
                for p, g in zip(net.head.parameters(), gradients, strict=True):
                    p -= rate * g
        got = federation.client_model(0)
        assert_same(named(got.fc), named(net.head), atol=1e-6)


class OneCycle(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=100)]


class AsksTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.trainer.current_epoch)


class AsksTrainerLater(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.trainer.is_last_batch))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Manual, {}, "SequentialEngine does not support manual optimization .Manual.; use TrainerEngine"),
        (Plateau, {}, "ReduceLROnPlateau and other frequencies need TrainerEngine"),
        (
            Hooked,
            {},
            "Hooked overrides on_before_batch_transfer, which SequentialEngine does not call; use TrainerEngine",
        ),
        (Unused, {}, "returned None to skip a batch, which SequentialEngine does not support; use TrainerEngine"),
        (AsksTrainer, {}, "AsksTrainer uses self.trainer .* TrainerEngine has a Trainer"),
        (
            AsksTrainerLater,
            {},
            "AsksTrainerLater uses self.trainer .* TrainerEngine has a Trainer",
        ),
        (OneCycle, {"method": FedRep, "head_lr": 0.1}, "OneCycleLR sets its own rates"),
    ],
)
def test_sequential_engine_says_what_it_does_not_take(module, options, message):
    method = options.pop("method", FedAvg)
    with pytest.raises(ConfigurationError, match=message):
        run_project(method, module=module(), engine=SequentialEngine(), **options)


class AsksInside(Net):
    """The module in a list, to which Lightning gives no Trainer, asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.helpers = torch.nn.ModuleList([L.LightningModule()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.helpers[0].trainer.current_epoch)


def test_advice_about_a_missing_trainer_is_for_the_engine_in_use():
    with pytest.raises(ConfigurationError, match=r"AsksInside uses self\.trainer") as caught:
        run_project(FedAvg, module=AsksInside(), engine=TrainerEngine())
    assert "use TrainerEngine" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="TrainerEngine has a Trainer"):
        run_project(FedAvg, module=AsksInside(), engine=SequentialEngine())


def test_sequential_engine_says_that_it_counts_no_epochs():
    class Counting(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / (1 + self.current_epoch)

    with pytest.warns(UserWarning, match="Counting asks for current_epoch, which SequentialEngine does not count"):
        run_project(FedAvg, module=Counting(), engine=SequentialEngine())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not count.*")
        run_project(FedAvg, module=Counting(), engine=TrainerEngine())
        run_project(FedAvg, engine=SequentialEngine())


@pytest.mark.parametrize("module", [AsksTrainer, AsksTrainerLater, Manual, Hooked, Unused, Plateau, Scheduled])
def test_trainer_fit_takes_them_under_a_method_with_two_networks(module):
    federation, _ = run_project(Ditto, 1, module=module())
    assert type(federation.client_model(0)) is module


def test_hooks_of_the_data_module_hold_under_trainer_fit():
    class Shifting(Data):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 0, batch[1]

    federation, _ = run_project(LocalOnly, data=Shifting(), engine=TrainerEngine())
    assert torch.equal(federation.client_model(0).body[0].weight * 0, torch.zeros(5, 6))
    start, got = Net(), federation.client_model(0)
    decayed = start.body[0].weight / start.body[0].weight.abs().max()
    torch.testing.assert_close(got.body[0].weight / got.body[0].weight.abs().max(), decayed)  # weight decay alone
    with pytest.raises(ConfigurationError, match="Shifting overrides on_after_batch_transfer, which SequentialEngine"):
        run_project(LocalOnly, data=Shifting(), engine=SequentialEngine())


def test_a_module_finds_its_data_module():
    class Asking(Net):
        def training_step(self, batch, batch_idx):
            assert isinstance(self.trainer.datamodule, Data)
            return super().training_step(batch, batch_idx) * self.trainer.datamodule.factor

        def validation_step(self, batch, batch_idx):
            self.log("val_factor", self.trainer.datamodule.factor)

    data = Data()
    data.factor = 2.0
    _, trainer = run_project(FedAvg, module=Asking(), data=data)
    assert trainer.callback_metrics["val_factor"] == 2.0
    assert trainer.datamodule.factor == 2.0


def test_buffers_that_are_yet_to_be_set_stay_on_the_client():
    class WithThreshold(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("threshold", torch.tensor(float("nan")))

    expected, _ = run_project(FedAvg, 2)
    found, _ = run_project(FedAvg, 2, module=WithThreshold())
    state = dict(found.global_model().state_dict())
    assert state.pop("threshold").isnan()
    assert_same(state, dict(expected.global_model().state_dict()), atol=0.0)
