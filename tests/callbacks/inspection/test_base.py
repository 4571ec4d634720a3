"""Rounds of the figures, and their output to loggers and files."""

from functools import partial

import lightning as L
import matplotlib
import matplotlib.pyplot as plt
import pytest
from _helpers.events import board, events, rounds
from _helpers.toy import GivenCohorts, Toy, quiet_trainer, run
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger
from PIL import Image

from pfl_lightning.callbacks import ClientAccuracy, Inspection, LossComponents
from pfl_lightning.callbacks.inspection import InspectionCallback
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPAC

QUICK = partial(FedAvg, epochs=1)


class _Rounds(InspectionCallback):
    """Remembers when it was called."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.shown, self.evaluated, self.finished = [], [], []

    def show(self, trainer, federation, round):
        self.shown.append(round)

    def after_round(self, trainer, federation, round):
        self.finished.append(round)

    def after_evaluation(self, trainer, federation, round):
        self.evaluated.append(round)


@pytest.mark.parametrize(
    ("every", "rounds", "shown"),
    [(1, 3, [0, 1, 2]), (3, 7, [0, 2, 5, 6]), (3, 6, [0, 2, 5]), (10, 4, [0, 3]), (10, 1, [0])],
)
def test_the_first_every_nth_and_the_last_round(every, rounds, shown):
    callback = _Rounds(every)
    run(QUICK, rounds, callbacks=[callback])
    assert callback.shown == shown
    assert callback.finished == callback.evaluated == list(range(rounds))


def test_the_last_round_of_a_fit_that_ends_early():
    callback = _Rounds(10)
    stop = EarlyStopping("val_accuracy/mean", mode="max", patience=1, min_delta=2.0)  # nothing is an improvement
    run(QUICK, 9, callbacks=[callback, stop])
    assert callback.shown == [0, 1]


def test_a_second_fit_starts_from_the_beginning():
    callback = _Rounds(10)
    for _ in range(2):
        run(QUICK, 2, callbacks=[callback])
    assert callback.shown == [0, 1, 0, 1]


@pytest.mark.parametrize("period", [0, -3, 1.5, True])
def test_a_period_without_meaning_is_refused(period):
    with pytest.raises(ConfigurationError, match=r"ClientAccuracy: every_n_rounds must be .*at least 1"):
        ClientAccuracy(period)


def test_only_federations_are_accepted(tmp_path):
    trainer = L.Trainer(max_epochs=1, callbacks=[ClientAccuracy()], logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="ClientAccuracy inspects a Federation, got BoringModel"):
        trainer.fit(BoringModel())


def pictures(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))


@pytest.mark.parametrize("kind", ["none", "csv"])
def test_without_tensorboard_pictures_are_files_in_the_folder_of_the_run(tmp_path, kind, caplog):
    logger = CSVLogger(tmp_path, name="", version="") if kind == "csv" else False
    with caplog.at_level("INFO"):
        run(QUICK, 3, callbacks=[ClientAccuracy(2), LossComponents(2)], logger=logger, default_root_dir=str(tmp_path))
    folder = tmp_path / "inspection"
    named = [f"clients/test_accuracy-round-{r:04d}.png" for r in (1, 2, 3)]
    assert set(named) <= set(pictures(folder))
    with Image.open(folder / named[0]) as image:
        assert image.size == (500, 300)
    assert caplog.text.count("they are saved in") == 1
    assert str(folder) in caplog.text
    if kind == "csv":
        assert "test_accuracy/lower" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_a_user_defined_folder(tmp_path):
    run(QUICK, callbacks=[ClientAccuracy(dirpath=str(tmp_path / "a" / "b"))], default_root_dir=str(tmp_path / "c"))
    assert pictures(tmp_path) == [f"a/b/clients/{name}_accuracy-round-0001.png" for name in ("test", "val")]


def test_fast_dev_run_leaves_nothing_behind(tmp_path):
    run(QUICK, callbacks=[ClientAccuracy()], default_root_dir=str(tmp_path), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


class _Takes(Logger):
    """A logger of numbers that may take pictures, too."""

    name, version, save_dir = "takes", 0, None

    def __init__(self, experiment=None):
        self.numbers, self.experiment = {}, experiment

    def log_metrics(self, metrics, step=None):
        self.numbers.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        self.params = params


class _LikeWandb(_Takes):
    def log_image(self, key, images, step=None):
        self.numbers[step][key] = images[0].shape


class _Client:
    def __init__(self):
        self.calls = []

    def log_image(self, *args, **kwargs):
        self.calls.append((args, kwargs))


def test_loggers_that_take_pictures_get_them(tmp_path):
    """With the calls that Weights & Biases and MLflow have for it."""
    wandb, mlflow = _LikeWandb(), _Takes(_Client())
    mlflow.run_id = "run 7"
    loggers = [wandb, mlflow]
    run(QUICK, callbacks=[ClientAccuracy()], logger=loggers, default_root_dir=str(tmp_path))
    assert wandb.numbers[0]["clients/test_accuracy"] == (300, 500, 3)
    (identity, image), named = mlflow.experiment.calls[1]
    assert (identity, image.shape) == ("run 7", (300, 500, 3))
    assert named == {"artifact_file": "clients/test_accuracy/round-0001.png"}
    assert not pictures(tmp_path)
    for logger in loggers:
        assert 0 <= logger.numbers[0]["test_accuracy/lower"] <= logger.numbers[0]["test_accuracy/upper"] <= 1


def test_losses_by_component_and_client(tmp_path):
    class Watch(GivenCohorts):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            seen[trainer.current_epoch] = [result.losses for result in self.results]

    seen = {}
    run(partial(FedPAC, epochs=1), 3, loop=Watch([0, 2, 3]), callbacks=[LossComponents(2)], logger=board(tmp_path))
    found = events(tmp_path)
    assert rounds(found, "clients/train_cross_entropy") == rounds(found, "clients/train_alignment") == [0, 1, 2]
    for event in found.Histograms("clients/train_alignment"):
        assert event.histogram_value.num == 3
        assert event.histogram_value.sum == pytest.approx(sum(own["alignment"] for own in seen[event.step]))


def test_nothing_is_shown_outside_a_fit(tmp_path):
    federation = run(QUICK)
    callback = _Rounds(1)
    trainer = quiet_trainer(1, GivenCohorts([0]), callback)
    trainer.validate(federation, datamodule=Toy(), verbose=False)
    trainer.test(federation, datamodule=Toy(), verbose=False)
    assert (callback.shown, callback.finished, callback.evaluated) == ([], [], [])


def test_matplotlibs_global_state_is_left_alone(tmp_path):
    before = plt.get_fignums(), matplotlib.get_backend(), dict(matplotlib.rcParams)
    run(QUICK, 2, callbacks=Inspection(1, clients=2, samples=3).callbacks(), default_root_dir=str(tmp_path))
    assert len(pictures(tmp_path)) > 8
    assert (plt.get_fignums(), matplotlib.get_backend(), dict(matplotlib.rcParams)) == before
