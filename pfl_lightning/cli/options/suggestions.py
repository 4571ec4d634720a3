"""What was probably meant: hints below an error of the command line."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_lightning import datamodules, engines, methods, self_supervised
from pfl_lightning.cli.options.nearest import nearest_argument, nearest_options
from pfl_lightning.client import FederatedClient
from pfl_lightning.encoders import encoder_names
from pfl_lightning.names import nearest

__all__ = ["hint", "known_names", "without_types"]

OF_DATASETS = ("loader", "transform", "target_transform")
"""Options of torchvision's data sets that data modules do not have."""


def hint(message: str, short: str, options: Iterable[str], command: str = "") -> str:
    """A line that says what was probably meant, or what the choices are; empty if nothing is known.

    Args:
        message: The parser's message.
        short: The same, shortened.
        options: The parser's options, without dashes.
        command: The subcommand that was typed.
    """
    answers = (
        lambda: _without_config(short),
        lambda: _unknown_option(short, options, command),
        lambda: _group(short),
        lambda: _class_option(message, short),
        lambda: _choice(short),
        lambda: _attribute(short),
        lambda: _file(short),
        lambda: _class(short),
    )
    return next((found for found in (answer() for answer in answers) if found is not None), "")


def without_types(short: str) -> str:
    """A message about a name that stands for nothing: that there is none, in the place of the types that would do.

    Args:
        short: The parser's message, shortened.

    Example:
        >>> without_types("model.method: expected a class, got FedDin")
        'model.method: there is no method FedDin'
    """
    found = re.fullmatch(r"([\w.]+): expected a class(?: or null)?, got ([A-Za-z_]\w*)", short)
    kind, _ = known_names().get(found[1], lambda: ("", ()))() if found else ("", ())
    return f"{found[1]}: there is no {kind.removesuffix('s')} {found[2]}" if found and kind else short


def _meant(*names: str) -> str:
    return f"did you mean {' or '.join(map(repr, names))}? " if any(names) else ""


def _without_config(short: str) -> str | None:
    """A command line without a config, or with one that is no option."""
    if short.startswith("the following arguments are required: "):
        return "give a config: --config FILE"
    file = re.search(r"[Uu]nrecognized arguments: ([^-\s]\S*\.ya?ml)", short)
    return _meant(f"--config {file[1]}").strip() if file else None


def _unknown_option(short: str, options: Iterable[str], command: str) -> str | None:
    typed = re.search(r"[Uu]nrecognized arguments: (-\S+)", short)
    key = re.search(r"does not accept option '([\w.]+)'", short)
    if not typed and not key:
        return None
    found = nearest_options(typed[1] if typed else key[1] if key else "", options, command)
    return _meant(*(f"--{name}" if typed else name for name in found)).strip()


def _group(short: str) -> str | None:
    """A group of options that was given a value, such as ``--model FedAvg``."""
    found = re.match(r"(\w+)\.\1: Unable to load config|(personalize): expected a class", short)
    if not found:
        return None
    group = found[1] or found[2]
    meant = {"model": "--model.method", "checkpoint": "--ckpt_path", "personalize": "--personalize.train"}
    return f"{_meant(meant.get(group, ''))}--{group}.help lists the options of this group"


def _class_option(message: str, short: str) -> str | None:
    """The options of the class whose option was misspelt; ``None`` if that is not what the error is about."""
    wrong = re.search(r"(?:[Oo]ption|[Kk]ey|Nested key) '([\w.]+)' is not (?:accepted|expected)", message)
    if not wrong:
        return None
    before = re.search(r"class_path '([\w.]+)':\s*$", message[: wrong.start()])
    path = before[1] if before else _class_of_value(message[wrong.end() :])
    if not path:
        return ""
    cls = pkgutil.resolve_name(path)
    options = _arguments(cls)
    name = wrong[1].partition(".")[0]
    if name == "class_path":  # beside which the options of the class stand
        return "the options of a class stand below init_args: {class_path: NAME, init_args: {lr: 0.1}}"
    if name in options and issubclass(cls, FederatedClient):  # which the parser does not find
        return (
            f"{cls.__name__} has the option {name!r}, but as its first argument or as one of *args: the arguments of a "
            "client's __init__ begin with encoder, num_classes, then *, then its own options"
        )
    if name in options:
        return f"{cls.__name__} has the option {name!r}, which the parser does not find: declare its type in __init__"
    if name in OF_DATASETS and issubclass(cls, datamodules.FederatedDataModule):
        return (
            f"{name} is an option of torchvision's data sets, which FromDatasets takes: data: {{class_path: "
            "FromDatasets, init_args: {train: {class_path: torchvision.datasets.ImageFolder, init_args: {...}}}}; "
            "augment changes training batches"
        )
    near = nearest_argument(name, options - {name}, short.partition(": ")[0]) or nearest(name, ["init_args"])
    return f"{_meant(near)}options of {cls.__name__}: {', '.join(sorted(options))}" if options else ""


