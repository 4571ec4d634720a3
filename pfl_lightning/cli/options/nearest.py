"""The name that was probably meant by one that is not known. Needs no import of torch."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pfl_lightning.names import nearest

__all__ = [
    "NEAR",
    "OF_CLASSES",
    "OTHER_NAMES",
    "nearest_argument",
    "nearest_flag",
    "nearest_options",
]

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

NEAR = 0.75
"""How alike an option is at least that is proposed, from 0 to 1."""


def nearest_argument(word: str, names: Iterable[str], option: str = "") -> str:
    """The argument of a class that is meant by an unknown one; empty if none is like it.

    Args:
        word: The unknown argument.
        names: The arguments of the class.
        option: The option that names the class, such as ``data``.

    Example:
        >>> nearest_argument("learning_rate", ["epochs", "lr"]), nearest_argument("epoch", ["epochs", "lr"])
        ('lr', 'epochs')
        >>> nearest_argument("num_clients", ["novel_clients", "partition"], "data")
        'partition.num_clients'
    """
    known = [*names]
    elsewhere = _last(OTHER_NAMES.get(word, word))
    below = [name.removeprefix(f"{option}.") for name in OF_CLASSES if name.startswith(f"{option}.")]
    inner = [name for name in below if "." in name and _last(name) == elsewhere and name.partition(".")[0] in known]
    return elsewhere if elsewhere in known else inner[0] if inner else nearest(word, known)


def nearest_flag(word: str, flags: Iterable[str]) -> str:
    """The option of a command without a Trainer that is meant by an unknown one; empty if none is near.

    Args:
        word: The unknown option, with dashes.
        flags: All options, with dashes.

    Example:
        >>> nearest_flag("--out", ["--output", "--help"]), nearest_flag("--best", ["--labels"])
        ('--output', '')
    """
    typed = word.lstrip("-").replace("_", "-")
    known = {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}
    begun = [name for name in known if f"{name}-".startswith(f"{typed}-") or f"{typed}-".startswith(f"{name}-")]
    begun = begun or [name for name in known if name.startswith(typed)] if typed else []
    parts = [name for name in known if typed in name.split("-")]
    for found in (begun, parts):
        if len(found) == 1:
            return known[found[0]]
    return next((known[name] for name in difflib.get_close_matches(typed, known, n=1, cutoff=NEAR)), "")


def nearest_options(word: str, options: Iterable[str], command: str = "") -> list[str]:
    """Options of a run that may be meant by an unknown one.

    Args:
        word: The unknown option, with or without dashes and value.
        options: All options, without dashes.
        command: The subcommand: what ``fit`` and ``personalize`` both have is that of the one that was typed.

    Example:
        >>> options = ["loop.cohort", "trainer.max_epochs"]
        >>> nearest_options("--cohort=3", options), nearest_options("rounds", options)
        (['loop.cohort'], ['trainer.max_epochs'])
        >>> nearest_options("--epochs", options), nearest_options("--epochs", options, "personalize")
        (['model.method.epochs'], ['personalize.epochs'])
    """
    word = word.lstrip("-").partition("=")[0].replace("-", "_")
    known = [name for name in dict.fromkeys((*options, *OF_CLASSES)) if not name.endswith("+")]
    alike = defaultdict(list)  # by their last part
    for option in known:
        alike[_last(option)].append(option)
    group, last = word.rpartition(".")[0], _last(word)
    if word in known:  # where the beginning of this call was a misspelling
        return [word]
    if same := _of_group(alike.get(last, []), group):
        return same[:3]
    for name in (word, word.replace(".", "_"), last, f"{word}s", word.removesuffix("s")):
        elsewhere = OTHER_NAMES.get(name)
        if elsewhere == "run_dir" and "output" in known:  # of a command that writes elsewhere
            elsewhere = "output"
        if elsewhere in known:
            return _of_command([elsewhere, *_of_group(alike[_last(elsewhere)], PERSONALIZATION)], command)
        if 0 < len(same := alike.get(name, [])) <= 3:
            return _of_command(same, command)
    begun = [option for option in known if option.startswith(word)] if len(word) > 2 else []
    if 0 < len(begun) <= 3:
        return begun
    whole = difflib.get_close_matches(word, known, n=1, cutoff=NEAR)
    lasts = [name for name in difflib.get_close_matches(last, [*alike, *OTHER_NAMES], n=1, cutoff=NEAR) if name != last]
    if lasts and not (group and whole):
        return nearest_options(f"{group}.{lasts[0]}".lstrip("."), known, command)
    return whole


def _last(option: str) -> str:
    return option.rpartition(".")[2]


def _of_group(options: Sequence[str], word: str) -> list[str]:
    """Options of the group that a word names, such as ``model.method``; none where it names none."""
    group = word.partition(".")[0]
    groups = {option.partition(".")[0] for option in options if group}
    near = {one for one in groups if one.startswith(group)} or {*difflib.get_close_matches(group, groups, cutoff=0.7)}
    return [option for option in options if option.partition(".")[0] in near]


def _of_command(options: Sequence[str], command: str) -> list[str]:
    """Of several options those of personalization for its subcommand, and for others those of a fit."""
    personal = [option for option in options if option.startswith(f"{PERSONALIZATION}.")]
    others = [option for option in options if option not in personal]
    return (personal or others) if command == PERSONALIZATION else (others or personal)
