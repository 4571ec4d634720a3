"""Bytes and accuracy against bytes, read back from the event files."""

from functools import partial

import pytest
from _helpers.events import assert_drawn, board, charts, events, picture, rounds, scalars
from _helpers.toy import CLASSES, CLIENTS, FEATURES, INPUTS, Toy, run
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.callbacks import Communication, PartitionPicture, ResultsWriter
from pfl_lightning.callbacks.inspection.communication import draw_accuracy_by_bytes
from pfl_lightning.methods import FedAvg, FedPAC, LocalOnly
from pfl_lightning.runs.results import HistoryEntry

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


def test_without_results_it_says_why_there_is_no_picture(tmp_path):
    with pytest.warns(UserWarning, match="no picture of accuracy by bytes: add a ResultsWriter") as caught:
        run(QUICK, 4, callbacks=[Communication(1)], logger=board(tmp_path))
    assert sum("accuracy by bytes" in str(one.message) for one in caught) == 1


def test_accuracy_against_bytes(tmp_path):
    writer = ResultsWriter(str(tmp_path))
    run(QUICK, 5, cohorts=COHORTS, callbacks=[Communication(2), writer], logger=board(tmp_path))
    found = events(tmp_path)
    assert rounds(found, "accuracy_by_bytes") == [0, 1, 3, 4]
    assert_drawn(picture(found, "accuracy_by_bytes", 4))
    accuracy, total = scalars(found, "test_accuracy/mean"), scalars(found, "bytes/total")
    assert drawn(writer.history)["up and down"] == (
        pytest.approx([total[round] / 1e3 for round in range(5)]),
        pytest.approx([100 * accuracy[round] for round in range(5)]),
    )


def test_without_a_writer_there_is_no_picture(tmp_path):
    run(QUICK, 2, callbacks=[Communication(1)], logger=board(tmp_path))
    assert not events(tmp_path).Tags()["images"]


def drawn(history):
    axes = draw_accuracy_by_bytes(history, "FedAvg").axes[0]
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines}


def test_the_curves_are_accuracy_by_bytes():
    history = [
        HistoryEntry(1, bytes_up=2000, bytes_down=4000, test=0.25, validation=0.75),
        HistoryEntry(2, bytes_up=1000, bytes_down=1000),
        HistoryEntry(3, bytes_up=1000, bytes_down=3000, validation=0.5),
    ]
    assert drawn(history) == {
        "up": ([2.0, 4.0], [25, 50]),
        "down": ([4.0, 8.0], [25, 50]),
        "up and down": ([6.0, 12.0], [25, 50]),
    }
    assert draw_accuracy_by_bytes(history, "FedAvg").axes[0].get_xlabel() == "kB so far"
    nothing = draw_accuracy_by_bytes([HistoryEntry(1, test=0.5)], "LocalOnly").axes[0]
    assert nothing.get_xlabel() == "bytes so far"


def test_without_evaluation_or_traffic(tmp_path):
    callbacks = [Communication(1), ResultsWriter(str(tmp_path))]
    run(QUICK, 2, callbacks=callbacks, logger=board(tmp_path), limit_val_batches=0)
    found = events(tmp_path)
    assert not found.Tags()["images"]
    assert list(scalars(found, "bytes/total")) == [0, 1]
    run(partial(LocalOnly, epochs=1), 2, callbacks=[Communication(1)], logger=board(tmp_path, 1))
    assert scalars(events(tmp_path, 1), "bytes/total") == {0: 0, 1: 0}


def test_a_resumed_run_goes_on_with_its_bytes(tmp_path):
    def play(number, ckpt_path=None):
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor=None)
        callbacks = [Communication(10), PartitionPicture(), saver]
        options = {"logger": board(tmp_path), "enable_checkpointing": True, "ckpt_path": ckpt_path}
        run(QUICK, number, cohorts=COHORTS, callbacks=callbacks, **options)

    play(3)
    play(5, str(tmp_path / "epoch=2.ckpt"))
    found = events(tmp_path)
    messages = {0: 3, 1: 4, 2: 7, 3: 8, 4: 11}
    assert scalars(found, "bytes/total") == {round: 2 * number * MODEL for round, number in messages.items()}
    assert rounds(found, "partition") == [0]


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
