"""Names that the command line knows: of options, and of what may be named for them. Importing it takes no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from pfl_lightning.names import nearest

__all__ = ["KINDS", "NEAR", "OF_CLASSES", "OTHER_NAMES", "known_names", "nearest_flag", "nearest_option"]

OTHER_NAMES = {
    "clients": "data.partition.num_clients",
    "cohort_size": "loop.cohort",
    "communication_rounds": "trainer.max_epochs",
    "dataset": "data",
    "device": "trainer.accelerator",
    "fraction": "loop.cohort",
    "gpus": "trainer.devices",
    "learning_rate": "model.method.lr",
    "local_epochs": "model.method.epochs",
    "max_rounds": "trainer.max_epochs",
    "num_epochs": "model.method.epochs",
    "num_rounds": "trainer.max_epochs",
    "output": "run_dir",
    "output_dir": "run_dir",
    "participation": "loop.cohort",
    "participation_rate": "loop.cohort",
    "resume": "ckpt_path",
    "rounds": "trainer.max_epochs",
    "seed": "seed_everything",
    "train_epochs": "model.method.epochs",
    "trainer.epochs": "trainer.max_epochs",
}
"""Names that options have elsewhere."""

OF_CLASSES = (
    *("data.augment", "data.batch_size", "data.partition", "data.partition.num_clients"),
    *("data.partition.samples_per_client", "data.root", "data.seed", "data.validation_share"),
    *("model.method.epochs", "model.method.fine_tune", "model.method.fine_tune_epochs", "model.method.fine_tune_lr"),
    *("model.method.lr", "model.method.momentum", "model.method.optimizer", "model.method.weight_decay"),
    *("personalize.augment", "personalize.batch_size", "personalize.epochs", "personalize.lr"),
    *("personalize.momentum", "personalize.train", "personalize.weight_decay"),
)
"""Frequent options of the classes that a config names, which are not the parser's own."""

PERSONALIZATION = "personalize"
"""The subcommand whose options are those of the group of this name, rather than those of a fit."""

NEAR, VERY_NEAR = 0.75, 0.8
"""How alike an option is at least that is proposed, from 0 to 1: its last part, and all of it."""


def nearest_option(word: str, options: Iterable[str], command: str = "", below: str = "") -> str:
    """The option that is meant by an unknown one, by its whole name or by its last part; empty if none is near.

    Args:
        word: The unknown option, with or without dashes and value.
        options: All options, without dashes.
        command: The subcommand: what ``fit`` and ``personalize`` both have is that of the one that was typed.
        below: The option of a class whose own options are asked for; they are named without it.

    Example:
        >>> options = ["loop.cohort", "trainer.max_epochs"]
        >>> nearest_option("--cohort=3", options), nearest_option("rounds", options), nearest_option("xyz", options)
        ('loop.cohort', 'trainer.max_epochs', '')
        >>> nearest_option("--epochs", options), nearest_option("--epochs", options, "personalize")
        ('model.method.epochs', 'personalize.epochs')
        >>> nearest_option("num_clients", ["data.novel_clients", "data.partition"], below="data")
        'partition.num_clients'
    """
    word = word.lstrip("-").partition("=")[0].replace("-", "_")
    given = dict.fromkeys(options)
    known = [name for name in dict.fromkeys((*given, *OF_CLASSES)) if not name.endswith("+")]
    if below:
        parts = [name.removeprefix(f"{below}.") for name in known if name.startswith(f"{below}.")]
        known = [f"{below}.{part}" for part in parts if f"{below}.{part.partition('.')[0]}" in given]
    known.sort(key=lambda name: name.startswith(f"{PERSONALIZATION}.") != (command == PERSONALIZATION))
    names = {name: name for name in known}
    names |= {name: option for name, option in OTHER_NAMES.items() if option in known and name not in names}
    if "output" in known:  # of a command that writes elsewhere
        names["output_dir"] = "output"
    for name in known:
        names.setdefault(_last(name), name)
    names[""] = ""
    found = names[nearest(word, names, VERY_NEAR) or nearest(_last(word), names, NEAR)]
    personal = f"{PERSONALIZATION}.{_last(found)}"
    found = personal if command == PERSONALIZATION and "." not in word and personal in known else found
    return found.removeprefix(f"{below}.")


def nearest_flag(word: str, flags: Iterable[str]) -> str:
    """The option of a command without a Trainer that is meant by an unknown one; empty if none is near.

    Args:
        word: The unknown option, with dashes.
        flags: All options, with dashes.

    Example:
        >>> nearest_flag("--out", ["--output", "--help"]), nearest_flag("--best", ["--labels"])
        ('--output', '')
    """
    known = {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}
    return known.get(nearest(word.lstrip("-").replace("_", "-"), known, NEAR), "")


def _last(option: str) -> str:
    return option.rpartition(".")[2]


KINDS = {
    "model.method": ("methods", "pfl_lightning.methods", ""),
    "model.method.objective": ("objectives", "pfl_lightning.self_supervised", "Objective"),
    "model.method.partner": ("encoders", "pfl_lightning.encoders", ""),
    "model.method.optimizer": ("optimizers", "torch.optim", "Optimizer"),
    "model.encoder": ("encoders", "pfl_lightning.encoders", ""),
    "model.engine": ("engines", "pfl_lightning.engines", "Engine"),
    "data.partition": ("partitions", "pfl_lightning.datamodules", "Partitioner"),
    "partition": ("partitions", "pfl_lightning.datamodules", "Partitioner"),
    "data": ("data modules", "pfl_lightning.datamodules", "FederatedDataModule"),
    "trainer.callbacks": ("callbacks", "lightning.pytorch", ""),
    "trainer.logger": ("loggers", "lightning.pytorch.loggers", "Logger"),
}
"""What is named for an option: the kind, and the module and base of the classes."""


def known_names(option: str) -> tuple[str, list[str]]:
    """What can be named for an option, and the names; nothing for most options.

    Args:
        option: The option, without dashes.
    """
    kind, module, base = KINDS.get(option, ("", "builtins", ""))
    there = import_module(module)
    if base:
        of = getattr(there, base)
        names = [name for name in there.__all__ if _is_choice(getattr(there, name), of)]
        return kind, [f"torch.optim.{name}" for name in names] if kind == "optimizers" else names
    if kind == "methods":
        return kind, [cls.__name__ for cls in (*there.METHODS, *there.ADAPTER_METHODS)]
    if kind == "callbacks":
        waiting, names = [there.Callback], []
        while waiting:
            cls = waiting.pop()
            waiting += cls.__subclasses__()
            names.append(cls.__name__)
        return kind, names
    return kind, [*there.encoder_names()] if kind else []


def _is_choice(found: Any, base: type) -> bool:
    """Whether a config may name a class: a base of which users write subclasses is none."""
    is_class = inspect.isclass(found) and issubclass(found, base) and not inspect.isabstract(found)
    return is_class and found is not base and found.__name__ != "PartitionTransform"
