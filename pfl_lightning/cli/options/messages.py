"""Messages of jsonargparse about a wrong value, shortened to a line."""

from __future__ import annotations

import re

__all__ = ["clip", "shorten"]

_KEY, _UNION = 'Parser key "', "Does not validate against any of the Union subtypes"
_FRAME = (
    *(_KEY, _UNION, "Subtypes:", "Errors:", "Problem with given class_path", "Given value type:"),
    *("Subclass types expect", "a class path (str)", "a dict with class_path", "a dict without class_path"),
    "a dict with parameters accepted by the base class",
)
_TYPE = re.compile(r"Expected an? (?P<type>.+?)(?:\. Got value:(?: (?P<value>.*))?)?")
_CLASS = re.compile(r"dot import path string: (?P<value>.*)|path but (?P<path>.*) either .*")
_INTERNAL = re.compile(r"\.? Got value: (?:Namespace|NestedArg)\(.*", re.DOTALL)
_LONGEST_VALUE, _LONGEST_WORD = 120, 300
# What Python says of a list, a number or a text where the parser looks into a mapping.
_NO_SPEC = re.compile(r"unhashable type: .*|argument of type .* is not iterable|'\w+' object has no attribute '\w+'")
_NO_MAPPING = re.compile(r"functools\.partial\(.* argument after \*\* must be a mapping, not \w+")
_MAPPING = "init_args must be a mapping of options"
_WITHIN = re.compile(r"(?:NestedArg|Namespace)\(.*\bval='?(?P<value>.*?)'?\)")


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
        return clip(_NO_MAPPING.sub(_MAPPING, _INTERNAL.sub("", plain)))
    complaints: list[tuple[int, str]] = []
    given = ""
    for line in message.splitlines():
        text = line.lstrip(" -").rstrip()
        if text.startswith("Given value: "):
            given = given or text.removeprefix("Given value: ")
        elif text and not text.startswith(_FRAME):
            complaints.append((len(line) - len(line.lstrip(" -")), text))
    if not complaints:
        return message
    deepest = max(depth for depth, _ in complaints)
    said = _joined([text for depth, text in complaints if depth == deepest], given)
    return clip(": ".join(filter(None, (".".join(re.findall(r'Parser key "([\w.]+)":', message)), said))))


def clip(message: str) -> str:
    """A message without the middle of words longer than a path.

    Args:
        message: A message.
    """
    return re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][:60]} ... {word[0][-20:]}", message)


def _plain(text: str) -> str:
    """Without the parser's own objects, and with the names of classes alone."""
    text = re.sub(r"'\w+' object has no attribute 'keys'", _MAPPING, text)
    text = _NO_SPEC.sub("class_path must be an import path, and init_args a mapping of options", text)
    text = text.replace('in "<unicode string>", line', "in line")
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", _INTERNAL.sub("", text))
    return re.sub(rf"( Got value: .{{{_LONGEST_VALUE}}}).+", r"\1 ...", text)


def _joined(complaints: list[str], given: str) -> str:
    """Reports about more than a type; if there are none, all expected types."""
    types = [_TYPE.fullmatch(text) for text in complaints]
    others = [text for text, found in zip(complaints, types, strict=True) if found is None]
    if others:
        said = (re.sub(r"^Type .* expects a function or a callable class: ", "", text) for text in others)
        plain = list(dict.fromkeys(_plain(text).replace("..", ".") for text in said))
        # "No subclass" is said without the value, too; and where Python says it, nothing says of what.
        plain = [text for text in plain if not any(other != text and other.startswith(text) for other in plain)]
        made = re.search(r"class_path='(?:\w+\.)*(\w+)'", given)
        where = f"{made[1]} cannot be made of its options: " if made and " not supported between " in plain[0] else ""
        return where + "; ".join(plain)
    found = [match for match in types if match is not None]
    expected = dict.fromkeys(_type_name(match["type"]) for match in found)
    return f"expected {' or '.join(expected)}, got {_value(given, found)}"


def _type_name(name: str) -> str:
    if _CLASS.fullmatch(name):
        return "a class"
    name = name.replace("<class 'NoneType'>", "null").replace("typing.Literal", "one of ")
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", name)


def _value(given: str, types: list[re.Match[str]]) -> str:
    """The given value, from whichever report has it, if it is long its beginning."""
    value = _whole_value(given, types).partition(". Got value: ")[0]
    if value.startswith("Namespace("):
        return "a mapping"
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]} ..."


def _whole_value(given: str, types: list[re.Match[str]]) -> str:
    classes = [match for match in (_CLASS.fullmatch(match["type"]) for match in types) if match]
    named = [match["value"] for match in types if "NoneType" not in match["type"]]
    named += [match["value"] or match["path"] for match in classes]
    objects = ("NestedArg(", "Namespace(")
    readable = [value for value in (*named, given) if value and not value.startswith(objects)]
    if readable:
        return readable[0]
    known = next((value for value in named if value), given)
    within = _WITHIN.fullmatch(known)
    return within["value"] if within else known
