"""What is said of a mistaken command line: a line about the option, and what was meant or may be given.

Importing it takes no torch.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable
from importlib import import_module

from pfl_lightning.names import nearest

# ---------------------------------------------------------------------- names that are known

_ELSEWHERE = {
    "ckpt_path": ("resume",),
    "data": ("dataset",),
    "data.partition.num_clients": ("clients",),
    "loop.cohort": ("cohort_size", "fraction", "participation", "participation_rate"),
    "model.method.epochs": ("local_epochs", "num_epochs", "train_epochs"),
    "model.method.lr": ("learning_rate",),
    "run_dir": ("output", "output_dir"),
    "seed_everything": ("seed",),
    "trainer.accelerator": ("device",),
    "trainer.devices": ("gpus",),
    "trainer.max_epochs": ("communication_rounds", "max_rounds", "num_rounds", "rounds", "trainer.epochs"),
}
OTHER_NAMES = {name: option for option, names in _ELSEWHERE.items() for name in names}
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

NEAR, VERY_NEAR = 0.75, 0.8
"""How alike an option is at least that is proposed, from 0 to 1: its last part, and all of it."""

KINDS = {
    "model.method": ("methods", "pfl_lightning.methods", "FederatedClient"),
    "model.method.objective": ("objectives", "pfl_lightning.self_supervised", "Objective"),
    "model.method.partner": ("encoders", "pfl_lightning.encoders", ""),
    "model.method.optimizer": ("optimizers", "torch.optim", "Optimizer"),
    "model.server_optimizer": ("server optimizers", "pfl_lightning.server_optimizers", "Optimizer"),
    "model.robust": ("robust rules", "pfl_lightning.robust", "Robust"),
    "model.encoder": ("encoders", "pfl_lightning.encoders", ""),
    "model.engine": ("engines", "pfl_lightning.engines", "Engine"),
    "data.partition": ("partitions", "pfl_lightning.datamodules", "Partitioner"),
    "partition": ("partitions", "pfl_lightning.datamodules", "Partitioner"),
    "data": ("data modules", "pfl_lightning.datamodules", "FederatedDataModule"),
    "trainer.callbacks": ("callbacks", "lightning.pytorch.callbacks", "Callback"),
    "trainer.logger": ("loggers", "lightning.pytorch.loggers", "Logger"),
}
"""What is named for an option: the kind, and the module and base of the classes."""


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
    names = {name: option for name, option in OTHER_NAMES.items() if option in known}
    names |= {name: name for name in known}
    if "output" in known:  # of a command that writes elsewhere
        names["output_dir"] = "output"
    for name in known:
        names.setdefault(_last(name), name)
    found = {**names, "": ""}[nearest(word, names, VERY_NEAR) or nearest(_last(word), names, NEAR)]
    personal = f"personalize.{_last(found)}"
    found = personal if command == "personalize" and "." not in word and personal in known else found
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


def _known_names(option: str) -> tuple[str, list[str]]:
    """What can be named for an option, and the names; nothing for most options."""
    kind, module, base = KINDS.get(option, ("", "builtins", "object"))
    there = import_module(module)
    if not kind or not base:
        return kind, [*there.encoder_names()] if kind else []
    classes = {name: getattr(there, name) for name in there.__all__ if inspect.isclass(getattr(there, name))}
    of, no_choices = getattr(there, base), (base, "PartitionTransform")  # of which users write subclasses
    fitting = (name for name, cls in classes.items() if issubclass(cls, of) and not inspect.isabstract(cls))
    prefix = "torch.optim." if kind == "optimizers" else ""
    return kind, [f"{prefix}{name}" for name in fitting if name not in no_choices]


# ---------------------------------------------------------------------- the parser's messages, shortened

_KEY, _UNION = 'Parser key "', "Does not validate against any of the Union subtypes"
_FRAME = (
    *(_KEY, _UNION, "Subtypes:", "Errors:", "Problem with given class_path", "Given value", "Subclass types expect"),
    *("a class path (str)", "a dict with class_path", "a dict without class_path", "a dict with parameters accepted"),
)
"""How lines begin in which the parser says where it is, and not what is wrong."""

_LONGEST_VALUE, _LONGEST_WORD = 120, 300
_ANYWHERE = {
    r"(?s)\.? Got value: (?:Namespace|NestedArg)\(.*": "",
    r"functools\.partial\(.* argument after \*\* must be a mapping, not \w+": "init_args must be a mapping of options",
}
_PLAINLY = {
    **_ANYWHERE,
    r"^Type .* expects a function or a callable class: ": "",
    # What Python says of a list, a number or a text where the parser looks into a mapping.
    r"unhashable type: .*|argument of type .* is not iterable|'\w+' object has no attribute '\w+'": (
        "class_path must be an import path, and init_args a mapping of options"
    ),
    r"^(?:dot import path string.*|path but .* either .*)": "a class",
    r"<class 'NoneType'>": "null",
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
    r"typing\.Literal": "one of ",
    r'in "<unicode string>", line': "in line",
    rf"( Got value: .{{{_LONGEST_VALUE}}}).+": r"\1 ...",
}
"""Words of the parser and of Python, and what is said in their place: in its reports, and in any message."""


def shorten(message: str) -> str:
    """Path of the option and its error; messages of one line, and of other origin, as they are.

    For an option of several types, or of an object that may be null, jsonargparse reports for each type why the value
    does not fit, and repeats the value. The most deeply nested reports are kept: they are about the type that was
    meant.

    Args:
        message: A message.
    """
    if "\n" not in message or not (_KEY in message or _UNION in message):
        return clip(_plain(re.sub(rf'^{_KEY}([\w.]+)":\s*', r"\1: ", message), _ANYWHERE))
    lines = [(len(line) - len(line.lstrip(" -")), line.lstrip(" -").rstrip()) for line in message.splitlines()]
    reports = [(depth, text) for depth, text in lines if text and not text.startswith(_FRAME)]
    if not reports:
        return message
    deepest = [text for depth, text in reports if depth == max(reports)[0]]
    others = dict.fromkeys(_plain(text).replace("..", ".") for text in deepest if not re.match("Expected an? ", text))
    # "No subclass" is said without the value, too; and where Python says it, nothing says of what.
    plain = [text for text in others if not any(other != text and other.startswith(text) for other in others)]
    path = ".".join(re.findall(rf'{_KEY}([\w.]+)":', message))
    return clip(": ".join(filter(None, (path, "; ".join(plain) or _types(deepest, message)))))


def clip(message: str) -> str:
    """A message without the middle of words longer than a path.

    Args:
        message: A message.
    """
    return re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][:60]} ... {word[0][-20:]}", message)


def _plain(text: str, words: dict[str, str] = _PLAINLY) -> str:
    for wrong, plain in words.items():
        text = re.sub(wrong, plain, text)
    return text


def _types(reports: list[str], message: str) -> str:
    """All types that would do, and the given value."""
    expected = [_plain(re.sub(r"^Expected an? ", "", text).partition(". Got value: ")[0]) for text in reports]
    given = r"(?:dot import path string: |path but |(?:Got|Given) value: )(.*?)(?: either .*|\. Got value: .*)?$"
    found = [value for text in (*reports, message) for value in re.findall(given, text, re.MULTILINE)] or [""]
    value = next((one for one in found if not one.startswith(("NestedArg(", "Namespace("))), found[0])
    value = re.sub(r"^NestedArg\(.*?\bval='?(.*?)'?\)$", r"\1", value)
    value = "a mapping" if value.startswith("Namespace(") else value
    value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]} ..."
    return f"expected {' or '.join(dict.fromkeys(expected))}, got {value}"


# ---------------------------------------------------------------------- what was meant


def explain(message: str, options: Iterable[str], command: str = "") -> str:
    """The parser's error in a line, and in another one what was probably meant, or what the choices are.

    Args:
        message: The parser's message.
        options: The parser's options, without dashes.
        command: The subcommand that was typed.
    """
    short = shorten(message)
    if required := re.match("the following arguments are required: ", short):
        return f"{required[0]}{short[required.end() :].replace(f'{command}.', '')}\ngive a config: --config FILE"
    return "\n".join(filter(None, (short, _hint(message, short, options, command).strip())))


def _meant(name: str) -> str:
    return f"did you mean {name!r}? " if name else ""


_GROUPS = {"model": "--model.method", "checkpoint": "--ckpt_path", "personalize": "--personalize.train"}
"""Options that are meant where a group of options is given a value, such as ``--model FedAvg``."""


def _hint(message: str, short: str, options: Iterable[str], command: str) -> str:
    if found := re.search(r"[Uu]nrecognized arguments: ([^-\s]\S*\.ya?ml)", short):
        return _meant(f"--config {found[1]}")
    if found := re.search(r"[Uu]nrecognized arguments: (-\S+)|does not accept option '([\w.]+)'", short):
        near = nearest_option(found[1] or found[2], options, command)
        return _meant(f"--{near}" if near and found[1] else near)
    if found := re.match(r"(\w+)\.\1: Unable to load config|(personalize): expected a class", short):
        group = found[1] or found[2]
        return f"{_meant(_GROUPS.get(group, ''))}--help {group} lists its options"
    if found := re.search(r"(?:[Oo]ption|[Kk]ey|Nested key) '([\w.]+)' is not (?:accepted|expected)", message):
        return _option_of_class(found[1].partition(".")[0], _class_before(message, found), short.partition(": ")[0])
    if found := re.search(r"expected one of \[(.*)\].*, got (\S+)$", short):
        return _meant(nearest(found[2], re.findall(r"'([^']+)'", found[1])))
    if "No module named '" in short:
        return "modules are found in the folder where pfl runs, and among the installed packages"
    return _name(short)


def _class_before(message: str, found: re.Match[str]) -> str:
    """Import path of the class whose option a report is about: named before it, or in the value behind it."""
    if before := re.search(r"class_path '([\w.]+)':\s*$", message[: found.start()]):
        return before[1]
    value = message[found.end() :].partition("\n")[0]  # what stands within it has classes of its own
    own = re.search(r"value: (?:Namespace\(|\{')class_path'?[=:] ?'([\w.]+)'|class_path'?[=:] ?'([\w.]+)'[)}]$", value)
    return own[1] or own[2] if own else ""


def _option_of_class(name: str, path: str, option: str) -> str:
    """What is meant by an option that a class does not have, and which it has."""
    if not path:
        return ""
    if name == "class_path":  # beside which the options of the class stand
        return "the options of a class go below init_args: {class_path: NAME, init_args: {lr: 0.1}}"
    from jsonargparse import ArgumentParser

    cls = pkgutil.resolve_name(path)
    # Without those that the federation gives.
    given = {"encoder", "num_classes", "input_shape", "params"}
    own = {*ArgumentParser().add_class_arguments(cls, fail_untyped=False)} - given if inspect.isclass(cls) else ()
    if name in own:
        return (
            f"the option {name!r} of {cls.__name__} is not in its signature: declare it with its type in __init__ (of "
            "a client: after encoder, num_classes, *)"
        )
    near = nearest_option(name, (f"{option}.{one}" for one in (*own, "init_args")), below=option)
    return f"{_meant(near)}options of {cls.__name__}: {', '.join(sorted(own))}" if own else ""


def _name(short: str) -> str:
    """Known names for the option that the error is about."""
    asked = re.search(r"([\w.]+)\.help: ", short)
    option = asked[1] if asked else short.partition(": ")[0]
    if lacks := re.search(r"the following arguments are required: (\w+)$", short):
        option = f"{option}.{lacks[1]}"
    kind, names = _known_names(option)
    given = re.search(r"(?:got|string:|has no attribute|Got value:) '?([\w.]+)'?", short)
    found = re.search(r"module '([\w.]+)' has no attribute '", short)
    other = found[1] if found and not found[1].startswith("pfl_lightning") else ""  # a package, or the user's own
    there = [f"{other}.{one}" for one in dir(pkgutil.resolve_name(other)) if one[0] != "_"] if other else []
    lasts = {_last(name): name for name in (*names, *there)}
    near = lasts.get(nearest(_last(given[1]), lasts), "") if given else ""
    if asked and given and near == given[1]:
        return f"the options of {near!r} are fixed; to set options, name a class, such as ResNet18"
    return f"{_meant(near)}known {kind}: {', '.join(sorted(names))}" if kind else ""
