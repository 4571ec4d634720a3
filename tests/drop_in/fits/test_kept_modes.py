"""Modules that freeze, thaw or set a mode by themselves, over the rounds of a client."""

from typing import Any

import pytest
import torch
from _helpers.plain import RoundsAsEpochs, named
from _helpers.project import Data, Net, run_project
from _helpers.toy import Toy, assert_same, quiet_trainer

from pfl_lightning.methods import FedAvg

ROUNDS = 5
ONE = ([0] * 6 + [1] * 5 + [2] * 8,)
"""Labels of the only client."""


class Thaws(Net):
    """Freezes the body as training starts, and thaws it at its third epoch."""

    def on_train_start(self) -> None:
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.body.requires_grad_(True)


class ThawsAtTheEnd(Net):
    """Freezes the body as the fit starts, thaws it after its second epoch, and freezes all when training has ended."""

    def on_fit_start(self) -> None:
        self.body.requires_grad_(False)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(True)

    def on_train_end(self) -> None:
        self.freeze()


class ThawsWhatWasFrozen(Net):
    """Is given with a frozen body, which it thaws at its third epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.body.requires_grad_(True)


class Freezes(Net):
    """Freezes the body after two epochs."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.body.requires_grad_(False)


class ThawsWithNewOptimizers(ThawsWhatWasFrozen):
    """Gives optimizers what trains alone, and sets them up once more when the body does."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 2:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class StopsDropping(Net):
    """Has no dropout from its third epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return super().forward(self.drop(x))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.drop.eval()


def toy() -> Toy:
    return Toy(ONE, validation=3, test=3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [Thaws, ThawsAtTheEnd, ThawsWhatWasFrozen, ThawsWithNewOptimizers, Freezes])
def test_rounds_of_one_client_are_epochs_of_a_plain_run_bit_by_bit(made):
    plain = made()
    before = {name: value.clone() for name, value in named(plain).items()}
    quiet_trainer(ROUNDS).fit(plain, train_dataloaders=RoundsAsEpochs(toy(), 0, ROUNDS, 1))
    options: dict[str, Any] = {"cohorts": [[0]], "optimizer_state": "keep", "head": "fc", "frozen": ()}
    federation, _ = run_project(FedAvg, ROUNDS, module=made(), data=Data(toy()), **options)
    after = named(federation.global_model())
    assert_same(after, named(plain))
    assert any(not torch.equal(after[name], value) for name, value in before.items() if "body" in name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"schedule": "restart"}, {"schedule": "restart", "optimizer_state": "keep"}, {}])
def test_optimizers_may_be_set_up_once_more_in_each_fit(options):
    class InEachFit(ThawsWithNewOptimizers):
        def on_train_epoch_start(self) -> None:
            if self.trainer.fit_loop.epoch_progress.current.ready % 2 == 0:
                self.body.requires_grad_(True)
                self.trainer.strategy.setup_optimizers(self.trainer)

    federation, _ = run_project(FedAvg, 3, module=InEachFit(), epochs=2, frozen=(), cohorts=[[0, 1]] * 3, **options)
    assert not torch.equal(federation.global_model().body[0].weight, InEachFit().body[0].weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("schedule", "expected"), [("continue", [True, True, False, False]), ("restart", [True] * 4)])
def test_a_layer_in_evaluation_mode_stays_so(schedule, expected):
    """Of every client on its own, and not where each local fit begins at epoch 0."""
    seen: list[tuple[int, bool]] = []

    class Watched(StopsDropping):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append((self.current_epoch, self.drop.training))
            return super().training_step(batch, batch_idx)

    options: dict[str, Any] = {"cohorts": [[0], [0], [0], [0], [1]], "schedule": schedule, "head": "fc"}
    run_project(FedAvg, 5, module=Watched(), **options)
    assert [training for _, training in seen[:4]] == expected
    assert seen[4] == (0, True)  # the other client's first epoch