def _class_of_value(text: str) -> str:
    """The class of the value that a message ends with, wherever its ``class_path`` stands; empty if it has none."""
    value = re.match(r"\.? Got value: \w*(?=[({])", text)
    depth = 0
    for token in re.finditer(r"[({\[]|[)}\]]|'?class_path'?[=:] ?'([\w.]+)'", text[value.end() :] if value else ""):
        if token[1] and depth == 1:
            return token[1]
        if not token[1]:
            depth += 1 if token[0] in "({[" else -1
    return ""


def _arguments(cls: type) -> set[str]:
    """Arguments of a class, as far as each of its bases passes options on to the next."""
    options: set[str] = set()
    packages = {"pfl_lightning", cls.__module__.partition(".")[0]}
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base) or base.__module__.partition(".")[0] not in packages:
            continue
        parameters = inspect.signature(base).parameters.values()
        options |= {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return options - {"encoder", "num_classes", "input_shape", "params"}  # given by the federation


def _choice(short: str) -> str | None:
    found = re.search(r"expected one of \[(.*)\].*, got (\S+)$", short)
    if not found:
        return None
    return _meant(nearest(found[2], re.findall(r"'([^']+)'", found[1]))).strip()


def _attribute(short: str) -> str | None:
    """A name that a module does not have: of another package, or one of the user's own."""
    found = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", short)
    named = short.partition(": ")[0] in known_names()
    if not found or (named and found[1].startswith("pfl_lightning")):
        return None
    names = [name for name in dir(pkgutil.resolve_name(found[1])) if not name.startswith("_")]
    near = nearest(found[2], names)
    if named and not near:
        return None
    return _meant(f"{found[1]}.{near}" if near else "").strip()


def _file(short: str) -> str | None:
    found = re.search(r"File does not exist: '?([^']+?)'?$", short)
    if not found:
        return None
    path = Path(found[1])
    there = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, there)
    return _meant(str(path.parent / near) if near else "").strip()


def _class(short: str) -> str:
    """Known names for the option that the error is about."""
    asked = re.search(r"([\w.]+)\.help: ", short)
    option = asked[1] if asked else short.partition(": ")[0]
    if lacks := re.search(r"the following arguments are required: (\w+)$", short):
        option = f"{option}.{lacks[1]}"
    kind, names = known_names().get(option, lambda: ("", ()))()
    given = re.search(r"(?:got|string:|has no attribute|Got value:) '?([\w.]+)'?", short)
    lasts = {name.rpartition(".")[2]: name for name in names}
    near = lasts.get(nearest(given[1].rpartition(".")[2], lasts), "") if given else ""
    if asked and given and near == given[1]:
        return f"{near!r} is an encoder whose options are set; a class, such as ResNet18, lists its own"
    if "No module named '" in short:
        return "modules are found in the folder where pfl runs, and among the installed packages"
    if option == "trainer.callbacks":  # there are too many to list
        return _meant(near).strip()
    return f"{_meant(near)}known {kind}: {', '.join(names)}" if names else ""


def _subclasses(module: Any, base: type) -> list[str]:
    classes = {name: getattr(module, name) for name in module.__all__ if inspect.isclass(getattr(module, name))}
    bases = {base, datamodules.PartitionTransform}  # which users write subclasses of
    return [
        name
        for name, cls in classes.items()
        if issubclass(cls, base) and cls not in bases and not inspect.isabstract(cls)
    ]


def _callbacks() -> list[str]:
    from lightning.pytorch import Callback

    waiting, found = [Callback], []
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        found.append(cls.__name__)
    return found


def _optimizers() -> list[str]:
    from torch import optim

    return [
        f"torch.optim.{name}" for name in optim.__all__ if inspect.isclass(getattr(optim, name)) and name != "Optimizer"
    ]


def _loggers() -> list[str]:
    from lightning.pytorch import loggers

    return [name for name in loggers.__all__ if name != "Logger"]


def known_names() -> Mapping[str, Callable[[], tuple[str, Sequence[str]]]]:
    """What can be named for an option, and the names."""
    partitions = lambda: ("partitions", _subclasses(datamodules, datamodules.Partitioner))  # noqa: E731
    return {
        "model.method": lambda: ("methods", [cls.__name__ for cls in (*methods.METHODS, *methods.ADAPTER_METHODS)]),
        "model.method.objective": lambda: ("objectives", _subclasses(self_supervised, self_supervised.Objective)),
        "model.method.partner": lambda: ("encoders", encoder_names()),
        "model.method.optimizer": lambda: ("optimizers", _optimizers()),
        "model.encoder": lambda: ("encoders", encoder_names()),
        "model.engine": lambda: ("engines", _subclasses(engines, engines.Engine)),
        "data.partition": partitions,
        "partition": partitions,
        "data": lambda: ("data modules", _subclasses(datamodules, datamodules.FederatedDataModule)),
        "trainer.callbacks": lambda: ("callbacks", _callbacks()),
        "trainer.logger": lambda: ("loggers", _loggers()),
    }
