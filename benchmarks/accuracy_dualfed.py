"""DualFed against its baselines on PACS, a client a domain, from scratch.

    python benchmarks/accuracy_dualfed.py --data data/pacs64 --seeds 0 1 2

As in Table 1 of the paper (ACM MM 2024): 500 training images a client, all others of the domain are its test part, best
test accuracy; but without ImageNet weights, with images of ``--image-size`` pixels and fewer rounds. Each run has a
process of its own; runs that a folder already holds are not repeated.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from _study import Study, main

PAPER = {
    "Local": "91.52",
    "FedAvg": "91.82",
    "FedPer": "92.58",
    "FedBN": "",
    "FedProto": "",
    "Fed-RoD": "",
    "DualFed": "95.01",
    "DualFed, logits": "",
    "DualFed, simultaneous": "95.15",
    "DualFed-P": "94.95",
    "DualFed-G": "94.84",
}
DEFAULT = ("Local", "FedAvg", "FedPer", "FedBN", "FedProto", "Fed-RoD", "DualFed")


def build(name: str, seed: int, args: argparse.Namespace) -> tuple[Any, Any]:
    """A federation and its data."""
    from pfl_lightning import Federation
    from pfl_lightning import methods as m
    from pfl_lightning.datamodules import DomainFolders, Domains, RandomFlip, RandomRotation
    from pfl_lightning.encoders import ResNet18

    dual = partial(m.DualFed, contrastive=args.contrastive, temperature=0.2)
    factories = {
        "Local": m.LocalOnly,
        "FedAvg": m.FedAvg,
        "FedPer": m.FedPer,
        "FedBN": m.FedBN,
        "FedProto": partial(m.FedProto, prediction="classifier"),
        "Fed-RoD": m.FedRoD,
        "DualFed": dual,
        "DualFed, logits": partial(dual, prediction="logits"),
        "DualFed, simultaneous": partial(dual, stages="simultaneous"),
        "DualFed-P": partial(dual, global_on="projector"),
        "DualFed-G": partial(dual, global_on="projector", personal=("head",)),
    }
    settings = {"lr": args.lr, "momentum": 0.5, "weight_decay": 0.0, "epochs": 1}
    data = DomainFolders(
        root=args.data,
        partition=Domains(4, samples_per_client=500, seed=seed),
        batch_size=args.batch_size,
        image_size=args.image_size,
        augment=[RandomFlip(), RandomRotation(30)],
        validation_share=0.0,
        test_samples_per_client=args.test_samples,
    )
    encoder = partial(ResNet18, layers=tuple(args.layers), stem_strides=tuple(args.stem_strides))
    return Federation(partial(factories[name], **settings), encoder), data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--layers", type=int, nargs=4, default=[2, 2, 2, 2], help="blocks of the residual network")
    parser.add_argument("--stem-strides", type=int, nargs=2, default=[2, 2], help="of its first convolution and pool")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--contrastive", type=float, default=40.0, help="lambda of DualFed")
    parser.add_argument("--test-samples", type=int, default=None, help="greatest test split of a client")


if __name__ == "__main__":
    main(Study(__doc__ or "", "runs/accuracy_dualfed", PAPER, DEFAULT, build, 30, add_arguments))
