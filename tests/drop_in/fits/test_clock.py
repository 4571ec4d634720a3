"""Counts that a module reads in evaluations: those of a plain Trainer, with the round in place of the epoch."""

import lightning as L
import pytest
from _helpers.counting import NAMES, Counting, Data, Inside
from _helpers.toy import WEIGHTS_ONLY

from pfl_lightning import ProcessEngine, TrainerEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg, FedRep


class Seen(L.Callback):
    """What was logged in each validation of a fit."""

    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, pl_module):
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.values.append({name: value for name, value in found.items() if name.startswith(("val_", "train_"))})


def trainer(epochs, folder, loop, *callbacks):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return L.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=[*loop, *callbacks], num_sanity_val_steps=1, **quiet
    )


def journey(folder, make_loop):
    """Fit, evaluate by the same Trainer and by a new one, resume, evaluate."""
    data, found = Data(), []
    first = trainer(3, folder, make_loop(), seen := Seen())
    module = Counting()
    first.fit(module, datamodule=data)
    path = first.checkpoint_callback.best_model_path
    found += seen.values
    found += first.validate(module, datamodule=data, verbose=False)
    found += first.test(module, datamodule=data, verbose=False)
    found += first.test(module, datamodule=data, ckpt_path=path, verbose=False, **WEIGHTS_ONLY)
    found.append({"predicted": float(first.predict(module, datamodule=data)[0][0])})
    found += trainer(7, folder, make_loop()).test(Counting(), datamodule=data, ckpt_path=path, verbose=False)
    second, module = trainer(5, folder, make_loop(), seen := Seen()), Counting()
    second.fit(module, datamodule=data, ckpt_path=path)
    found += seen.values
    found += second.test(module, datamodule=data, verbose=False)
    return [{name: value for name, value in one.items() if own(name)} for one in found]


def own(name):
    return not name.startswith("train_") and name.endswith((*NAMES, "every_other", "predicted"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clients", [1, 3])
def test_evaluations_count_rounds_as_a_plain_run_counts_epochs(clients, tmp_path):
    plain = journey(tmp_path / "plain", list)
    federated = journey(tmp_path / "federated", lambda: [FederatedLoop(method=FedAvg, num_clients=clients)])
    assert plain[2] == {"val_epoch": 2, "val_trainer_epoch": 2, "val_last": 1, "val_every_other": 1}
    assert federated == plain


@pytest.mark.filterwarnings("ignore")
def test_a_client_that_is_alone_counts_its_training_as_a_plain_run(tmp_path):
    """Over a stop, too."""
    found = []
    for kind in ("plain", "federated"):
        values = []
        for epochs in (2, 4):
            loop = [FederatedLoop(method=FedAvg, num_clients=1)] if kind == "federated" else []
            run = trainer(epochs, tmp_path / kind, loop, seen := Seen())
            run.fit(Counting(), datamodule=Data(), ckpt_path=tmp_path / kind / "last.ckpt" if values else None)
            run.save_checkpoint(tmp_path / kind / "last.ckpt")
            values += [{name: v for name, v in one.items() if name.startswith("train_")} for one in seen.values]
        found.append(values)
    assert found[0] == found[1]
    assert [one["train_batches"] for one in found[0]] == [2.5, 8.5, 14.5, 20.5]


@pytest.mark.filterwarnings("ignore")
def test_workers_and_local_callbacks_see_the_same(tmp_path):
    found = []
    for engine in (TrainerEngine(), ProcessEngine(workers=2, engine=TrainerEngine())):
        loop = FederatedLoop(method=FedRep, num_clients=3, engine=engine, local_callbacks=[Inside()], head="head")
        run, module = trainer(2, tmp_path, [loop], seen := Seen()), Counting()
        run.fit(module, datamodule=Data())
        found.append([*seen.values, *run.test(module, datamodule=Data(), verbose=False)])
    assert found[0] == found[1]
    assert [found[0][round]["val_of_callback"] for round in range(2)] == [0, 1]
    assert [found[0][round]["val_step"] for round in range(2)] == [1, 2]  # rounds that have ended
    assert found[0][2]["test_epoch"] == 2
