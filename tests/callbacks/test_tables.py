"""The table of results on request, after a run in Python that warns of nothing."""

import subprocess
import sys

import lightning as L
import pytest

from pfl_lightning.callbacks import results_table
from pfl_lightning.errors import ConfigurationError

PROGRAM = """
import lightning as L
from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter, results_table
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.methods import FedAvg

data = Digits(IID(num_clients=3, samples_per_client=30), batch_size=10)
federation = Federation(FedAvg, encoder="mlp")
options = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
trainer = L.Trainer(callbacks=[FederatedLoop(cohort=1.0), ResultsWriter()], **options)
trainer.fit(federation, datamodule=data)
print(results_table(trainer))
"""


def test_a_run_in_python_warns_of_nothing_and_shows_its_results(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr
    assert "deprecated" not in found.stderr
    assert "FedAvg: test accuracy over 3 clients, in %" in found.stdout
    assert "best_test" in found.stdout


def test_without_results():
    with pytest.raises(ConfigurationError, match="add a ResultsWriter, and evaluate a round"):
        results_table(L.Trainer(logger=False, accelerator="cpu"))
