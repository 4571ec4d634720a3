"""What an inner Trainer costs a client: milliseconds against a plain PyTorch loop and a plain Trainer on the same work.

    python benchmarks/inner_fits.py
    python benchmarks/inner_fits.py --clients 20 --rounds 10 --batches 8

A federation of a small LightningModule under ``TrainerEngine``, without evaluation. The plain loop loads each client's
weights, trains them on the same batches with a new SGD, logs nothing and averages. The plain Trainer is a silent
``L.Trainer`` that is made once, and whose ``fit`` goes on by an epoch of each client's batches. All run in turn, in
one process. A round's overhead is its time above that of the loop, or the Trainer, divided by the number of clients.
Time is processor time of this process, which waiting for others on a busy machine does not add to, and the minimum over
the rounds counts; the first round is left out.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import logging
import platform
import pstats
import time
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import federate
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg

INPUTS, WIDTH, CLASSES, BATCH, LR = 32, 64, 10, 16, 0.05
SILENT: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
MOST = 10.0
"""Milliseconds a client above a plain Trainer, which is itself as far above the loop, or further."""


class Net(L.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """SGD and a schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Rounds(L.Callback):
    """Processor seconds of each round, and of the plain loop and the plain Trainer after it."""

    def __init__(self, clients: list[list[tuple[Tensor, Tensor]]], loaders: list[Any]) -> None:
        self.clients, self.loaders, self.net = clients, loaders, Net()
        self.plain = L.Trainer(max_epochs=0, limit_val_batches=0, **SILENT)
        self.times: dict[str, list[float]] = {"round": [], "loop": [], "trainer": []}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock, and run the others."""
        self.times["round"].append(time.process_time() - self._start)
        for name, run in (("loop", self._loop), ("trainer", self._trainer)):
            start = time.process_time()
            with torch.enable_grad():
                plain_round(self.net, self.clients if name == "loop" else self.loaders, run)
            self.times[name].append(time.process_time() - start)

    def _loop(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        net = self.net.layers
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
        for inputs, labels in batches:
            loss = F.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def _trainer(self, loader: Any) -> None:
        self.plain.fit_loop.max_epochs += 1  # type: ignore[operator]
        self.plain.fit(self.net, loader)


def plain_round(net: nn.Module, clients: list[Any], train: Callable[[Any], None]) -> None:
    """One round of FedAvg, written out."""
    weights = copy.deepcopy(net.state_dict())
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for data in clients:
        net.load_state_dict(weights)
        train(data)
        for name, value in net.state_dict().items():
            total[name] += value / len(clients)
    net.load_state_dict(total)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, default=4, help="batches of 16 in a local epoch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print what takes the time in the package")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    count = args.clients * args.batches * BATCH
    inputs = torch.randn(count, INPUTS, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    batches = list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))
    own = [batches[start : start + args.batches] for start in range(0, len(batches), args.batches)]
    silos: list[Any] = [
        DataLoader(TensorDataset(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])), BATCH)
        for part in own
    ]
    module, data = federate(Net(), silos, FedAvg, head=(), seed=0)
    rounds = Rounds(own, silos)
    trainer = L.Trainer(max_epochs=args.rounds, limit_val_batches=0, callbacks=[FederatedLoop(), rounds], **SILENT)
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    trainer.fit(module, datamodule=data)
    profile.disable()
    took, loop, plain = (1000 * min(times[1:]) / args.clients for times in rounds.times.values())
    print(
        f"{date.today()}, {platform.machine()}, {args.threads} thread(s), {args.clients} clients, {args.batches} "
        f"batches of {BATCH}, torch {torch.__version__}, lightning {L.__version__}"
    )
    print(f"a client: {took:.2f} ms, plain loop {loop:.2f} ms, plain Trainer {plain:.2f} ms")
    verdict = "yes" if took - plain <= MOST else "no"
    print(f"above the loop {took - loop:.2f} ms, above the Trainer {took - plain:.2f} ms (at most {MOST}: {verdict})")
    if args.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats("pfl_lightning", 90)


if __name__ == "__main__":
    main()
