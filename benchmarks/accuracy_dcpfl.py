"""DC-PFL against Local, LG-FedAvg, FedProto and FedGH on CIFAR-10: the five CNNs, two classes a client, 10 clients.

    python benchmarks/accuracy_dcpfl.py --data data/cifar10

As in Table 2 of the paper (IJCAI 2024), with fewer images and rounds: ``--samples`` images a client, of which a tenth
is for validation. Each run has a process of its own; runs that a folder already holds are not repeated.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from _study import Study, main

PAPER = {
    "Local": "92.84",
    "LG-FedAvg": "",
    "LG-FedAvg, trained model": "",
    "FedProto, classifier": "",
    "FedProto, prototype": "",
    "FedGH": "96.08",
    "DC-PFL": "96.16",
    "DC-PFL, w/o AL": "",
    "DC-PFL, w/o GC": "",
    "DC-PFL, matrices": "",
    "DC-PFL, lambda 0.1": "",
    "DC-PFL, lambda 10": "",
}
DEFAULT = ("Local", "LG-FedAvg, trained model", "FedProto, classifier", "FedProto, prototype", "FedGH", "DC-PFL")
ENCODERS = [f"dcpfl_cnn{number}" for number in range(1, 6)]


def build(name: str, seed: int, args: argparse.Namespace) -> tuple[Any, Any]:
    """A federation and its data."""
    from pfl_lightning import Federation
    from pfl_lightning import methods as m
    from pfl_lightning.datamodules import ClassesPerClient, ImageFolder

    factories = {
        "Local": m.LocalOnly,
        "LG-FedAvg": m.LGFedAvg,
        "LG-FedAvg, trained model": partial(m.LGFedAvg, eval_model="trained"),
        "FedProto, classifier": partial(m.FedProto, prediction="classifier"),
        "FedProto, prototype": m.FedProto,
        "FedGH": m.FedGH,
        "DC-PFL": m.DCPFL,
        "DC-PFL, w/o AL": partial(m.DCPFL, alignment=0.0),
        "DC-PFL, w/o GC": partial(m.DCPFL, virtual_features=0),
        "DC-PFL, matrices": partial(m.DCPFL, factors=False),
        "DC-PFL, lambda 0.1": partial(m.DCPFL, alignment=0.1),
        "DC-PFL, lambda 10": partial(m.DCPFL, alignment=10.0),
    }
    settings = {"lr": args.lr, "momentum": 0.0, "weight_decay": 0.0, "epochs": args.epochs}
    rule = ClassesPerClient(10, classes_per_client=2, samples_per_client=args.samples, seed=seed)
    data = ImageFolder(root=args.data, partition=rule, batch_size=args.batch_size, validation_share=0.1)
    return Federation(partial(factories[name], **settings), ENCODERS), data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=1000, help="images a client")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)


if __name__ == "__main__":
    main(Study(__doc__ or "", "runs/accuracy_dcpfl", PAPER, DEFAULT, build, 30, add_arguments))
