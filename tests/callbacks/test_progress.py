"""What a run says after every round, in a log file and on a terminal."""

import re
import sys
from functools import partial

import lightning as L
import pytest
import torch
from _helpers.results import valid
from _helpers.toy import quiet_trainer, run
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import federate
from pfl_lightning.callbacks import ResultsWriter, RoundProgress
from pfl_lightning.methods import FedAvg

METHOD = partial(FedAvg, epochs=1)
LINE = re.compile(
    r"round (\d+)/(\d+): ([\d.]+) s, loss ([\d.]+), validation ([\d.]+) %, test ([\d.]+) %, ([\d.]+) MB up, "
    r"([\d.]+) MB down, (\d+):\d\d:\d\d left"
)


def test_a_log_has_a_line_a_round_with_the_figures_of_the_results(tmp_path, capsys):
    writer = ResultsWriter(str(tmp_path))
    run(METHOD, 3, callbacks=[writer, RoundProgress()])
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert all(found)
    assert [(line[1], line[2]) for line in found] == [("1", "3"), ("2", "3"), ("3", "3")]
    for line, entry in zip(found, writer.history, strict=True):
        assert float(line[3]) == pytest.approx(entry.seconds, abs=0.006)
        assert float(line[4]) == pytest.approx(entry.loss, rel=1e-3)
        assert float(line[5]) == pytest.approx(100 * entry.validation, abs=0.006)
        assert float(line[6]) == pytest.approx(100 * entry.test, abs=0.006)
        assert float(line[7]) == pytest.approx(entry.bytes_up / 1e6, abs=0.006)


def test_a_line_is_written_at_once(monkeypatch):
    flushed = []

    class Log:
        def isatty(self):
            return False

        def write(self, text):
            flushed.append(text)

        def flush(self):
            flushed.append(None)

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            assert flushed[-1] is None

    monkeypatch.setattr(sys, "stdout", Log())
    run(METHOD, 2, callbacks=[RoundProgress(), Look()])
    assert flushed.count(None) >= 2


def test_a_round_that_nobody_evaluated_has_no_accuracies(capsys):
    run(METHOD, 2, callbacks=[RoundProgress()], check_val_every_n_epoch=2)
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("round"))
    assert "validation" not in first
    assert "validation" in second


class _NoHead(FedAvg):
    evaluation = "knn"


def test_a_score_of_nearest_neighbors_is_called_so(capsys):
    run(partial(_NoHead, epochs=1), 1, callbacks=[RoundProgress()])
    out = capsys.readouterr().out
    assert re.search(r"validation [\d.]+ % \(nearest neighbors\), test [\d.]+ % \(nearest neighbors\)", out)


@pytest.mark.parametrize("bar", [None, TQDMProgressBar(), RichProgressBar()], ids=["no bar", "tqdm", "rich"])
def test_a_terminal_has_the_lines_above_the_bar(monkeypatch, capsys, bar):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    bars = [] if bar is None else [bar]
    run(METHOD, 2, callbacks=[RoundProgress(), *bars], enable_progress_bar=bool(bars))
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", capsys.readouterr().out)
    assert [len(re.findall(rf"(?m)^round {number}/2: [\d.]+ s, loss ", out)) for number in (1, 2)] == [1, 1]
    assert [f"Round {number}/2" in out for number in (1, 2, 3)] == [bool(bars), bool(bars), False]
    for line in re.findall(r"(?m)^Epoch .*$", out):  # Lightning's own words stand before the first client alone
        assert not re.search(r"[1-9]\d*/3\b", line)


class _Regression(L.LightningModule):
    """A user's module without classes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_mse", self.training_step(batch, batch_idx), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_users_module_shows_what_it_logs(tmp_path, capsys):
    items = DataLoader(TensorDataset(torch.randn(30, 3), torch.randn(30, 1)), batch_size=5)
    federation, data = federate(_Regression(), items, FedAvg, num_clients=3)
    trainer = quiet_trainer(1, ResultsWriter(str(tmp_path)), RoundProgress())
    trainer.fit(federation, datamodule=data)
    [line] = (line for line in capsys.readouterr().out.splitlines() if line.startswith("round"))
    assert re.search(r", val_mse [\d.]+, ", line)
    assert "test" not in line
    results = valid(tmp_path / "results.json")
    assert results["evaluated"]["score"] == "metric"
    assert results["accuracy"]["last"] is None
    assert "lr" not in results["method_arguments"]
    assert results["history"][0]["clients"] == 3
