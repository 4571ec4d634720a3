"""Bytes and accuracy against bytes, read back from the event files."""

from functools import partial

import pytest
from _helpers.events import assert_drawn, board, charts, events, picture, rounds, scalars
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, Toy, quiet_trainer, run, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning import Federation
from pfl_lightning.callbacks import Communication, FederatedLoop, PartitionPicture
from pfl_lightning.callbacks.inspection.communication import draw_accuracy_by_bytes
from pfl_lightning.methods import FedAvg, FedPAC, LocalOnly

QUICK = partial(FedAvg, epochs=1, lr=0.1)
COHORTS = ([0, 1, 4], [2])
MODEL = 4 * (INPUTS * 5 + 5 + 5 * FEATURES + FEATURES + FEATURES * CLASSES + CLASSES)


def test_bytes_so_far(tmp_path):
    run(QUICK, 4, cohorts=COHORTS, callbacks=[Communication()], logger=board(tmp_path))
    found = events(tmp_path)
    messages = {0: 3, 1: 4, 2: 7, 3: 8}
    for way in ("up", "down"):
        assert scalars(found, f"bytes/{way}") == {round: number * MODEL for round, number in messages.items()}
    assert scalars(found, "bytes/total") == {round: 2 * number * MODEL for round, number in messages.items()}
    layout = charts(found)
    assert layout["communication", "bytes so far"] == ["bytes/(up|down|total)"]
    assert layout["communication", "bytes so far, by kind"] == ["bytes/(up|down)_.*"]


def test_the_kinds_add_up_to_the_total(tmp_path):
    run(partial(FedPAC, epochs=1), 2, callbacks=[Communication()], logger=board(tmp_path))
    found = events(tmp_path)
    kinds = [f"bytes/{way}_{kind}" for way in ("up", "down") for kind in ("weights", "statistics")]
    assert scalars(found, "bytes/total")[1] == sum(scalars(found, kind)[1] for kind in kinds)


def test_accuracy_against_bytes(tmp_path):
    callback = Communication(2)
    run(QUICK, 5, cohorts=COHORTS, callbacks=[callback], logger=board(tmp_path))
    found = events(tmp_path)
    assert rounds(found, "accuracy_by_bytes") == [0, 1, 3, 4]
    assert_drawn(picture(found, "accuracy_by_bytes", 4))
    accuracy = scalars(found, "test_accuracy/mean")
    total = scalars(found, "bytes/total")
    assert [point["round"] for point in callback.history] == list(range(5))
    for point in callback.history:
        assert point["accuracy"] == pytest.approx(accuracy[point["round"]])
        assert point["up"] + point["down"] == total[point["round"]]


def test_the_curve_goes_on_in_a_second_fit_of_the_same_trainer():
    curve = Communication()
    federation, trainer = Federation(QUICK, tiny_encoder, seed=1), quiet_trainer(2, FederatedLoop(), curve)
    for rounds_so_far in (2, 4):
        trainer.fit_loop.max_epochs = rounds_so_far
        trainer.fit(federation, datamodule=Toy())
    assert [point["round"] for point in curve.history] == [0, 1, 2, 3]


POINT = ("round", "up", "down", "accuracy")


def test_the_curves_are_accuracy_by_bytes():
    history = [
        dict(zip(POINT, (0, 2000, 4000, 0.25), strict=True)),
        dict(zip(POINT, (1, 3000, 5000, None), strict=True)),
        dict(zip(POINT, (2, 4000, 8000, 0.5), strict=True)),
    ]
    axes = draw_accuracy_by_bytes(history, "FedAvg").axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "up": ([2.0, 4.0], [25, 50]),
        "down": ([4.0, 8.0], [25, 50]),
        "up and down": ([6.0, 12.0], [25, 50]),
    }
    assert axes.get_xlabel() == "kB so far"
    nothing = draw_accuracy_by_bytes([dict(zip(POINT, (0, 0, 0, 0.5), strict=True))], "LocalOnly").axes[0]
    assert nothing.get_xlabel() == "bytes so far"


def test_without_evaluation_or_traffic(tmp_path):
    run(QUICK, 2, callbacks=[Communication(1)], logger=board(tmp_path), limit_val_batches=0)
    found = events(tmp_path)
    assert not found.Tags()["images"]
    assert list(scalars(found, "bytes/total")) == [0, 1]
    run(partial(LocalOnly, epochs=1), 2, callbacks=[Communication(1)], logger=board(tmp_path, 1))
    assert scalars(events(tmp_path, 1), "bytes/total") == {0: 0, 1: 0}


def test_a_resumed_run_goes_on_with_its_curve(tmp_path):
    def play(number, ckpt_path=None):
        callback = Communication(10)
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor=None)
        callbacks = [callback, PartitionPicture(), saver]
        logger = board(tmp_path)
        options = {"logger": logger, "enable_checkpointing": True, "ckpt_path": ckpt_path}
        run(QUICK, number, cohorts=COHORTS, callbacks=callbacks, **options)
        return callback.history

    first = play(3)
    history = play(5, str(tmp_path / "epoch=2.ckpt"))
    assert history[:3] == first
    assert [point["round"] for point in history] == list(range(5))
    found = events(tmp_path)
    assert list(scalars(found, "bytes/total").items()) == [(p["round"], p["up"] + p["down"]) for p in history]
    assert rounds(found, "partition") == [0]


def test_another_fit_has_a_separate_curve():
    callback = Communication()
    for number in (3, 2):
        run(QUICK, number, callbacks=[callback])
    assert [point["round"] for point in callback.history] == [0, 1]


def test_the_partition_is_shown_once(tmp_path):
    run(QUICK, 3, callbacks=[PartitionPicture()], logger=board(tmp_path))
    found = events(tmp_path)
    assert rounds(found, "partition") == [0]
    assert_drawn(picture(found, "partition", 0))


def test_novel_clients_are_marked(monkeypatch):
    from pfl_lightning.callbacks.inspection import over_clients

    given = []
    original = over_clients.partition_figure

    def watched(*arguments):
        given.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(over_clients, "partition_figure", watched)
    data = Toy(novel_clients=1)
    run(QUICK, 1, cohorts=[[0, 1]], callbacks=[PartitionPicture()], data=data)
    [(counts, names, groups)] = given
    assert counts.sum(axis=1).tolist() == [len(own) for own in data.labels]
    assert tuple(names) == tuple("abcde")
    assert groups == ["novel" if client in data.novel else "" for client in range(CLIENTS)]
