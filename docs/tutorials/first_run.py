"""Tutorial: a first run, and reading its results."""

# %% Imports
import csv
import json
from functools import partial
from pathlib import Path

import lightning as L
from rich.console import Console

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.cli import main as pfl
from pfl_lightning.datamodules import Digits, DominantClasses, partition_table
from pfl_lightning.methods import FedAvg, FedPAC

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


# %% Data: ten clients with 100 images each, most of them of three of the ten digits
def digits() -> Digits:
    """The handwritten digits of scikit-learn, divided among ten clients."""
    rule = DominantClasses(num_clients=10, samples_per_client=100)
    return Digits(partition=rule, batch_size=10, validation_share=0.2)


data = digits()
data.setup()
Console(width=100).print(partition_table(data.class_counts(), data.class_names))


# %% Training: FedAvg and FedPAC, three rounds each
def run(method: type, folder: str) -> Federation:
    """Train a method and write its results into a folder."""
    federation = Federation(partial(method, lr=0.05, epochs=1), encoder="small_cnn", seed=0)
    callbacks = [FederatedLoop(cohort=1.0), ResultsWriter(folder)]
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, default_root_dir=folder, accelerator="cpu", **QUIET)
    trainer.fit(federation, datamodule=digits())
    return federation


fedavg, fedpac = run(FedAvg, "runs/fedavg"), run(FedPAC, "runs/fedpac")

# %% results.json: one summary for each of three choices of a round, and the bytes that were sent
results = json.loads(Path("runs/fedpac/results.json").read_text())
for choice, accuracy in results["accuracy"].items():
    print(
        f"{choice}: round {accuracy['round']}, mean {accuracy['test']['mean']:.3f}, "
        f"worst decile {accuracy['test']['worst_decile']:.3f}"
    )
print("bytes up, by kind:", results["bytes"]["up_by_kind"])
print("mean test accuracy by round:", [round(row["test"]["accuracy"], 3) for row in results["history"]])

# %% clients.csv: one row a client
with open("runs/fedpac/clients.csv") as file:
    rows = list(csv.DictReader(file))
worst = min(rows, key=lambda row: float(row["test_accuracy_last"]))
print(
    f"{len(rows)} clients; client {worst['client']} has the lowest accuracy, {float(worst['test_accuracy_last']):.2f}"
)

# %% Two runs side by side
pfl(["compare", "runs/fedavg", "runs/fedpac", "--output", "runs/comparison"])

# %% A client's own model
model = fedpac.client_model(3)
images, labels = next(iter(data.client_data(3).test.loader(batch_size=50)))
print("scores of client 3's model:", tuple(model.eval()(images).shape))
