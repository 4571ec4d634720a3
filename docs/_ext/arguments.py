"""Constructor arguments of a class, with type, default and meaning, read from its signature and docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Argument", "constructor_arguments", "documented_arguments"]


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        name: Name of the argument.
        type: Annotation, as it stands in the code.
        default: Default, as Python writes it; ``None`` if the argument must be given.
        meaning: Text of the docstring's ``Args`` section; empty if there is none.
        owner: Class whose ``__init__`` declares the argument.
    """

    name: str
    type: str
    default: str | None
    meaning: str
    owner: type


def constructor_arguments(cls: type) -> list[Argument]:
    """Arguments that a class takes, those that it passes on to its bases by ``**options`` included.

    Args:
        cls: The class.

    Returns:
        The arguments in the order of the signatures, a class before its bases.
    """
    found: dict[str, Argument] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or owner is object:
            continue
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, _argument(cls, owner, parameter))
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(found.values())


def _argument(cls: type, owner: type, parameter: inspect.Parameter) -> Argument:
    return Argument(
        name=parameter.name,
        type="" if parameter.annotation is parameter.empty else _type_name(parameter.annotation),
        default=None if parameter.default is parameter.empty else _default_name(parameter.default),
        meaning=_meaning(cls, owner, parameter.name),
        owner=owner,
    )


def _meaning(cls: type, owner: type, name: str) -> str:
    """Text of the class itself, of the class that declares the argument, or of that one's bases, in this order."""
    for one in (cls, *owner.__mro__):
        text = documented_arguments(one).get(name)
        if text is not None:
            return text
    return ""


def documented_arguments(cls: type) -> dict[str, str]:
    """Texts of a class's own docstring (Google style), by argument.

    They stand in its ``Args`` section or, in a dataclass, whose fields are its arguments, below ``Attributes``.
    """
    title = "Attributes" if dataclasses.is_dataclass(cls) else "Args"
    return dict(_entries(inspect.cleandoc(vars(cls).get("__doc__") or ""), title))


def _entries(docstring: str, title: str) -> Iterator[tuple[str, str]]:
    section = re.search(rf"^{title}:\n((?: .*\n|\n)*)", docstring + "\n", flags=re.MULTILINE)
    if section is None:
        return
    lines = inspect.cleandoc("\n" + section.group(1))
    for entry in re.split(r"\n(?=\S)", lines):
        name, colon, text = entry.partition(":")
        if colon:
            yield name.split("(")[0].strip(), " ".join(text.split())


def _type_name(annotation: object) -> str:
    if not isinstance(annotation, str):
        annotation = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotation)  # nn.Module -> Module


def _default_name(default: object) -> str:
    if inspect.isclass(default) or inspect.isroutine(default):
        return default.__name__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))
