"""What further metrics of clients cost: their share of a round, and milliseconds for a client and metric.

    python benchmarks/metrics.py

Two workloads: FedPAC's CNN on random images of 3 x 32 x 32 (ten clients of 600 images, 5 local epochs, batches of 50, a
test part of 500), where three metrics are held to 3 % of a round, and the digits with the small MLP, where each is held
to 2 ms. Times are processor times of the same part's evaluation with and without metrics, in turn; medians are printed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.class_metrics import NAMED_METRICS, find_metrics
from pfl_lightning.datamodules import IID, Digits, FromDatasets
from pfl_lightning.methods import FedAvg

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "devices": 1,
}


class Clock(L.Callback):
    """Processor seconds of rounds."""

    def __init__(self) -> None:
        self.rounds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round begins."""
        self._begin = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Its last client has been fitted, before any evaluation."""
        if trainer.fit_loop.epoch_loop.batch_idx + 1 == trainer.num_training_batches:
            self.rounds.append(time.process_time() - self._begin)


def images() -> FromDatasets:
    """Ten clients of 600 images to train on and 500 to be tested by."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        TensorDataset(torch.randn(n, 3, 32, 32, generator=generator), torch.randint(10, (n,), generator=generator))
        for n in (6000, 5000)
    )
    return FromDatasets(train=train, test=test, partition=IID(10), batch_size=50)


def measure(name: str, data: Any, encoder: str, epochs: int, repetitions: int, single: bool) -> None:
    """Print a line for three metrics together, and one for each where that is more than noise."""
    federation = Federation(partial(FedAvg, lr=0.01, epochs=epochs), encoder, seed=0)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=3, limit_val_batches=0, callbacks=[FederatedLoop(), clock], accelerator="cpu", **QUIET
    )
    trainer.fit(federation, datamodule=data)
    fit, clients = statistics.median(clock.rounds), federation.num_clients
    classes = federation.models[0].num_classes

    def evaluation(metrics: list[str]) -> float:
        federation.class_metrics = find_metrics(metrics, classes)
        began = time.process_time()
        trainer.test(federation, datamodule=data, verbose=False)
        return time.process_time() - began

    for metrics in ([one] for one in (NAMED_METRICS if single else ())):
        found = [evaluation(metrics) - evaluation([]) for _ in range(repetitions)]
        print(f"| {name} | {metrics[0]} | {1e3 * statistics.median(found) / clients:.2f} | |")
    three = ["balanced_accuracy", "f1", "calibration_error"]
    cost = statistics.median([evaluation(three) - evaluation([]) for _ in range(repetitions)])
    print(f"| {name} | {', '.join(three)} | {1e3 * cost / clients:.2f} | {100 * cost / (fit + cost):.2f} |")


def main() -> None:
    """Measure both workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}, one thread\n")
    print("| data | metrics | ms a client | % of a round |\n| --- | --- | ---: | ---: |")
    measure("images", images(), "fedpac_cnn", 5, options.repetitions, single=False)
    measure("digits", Digits(IID(10)), "mlp", 1, options.repetitions, single=True)


if __name__ == "__main__":
    main()
