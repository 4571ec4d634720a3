"""Time of a run with all inspection callbacks at default periods, as a ratio to one without.

    python benchmarks/inspection.py --data data/cifar10
    python benchmarks/inspection.py --data data/cifar10 --rounds 4 --clients 4 --repetitions 1 --profile

The workload is FedPAC on CIFAR-10 as in its paper's Table 1: 20 clients, 600 training images each, crops and flips, the
paper's CNN, 5 epochs, batches of 50, an evaluation after every round, TensorBoard. Runs with and without
``Inspection().callbacks()`` alternate in one process; the ratio is taken within a repetition, so that a machine that
is shared and drifts does not decide, and the median of the repetitions is printed. The order changes from one to
the next. With ``--profile`` the time inside each callback is printed as well.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from functools import partial

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, Inspection, InspectionCallback
from pfl_lightning.datamodules import DominantClasses, ImageFolder
from pfl_lightning.methods import FedPAC

HOOKS = ("on_fit_start", "on_train_start", "on_validation_end", "on_train_epoch_end", "on_train_end")


def watch(callbacks: Sequence[InspectionCallback], seconds: dict[str, float]) -> None:
    """Count the time inside each callback's hooks."""
    for callback in callbacks:
        for name in HOOKS:
            setattr(callback, name, _timed(getattr(callback, name), type(callback).__name__, seconds))


def _timed(hook, name, seconds):  # type: ignore[no-untyped-def]
    def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        hook(*args, **kwargs)
        seconds[name] += time.perf_counter() - start

    return timed


def fit(data: ImageFolder, callbacks: Sequence[L.Callback], args: argparse.Namespace) -> float:
    """Seconds of a fit, from the first round to the end."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=args.rounds,
            accelerator=args.accelerator,
            devices=1,
            logger=TensorBoardLogger(folder),
            callbacks=[FederatedLoop(), *callbacks],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        settings = {"lr": 0.02, "momentum": 0.5, "weight_decay": 5e-4, "epochs": args.epochs}
        federation = Federation(partial(FedPAC, **settings), "fedpac_cnn", seed=0)
        start = time.perf_counter()
        trainer.fit(federation, datamodule=data)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the images: train/<class>/*, test/<class>/*")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", type=int, default=Inspection().every_n_rounds, help="rounds between pictures")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--profile", action="store_true", help="also print the time inside each callback")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = ImageFolder(
        root=args.data,
        partition=DominantClasses(num_clients=args.clients, samples_per_client=666),
        batch_size=50,
        augment=True,
        validation_share=0.1,
    )
    warm_up = argparse.Namespace(**{**vars(args), "rounds": 1, "epochs": 1})
    fit(data, Inspection().callbacks(), warm_up)  # imports, the image cache, the first pictures
    seconds: dict[str, float] = defaultdict(float)
    times: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(args.repetitions):
        for inspected in (True, False) if repetition % 2 else (False, True):
            callbacks = Inspection(args.every).callbacks() if inspected else []
            if args.profile:
                watch(callbacks, seconds)
            times[inspected].append(fit(data, callbacks, args))
    ratios = [one / other for one, other in zip(times[True], times[False], strict=True)]
    print(
        f"{date.today()}, {platform.machine()}, {args.threads} threads, {args.clients} clients, {args.rounds} rounds, "
        f"pictures every {args.every}, torch {torch.__version__}"
    )
    print(f"without: median {statistics.median(times[False]):.2f} s a fit\n")
    print("| all callbacks, to none | median ratio | smallest | largest |\n|---|---|---|---|")
    print(f"| time of the fit | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
    if args.profile:
        print("\n| callback | seconds a fit | share of the fit |\n|---|---|---|")
        whole = statistics.mean(times[True])
        for name, total in sorted(seconds.items(), key=lambda item: -item[1]):
            each = total / args.repetitions
            print(f"| {name} | {each:.2f} | {100 * each / whole:.1f}% |")


if __name__ == "__main__":
    main()
