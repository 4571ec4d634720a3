"""The file by which a study sees how far a run is."""

import json
from functools import partial
from types import SimpleNamespace

from _helpers.toy import Toy, quiet_trainer

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg
from pfl_lightning.study.callbacks import ProgressFile
from pfl_lightning.study.runner import read_progress


def test_accuracies_of_the_last_evaluated_round_stay_after_a_resumption(tmp_path):
    """Where no round is evaluated after it, too: a search takes the last accuracy of a trial."""
    path = tmp_path / "progress.json"

    def fit(rounds, checkpoint=None):
        loop = FederatedLoop()
        trainer = quiet_trainer(rounds, loop, ProgressFile(str(path)), check_val_every_n_epoch=2)
        data = Toy(validation_share=0.2)
        trainer.fit(Federation(partial(FedAvg, epochs=1), "mlp", seed=0), datamodule=data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return read_progress(path)

    evaluated = fit(2)
    assert evaluated.validation is not None
    assert evaluated.test is not None
    resumed = fit(3, tmp_path / "last.ckpt")
    assert resumed.round == 3
    assert (resumed.test, resumed.validation) == (evaluated.test, evaluated.validation)
    assert json.loads(path.read_text())["best_validation"] == evaluated.best_validation


def test_the_best_round_is_remembered_when_a_trial_goes_on(tmp_path):
    path = tmp_path / "progress.json"
    for epoch, validation, best in ((0, 0.75, 0.75), (1, 0.5, 0.75), (0, 0.25, 0.25)):
        callback, metrics = ProgressFile(str(path)), {"val_accuracy/mean": validation}
        trainer = SimpleNamespace(current_epoch=epoch, max_epochs=2, callback_metrics=metrics)
        callback.on_train_start(trainer, None)
        callback.on_train_epoch_end(trainer, None)
        assert read_progress(path).best_validation == best
