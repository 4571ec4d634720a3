"""Accuracy on CIFAR-10 under FedPAC's Table 1 (20 clients, 600 training images each, dominant classes).

    python benchmarks/accuracy_cifar10.py --data data/cifar10 --rounds 30

Each method runs in a process of its own; ``--processes`` of them at a time, with one thread each. Runs that a folder
already holds are not repeated, so that the command can be stopped and started again. It prints the table of
docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path

# Table 1 of the FedPAC paper (ICLR 2023), CIFAR-10, 20 clients, 200 rounds; the ablations are Table 2.
PAPER = {
    "Local": 65.43,
    "FedAvg": 70.05,
    "FedAvg-FT": 76.56,
    "FedPer": 68.37,
    "LG-FedAvg": 65.19,
    "FedRep": 71.36,
    "FedBABU": 76.46,
    "FedPAC": 81.13,
    "FedPAC, alignment only": 79.43,
    "FedPAC, combination only": 78.19,
    "FedPAC, neither": 71.68,
}
DEFAULT = ["Local", "FedAvg", "FedAvg-FT", "FedPer", "FedRep", "FedPAC"]


def run_one(name: str, args: argparse.Namespace) -> None:
    """Train one method and leave its results in its folder."""
    import lightning as L
    import torch

    from pfl_lightning import Federation
    from pfl_lightning import methods as m
    from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
    from pfl_lightning.datamodules import DominantClasses, ImageFolder

    torch.set_num_threads(args.threads)
    factories = {
        "Local": m.LocalOnly,
        "FedAvg": m.FedAvg,
        "FedAvg-FT": partial(m.FedAvg, fine_tune="all", fine_tune_epochs=args.fine_tune_epochs),
        "FedPer": m.FedPer,
        "LG-FedAvg": m.LGFedAvg,
        "FedRep": partial(m.FedRep, head_epochs=args.fedrep_head_epochs),
        "FedBABU": partial(m.FedBABU, fine_tune_epochs=args.fine_tune_epochs),
        "FedPAC": m.FedPAC,
        "FedPAC, alignment only": partial(m.FedPAC, combination=False),
        "FedPAC, combination only": partial(m.FedPAC, alignment=0.0),
        "FedPAC, neither": partial(m.FedPAC, alignment=0.0, combination=False),
    }
    settings = {"lr": 0.02, "momentum": 0.5, "weight_decay": 5e-4, "epochs": 5}
    L.seed_everything(args.seed, verbose=False)
    data = ImageFolder(
        root=args.data,
        partition=DominantClasses(num_clients=20, samples_per_client=666, seed=args.seed),
        batch_size=50,
        augment=True,
        validation_share=0.1,
    )
    folder = folder_of(name, args)
    trainer = L.Trainer(
        max_epochs=args.rounds,
        accelerator=args.accelerator,
        devices=1,
        logger=L.pytorch.loggers.CSVLogger(folder, name="", version=""),
        callbacks=[FederatedLoop(), ResultsWriter(str(folder))],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=args.evaluate_every,
    )
    trainer.fit(Federation(partial(factories[name], **settings), "fedpac_cnn"), datamodule=data)


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """Where a method's results go."""
    slug = name.lower().replace(", ", "-").replace(" ", "-")
    return Path(args.output) / f"{slug}-rounds{args.rounds}-seed{args.seed}"


def spawn(name: str, args: argparse.Namespace) -> None:
    """Run one method in a process of its own, unless its results are there."""
    if (folder_of(name, args) / "results.json").exists():
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    subprocess.run(command, check=True)


def table(args: argparse.Namespace) -> str:
    """The results as Markdown."""
    lines = [
        "| method | last round, mean ± std | worst decile | selected on validation | best on test | paper |",
        "|---|---|---|---|---|---|",
    ]
    for name in args.methods:
        results = json.loads((folder_of(name, args) / "results.json").read_text())
        accuracy = results["accuracy"]
        last, selected, best = accuracy["last"], accuracy["validation_selected"], accuracy["best_test"]
        lines.append(
            f"| {name} | {100 * last['mean']:.2f} ± {100 * last['std']:.2f} | {100 * last['worst_decile']:.2f} "
            f"| {100 * selected['mean']:.2f} (round {selected['round'] + 1}) "
            f"| {100 * best['mean']:.2f} (round {best['round'] + 1}) "
            f"| {PAPER[name]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train/<class>/* and test/<class>/*")
    parser.add_argument("--output", default="runs/accuracy_cifar10")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--methods", nargs="+", default=DEFAULT, choices=list(PAPER), metavar="METHOD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--processes", type=int, default=2, help="methods at a time")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--evaluate-every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--fine-tune-epochs", type=int, default=5)
    parser.add_argument("--fedrep-head-epochs", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return run_one(args.only, args)
    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(lambda name: spawn(name, args), args.methods))
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {args.rounds} rounds, seed {args.seed}\n")
    print(table(args))
    return None


if __name__ == "__main__":
    main()
