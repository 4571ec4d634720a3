"""Docstrings write formulas in plain text; their ``|`` and ``*`` are no marks of reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["escape_formulas", "escaped_lines"]

_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_MARKS = re.compile(r"\||(?<![*\\])\*(?!\*)")


def escape_formulas(text: str) -> str:
    r"""Escape ``|`` and single ``*`` outside of code.

    >>> print(escape_formulas("|x| of ``a | b``, (N, *shape)"))
    \|x\| of ``a | b``, (N, \*shape)
    """
    pieces = _CODE.split(text)
    return "".join(p if place % 2 else _MARKS.sub(lambda m: "\\" + m.group(), p) for place, p in enumerate(pieces))


def escaped_lines(lines: Iterable[str]) -> Iterator[str]:
    """Escape the formulas of a docstring; examples and literal blocks stay as they are."""
    literal: int | None = None  # indentation of the line that began a literal block
    example = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            example = example or line.lstrip().startswith(">>>")
            if literal is not None and indent <= literal:
                literal = None
        else:
            example = False
        yield line if example or literal is not None or line.lstrip().startswith("..") else escape_formulas(line)
        if literal is None and line.rstrip().endswith("::"):
            literal = indent
