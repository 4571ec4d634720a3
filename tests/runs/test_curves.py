"""The curves of single clients: complete, also over a resumption, and drawn."""

from functools import partial

import pytest
from _helpers.toy import Toy, quiet_trainer, tiny_encoder
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.figure import Figure

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.cli.compare import compare
from pfl_lightning.methods import FedAvg
from pfl_lightning.runs.curves import add_to_curves, cut_curves, draw_clients, read_curves
from pfl_lightning.runs.reading import read_run


def fitted(folder, rounds, ckpt=None, **options):
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    federation = Federation(partial(FedAvg, lr=0.1, epochs=1), tiny_encoder, seed=1, metrics=["f1"])
    callbacks = FederatedLoop(), ResultsWriter(str(folder)), saver
    trainer = quiet_trainer(rounds, *callbacks, enable_checkpointing=True, **options)
    trainer.fit(federation, datamodule=Toy(), ckpt_path=ckpt)
    return federation


def test_every_evaluation_has_every_client(tmp_path):
    federation = fitted(tmp_path, 3)
    rows = read_curves(tmp_path)
    for part, scores in (("test", federation.test_scores), ("validation", federation.validation_scores)):
        for metric in ("accuracy", "f1"):
            own = [row for row in rows if row[2:4] == (part, metric)]
            assert [row[0] for row in own] == [r for r in (1, 2, 3) for _ in scores]
            values = {row[1]: row[4] for row in own if row[0] == 3}
            want = {c: s.accuracy if metric == "accuracy" else s.further["f1"] for c, s in scores.items()}
            assert values == pytest.approx(want)
    means = [sum(row[4] for row in rows if row[0] == r and row[2:4] == ("test", "f1")) / 5 for r in (1, 2, 3)]
    assert means == pytest.approx([entry.test for entry in read_run(tmp_path, metric="f1").history])


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fitted(whole, 4)
    fitted(halves, 3)  # a round more than the checkpoint
    with (halves / "client_curves.csv").open("a") as file:
        file.write("4,0,te")  # as a kill leaves it
    fitted(halves, 4, ckpt=str(halves / "epoch=1.ckpt"))
    assert read_curves(halves) == read_curves(whole)
    fitted(halves, 1)
    assert {row[0] for row in read_curves(halves)} == {1}


def test_a_trial_writes_nothing(tmp_path):
    fitted(tmp_path, 1, fast_dev_run=True)
    assert not (tmp_path / "client_curves.csv").exists()


def test_cutting_and_drawing(tmp_path):
    for round in (1, 2):
        add_to_curves(
            tmp_path, round, {"test": {"accuracy": {0: 0.25 * round, 1: 0.5}}, "validation": {"accuracy": {}}}
        )
    panel = Figure().subplots()
    assert draw_clients(panel, read_curves(tmp_path))
    assert [list(line.get_ydata()) for line in panel.lines] == [[25, 50], [50, 50], [37.5, 50]]
    assert not draw_clients(panel, read_curves(tmp_path), "validation")
    cut_curves(tmp_path, 1)
    assert read_curves(tmp_path) == [(1, 0, "test", "accuracy", 0.25), (1, 1, "test", "accuracy", 0.5)]
    cut_curves(tmp_path, 0)
    assert read_curves(tmp_path) == []


def test_the_page_of_a_comparison_shows_them(tmp_path):
    fitted(tmp_path / "run", 2)
    compare([str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--format", "html"])
    assert "Curves of single clients" in (tmp_path / "out" / "comparison.html").read_text()
