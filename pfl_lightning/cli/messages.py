"""What is said of a mistaken command line: a line about the option, and what was meant or may be given."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pfl_lightning.cli.names import known_names, nearest_option
from pfl_lightning.names import nearest

__all__ = ["clip", "explain", "shorten"]

_KEY, _UNION = 'Parser key "', "Does not validate against any of the Union subtypes"
_FRAME = (
    *(_KEY, _UNION, "Subtypes:", "Errors:", "Problem with given class_path", "Given value", "Subclass types expect"),
    *("a class path (str)", "a dict with class_path", "a dict without class_path", "a dict with parameters accepted"),
)
"""How lines begin in which the parser says where it is, and not what is wrong."""

_LONGEST_VALUE, _LONGEST_WORD = 120, 300
_MAPPING = "init_args must be a mapping of options"
_ANYWHERE = {
    r"(?s)\.? Got value: (?:Namespace|NestedArg)\(.*": "",
    r"functools\.partial\(.* argument after \*\* must be a mapping, not \w+": _MAPPING,
}
_PLAINLY = {
    **_ANYWHERE,
    r"^Type .* expects a function or a callable class: ": "",
    r"'\w+' object has no attribute 'keys'": _MAPPING,
    # What Python says of a list, a number or a text where the parser looks into a mapping.
    r"unhashable type: .*|argument of type .* is not iterable|'\w+' object has no attribute '\w+'": (
        "class_path must be an import path, and init_args a mapping of options"
    ),
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
    r'in "<unicode string>", line': "in line",
    rf"( Got value: .{{{_LONGEST_VALUE}}}).+": r"\1 ...",
}
"""Words of the parser and of Python, and what is said in their place."""


_TYPES = {
    r"dot import path string.*|path but .* either .*": "a class",
    r"<class 'NoneType'>": "null",
    r"typing\.Literal": "one of ",
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
}
"""The same of what was expected."""


def shorten(message: str) -> str:
    """Path of the option and its error; messages of one line, and of other origin, as they are.

    For an option of several types, or of an object that may be null, jsonargparse reports for each type why the value
    does not fit, and repeats the value. The most deeply nested reports are kept: they are about the type that was
    meant.

    Args:
        message: A message.
    """
    if "\n" not in message or not (_KEY in message or _UNION in message):
        plain = re.sub(rf'^{_KEY}([\w.]+)":\s*', r"\1: ", message)
        return clip(_plain(plain, _ANYWHERE))
    lines = [(len(line) - len(line.lstrip(" -")), line.lstrip(" -").rstrip()) for line in message.splitlines()]
    reports = [(depth, text) for depth, text in lines if text and not text.startswith(_FRAME)]
    if not reports:
        return message
    deepest = [text for depth, text in reports if depth == max(reports)[0]]
    others = [text for text in deepest if not re.match("Expected an? ", text)]
    said = _others(others, message) if others else _types(deepest, message)
    return clip(": ".join(filter(None, (".".join(re.findall(rf'{_KEY}([\w.]+)":', message)), said))))


def clip(message: str) -> str:
    """A message without the middle of words longer than a path.

    Args:
        message: A message.
    """
    return re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][:60]} ... {word[0][-20:]}", message)


def _plain(text: str, words: Mapping[str, str] = _PLAINLY) -> str:
    for wrong, plain in words.items():
        text = re.sub(wrong, plain, text)
    return text


def _others(reports: list[str], message: str) -> str:
    """Reports about more than a type."""
    plain = list(dict.fromkeys(_plain(text).replace("..", ".") for text in reports))
    # "No subclass" is said without the value, too; and where Python says it, nothing says of what.
    plain = [text for text in plain if not any(other != text and other.startswith(text) for other in plain)]
    made = re.search(r"Given value: .*class_path='(?:\w+\.)*(\w+)'", message)
    where = f"{made[1]} cannot be made of its options: " if made and " not supported between " in plain[0] else ""
    return where + "; ".join(plain)


def _types(reports: list[str], message: str) -> str:
    """All types that would do, and the given value."""
    expected = [_plain(re.sub(r"^Expected an? ", "", text).partition(". Got value: ")[0], _TYPES) for text in reports]
    values = (r"dot import path string: (.*)", r"path but (.*) either", r"Got value: (.*)", r"Given value: (.*)")
    found = [value for pattern in values for value in re.findall(pattern, "\n".join((*reports, message)))]
    value = next((one for one in found if not one.startswith(("NestedArg(", "Namespace("))), (found or [""])[0])
    value = re.sub(r"^NestedArg\(.*?\bval='?(.*?)'?\)$", r"\1", value).partition(". Got value: ")[0]
    value = "a mapping" if value.startswith("Namespace(") else value
    value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]} ..."
    return f"expected {' or '.join(dict.fromkeys(expected))}, got {value}"


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
    return "\n".join(filter(None, (_without_types(short), _hint(message, short, options, command).strip())))


def _without_types(short: str) -> str:
    """A message about a name that stands for nothing: that there is none, in the place of the types that would do."""
    found = re.fullmatch(r"([\w.]+): expected a class(?: or null)?, got ([A-Za-z_]\w*)", short)
    kind, _ = known_names(found[1]) if found else ("", [])
    return f"{found[1]}: there is no {kind.removesuffix('s')} {found[2]}" if found and kind else short


def _meant(*names: str) -> str:
    return f"did you mean {' or '.join(map(repr, names))}? " if any(names) else ""


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
    if found := re.search(r"File does not exist: '?([^']+?)'?$", short):
        path = Path(found[1])
        near = nearest(path.name, sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else [])
        return _meant(str(path.parent / near) if near else "")
    return _name(short)


def _class_before(message: str, found: re.Match[str]) -> str:
    """Import path of the class whose option a report is about: named before it, or in the value behind it."""
    if before := re.search(r"class_path '([\w.]+)':\s*$", message[: found.start()]):
        return before[1]
    value, inner = message[found.end() :], ""
    while value != inner:  # what stands within the value has classes of its own
        value, inner = re.sub(r"(?<!value)[=:] ?\w*[({\[][^(){}\[\]]*[)}\]]", "", value), value
    own = re.search(r"class_path'?[=:] ?'([\w.]+)'", value)
    return own[1] if own else ""


def _option_of_class(name: str, path: str, option: str) -> str:
    """What is meant by an option that a class does not have, and which it has."""
    if not path:
        return ""
    if name == "class_path":  # beside which the options of the class stand
        return "the options of a class stand below init_args: {class_path: NAME, init_args: {lr: 0.1}}"
    cls = pkgutil.resolve_name(path)
    options = _arguments(cls)
    if name in options:
        return (
            f"{cls.__name__} has the option {name!r}, which the parser does not find: declare it with its type in "
            "__init__, in a client after encoder, num_classes and *"
        )
    near = nearest_option(name, (f"{option}.{one}" for one in (*options, "init_args")), below=option)
    return f"{_meant(near)}options of {cls.__name__}: {', '.join(sorted(options))}" if options else ""


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


def _name(short: str) -> str:
    """Known names for the option that the error is about."""
    asked = re.search(r"([\w.]+)\.help: ", short)
    option = asked[1] if asked else short.partition(": ")[0]
    if lacks := re.search(r"the following arguments are required: (\w+)$", short):
        option = f"{option}.{lacks[1]}"
    kind, names = known_names(option)
    given = re.search(r"(?:got|string:|has no attribute|Got value:) '?([\w.]+)'?", short)
    found = re.search(r"module '([\w.]+)' has no attribute '", short)
    other = found[1] if found and not found[1].startswith("pfl_lightning") else ""  # a package, or the user's own
    there = [f"{other}.{name}" for name in dir(pkgutil.resolve_name(other)) if name[0] != "_"] if other else []
    lasts = {name.rpartition(".")[2]: name for name in (*names, *there)}
    near = lasts.get(nearest(given[1].rpartition(".")[2], lasts), "") if given else ""
    if asked and given and near == given[1]:
        return f"{near!r} is an encoder whose options are set; a class, such as ResNet18, lists its own"
    if "No module named '" in short:
        return "modules are found in the folder where pfl runs, and among the installed packages"
    too_many = option == "trainer.callbacks" or (near and other)
    return f"{_meant(near)}known {kind}: {', '.join(names)}" if kind and not too_many else _meant(near)
