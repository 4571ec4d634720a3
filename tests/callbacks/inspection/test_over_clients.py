"""Distribution of the accuracy over clients, read back from the event files."""

from functools import partial

import lightning as L
import numpy as np
import pytest
from _helpers.events import board, charts, events, rounds, scalars
from _helpers.toy import CLIENTS, Toy, run

from pfl_lightning.callbacks import ClientAccuracy, FederatedLoop
from pfl_lightning.methods import FedPer

QUICK = partial(FedPer, epochs=1, lr=0.3)


class _Watch(L.Callback):
    """Every client's accuracies, round by round."""

    def __init__(self):
        self.test, self.validation = {}, {}

    def on_validation_end(self, trainer, pl_module):
        self.test[trainer.current_epoch] = {k: s.accuracy for k, s in pl_module.test_scores.items()}
        self.validation[trainer.current_epoch] = {k: s.accuracy for k, s in pl_module.validation_scores.items()}


def play(tmp_path, every=2, number=5, **options):
    watch = _Watch()
    run(QUICK, number, callbacks=[ClientAccuracy(every), watch], logger=board(tmp_path), **options)
    return events(tmp_path), watch


def test_the_band_is_one_deviation_around_the_mean(tmp_path):
    found, watch = play(tmp_path)
    for name, seen in (("val_accuracy", watch.validation), ("test_accuracy", watch.test)):
        for end, sign in (("lower", -1), ("upper", 1)):
            expected = {}
            for round, own in seen.items():
                values = np.array(list(own.values()))
                expected[round] = float(np.clip(values.mean() + sign * values.std(), 0, 1))
            assert scalars(found, f"{name}/{end}") == pytest.approx(expected, abs=1e-6)
    lower, mean, upper = (scalars(found, f"test_accuracy/{end}") for end in ("lower", "mean", "upper"))
    assert all(0 <= lower[r] < mean[r] < upper[r] <= 1 for r in range(5))


def test_a_histogram_after_the_first_round_every_second_and_the_last(tmp_path):
    found, watch = play(tmp_path)
    for tag, seen in (("clients/val_accuracy", watch.validation), ("clients/test_accuracy", watch.test)):
        assert rounds(found, tag) == [0, 1, 3, 4]
        for event in found.Histograms(tag):
            values = np.array(list(seen[event.step].values()))
            assert event.histogram_value.num == CLIENTS
            assert event.histogram_value.sum == pytest.approx(values.sum())
            assert (event.histogram_value.min, event.histogram_value.max) == (values.min(), values.max())


def test_the_charts_name_what_is_logged(tmp_path):
    found, _ = play(tmp_path)
    layout = charts(found)
    [band] = layout["accuracy", "test: mean ± standard deviation over clients"]
    assert band == ("test_accuracy/mean", "test_accuracy/lower", "test_accuracy/upper")
    steps = [list(scalars(found, tag)) for tag in band]  # the chart wants the same rounds for all three
    assert steps[0] == steps[1] == steps[2] == list(range(5))
    assert layout["accuracy", "test: mean, worst decile, worst and best client"] == [
        "test_accuracy/(mean|worst_decile|worst|best)"
    ]
    assert {"test_accuracy/worst_decile", "test_accuracy/worst", "test_accuracy/best"} <= set(found.Tags()["scalars"])


def test_rounds_without_an_evaluation_have_no_band(tmp_path):
    found, watch = play(tmp_path, every=1, number=4, check_val_every_n_epoch=2)
    assert list(watch.test) == [1, 3]
    assert list(scalars(found, "test_accuracy/lower")) == [1, 3]


def test_without_any_evaluation(tmp_path):
    found, _ = play(tmp_path, limit_val_batches=0)
    assert not [tag for tag in found.Tags()["scalars"] if "accuracy" in tag]
    assert not found.Tags()["histograms"]


def test_a_sample_of_the_clients_and_clients_without_data(tmp_path):
    found, watch = play(tmp_path, loop=FederatedLoop(eval_cohort=4), data=Toy(test=[8, 0, 0, 3, 0], validation=0))
    assert 1 <= len(watch.test[0]) < 4
    assert {event.histogram_value.num for event in found.Histograms("clients/test_accuracy")} == {len(watch.test[0])}
    assert "val_accuracy/lower" not in found.Tags()["scalars"]


def test_a_histogram_is_of_its_own_rounds_evaluation(tmp_path):
    """Not of the sanity check, nor of the last evaluation before it."""
    shown = []

    class Spy(ClientAccuracy):
        def show(self, trainer, federation, round):
            shown.append((round, len(federation.validation_scores)))

    options = {"check_val_every_n_epoch": 3, "num_sanity_val_steps": 2}
    run(QUICK, 8, callbacks=[Spy(1)], logger=board(tmp_path / "every"), **options)
    assert [round for round, _ in shown] == [2, 5]
    shown.clear()
    run(QUICK, 8, callbacks=[Spy(4)], logger=board(tmp_path / "fourth"), **options)
    assert [round for round, _ in shown] == [2, 5]  # the first evaluations after rounds 1 and 4
