"""Calibre against pFL-SSL, FedAvg-FT, FedBABU, FedRep and Script on CIFAR-10, for participating and novel clients.

    python benchmarks/accuracy_calibre.py --data data/cifar10

As in sections V-A and V-D of the paper (ICDCS 2024), much reduced: a third of the clients never trains; the others
train an encoder; then every client, the novel ones included, adapts the result to its own images for ten epochs and is
tested. Self-supervised methods and FedRep fit a new linear head on the frozen encoder's features, FedBABU goes on with
its head, FedAvg-FT with the whole model; Script-Fair trains the whole model from scratch for as many epochs,
Script-Convergent for five times as many. Each run has a process of its own; runs that a folder already holds are not
repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from _study import Study, main, runs_missing

OBJECTIVES = {"SimCLR": "simclr", "BYOL": "byol", "SimSiam": "simsiam", "MoCoV2": "mocov2", "SwAV": "swav"}
OBJECTIVES["SMoG"] = "smog"
ABLATION = {
    "Calibre (SimCLR), L_n alone": {"alpha_p": 0.0},
    "Calibre (SimCLR), L_p alone": {"alpha_n": 0.0},
    "Calibre (SimCLR), weights by samples": {"aggregation": "samples"},
    "Calibre (SimCLR), weights by divergence alone": {"alpha_n": 0.0, "alpha_p": 0.0},
}
SELF_SUPERVISED = (
    *(f"Calibre ({name})" for name in OBJECTIVES),
    *ABLATION,
    *(f"pFL-{name}" for name in OBJECTIVES),
    "FedEMA",
)
SUPERVISED = ("FedAvg-FT", "FedAvg-FT, linear head", "FedBABU", "FedRep")
SCRIPTS = ("Script-Fair", "Script-Convergent")
DEFAULT = ("Calibre (SimCLR)", "pFL-SimCLR", "FedAvg-FT", "FedBABU", "FedRep", *SCRIPTS)


def method(name: str, args: argparse.Namespace) -> Any:
    """Factory of a method's clients."""
    from pfl_lightning import methods as m

    lr = args.lr if name in SELF_SUPERVISED else args.supervised_lr
    own = {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4, "epochs": args.epochs}
    if name == "FedEMA":
        return partial(m.FedEMA, **own)
    if name.startswith("pFL-"):
        return partial(m.PFLSSL, objective=OBJECTIVES[name.removeprefix("pFL-")], **own)
    if name.startswith("Calibre"):
        objective = OBJECTIVES[name[name.index("(") + 1 : name.index(")")]]
        return partial(m.Calibre, objective=objective, **own, **ABLATION.get(name, {}))
    supervised = {"FedBABU": m.FedBABU, "FedRep": m.FedRep}
    return partial(supervised.get(name, m.FedAvg), **own)


def build(name: str, seed: int, args: argparse.Namespace) -> tuple[Any, Any]:
    """A federation and its data."""
    from pfl_lightning import Federation
    from pfl_lightning.datamodules import (
        ClassesPerClient,
        DirichletOverClasses,
        ImageFolder,
        RandomCrop,
        RandomFlip,
        StrongAugmentation,
    )
    from pfl_lightning.encoders import ResNet18

    if args.partition == "classes":
        rule: Any = ClassesPerClient(args.clients, classes_per_client=2, samples_per_client=args.samples, seed=seed)
    else:
        rule = DirichletOverClasses(args.clients, alpha=0.3, samples_per_client=args.samples, seed=seed)
    views = name in SELF_SUPERVISED
    data = ImageFolder(
        root=args.data,
        partition=rule,
        batch_size=128 if views else 32,
        drop_last=True,
        augment=[StrongAugmentation()] if views else [RandomCrop(4), RandomFlip()],
        validation_share=0.0,
        novel_clients=args.novel,
        test_samples_per_client=args.samples,
        seed=seed,
    )
    encoder: Any = partial(ResNet18, layers=(1, 1, 1, 1)) if args.encoder == "resnet10" else args.encoder
    return Federation(method(name, args), encoder), data


def finish(trainer: Any, federation: Any, data: Any, name: str, args: argparse.Namespace, folder: Path) -> None:
    """Let every client adapt the model, and evaluate it."""
    from pfl_lightning.cli.personalize import write_personalization
    from pfl_lightning.phases import Personalization

    train: Any = "linear"
    if name == "FedAvg-FT" or name in SCRIPTS:
        train = "all"
    elif name == "FedBABU":
        train = "head"
    epochs = 50 if name == "Script-Convergent" else 10
    personalization = Personalization(train=train, epochs=epochs, lr=0.01, momentum=0.9, batch_size=32)
    with federation.personalized(personalization):
        trainer.test(federation, datamodule=data, verbose=False)
    write_personalization(federation, personalization, folder)


def find(folder: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """The results of a finished run."""
    path = folder / "personalized.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(results: Mapping[str, list[dict[str, Any]]], args: argparse.Namespace) -> str:
    """Mean and variance over clients, in % and in squared %: means over seeds, ± the deviation over seeds."""
    lines = [
        "| method | participating: mean | variance | worst decile | novel: mean | variance | worst decile |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        if runs:
            cells = [_cells([run[group] for run in runs]) for group in ("participating", "novel")]
            lines.append(f"| {name}{runs_missing(runs, args)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(groups: list[dict[str, Any]]) -> str:
    means = _spread([100 * group["mean"] for group in groups], 2)
    variances = _spread([1e4 * group["variance"] for group in groups], 1)
    return f"{means} | {variances} | {_spread([100 * group['worst_decile'] for group in groups], 1)}"


def _spread(values: list[float], digits: int) -> str:
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values):.{digits}f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--partition", choices=("classes", "dirichlet"), default="classes", help="Q- or D-non-iid")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--novel", type=int, default=10, help="clients that never train")
    parser.add_argument("--cohort", type=int, default=5, help="clients of a round")
    parser.add_argument("--samples", type=int, default=300, help="images a client, for training and for the test")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--encoder", default="fedpac_cnn", help="a registered name, or resnet10")
    parser.add_argument("--lr", type=float, default=0.05, help="of self-supervised methods")
    parser.add_argument("--supervised-lr", type=float, default=0.01)


if __name__ == "__main__":
    names = dict.fromkeys((*SELF_SUPERVISED, *SUPERVISED, *SCRIPTS), "")
    study = Study(
        __doc__ or "",
        "runs/accuracy_calibre",
        names,
        DEFAULT,
        build,
        100,
        add_arguments,
        evaluate_every=25,
        finish=finish,
        find=find,
        table=table,
        untrained=SCRIPTS,
        cohort=lambda args: args.cohort,
    )
    main(study)
