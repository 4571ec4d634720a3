"""Prints every message of the package, so that all of them can be read in one go.

A message is a string of five words or more that is not a docstring: an error, a warning, a note, a help text. What is
filled in is in braces.

usage: python benchmarks/messages.py > messages.txt
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pfl_lightning

ROOT = Path(pfl_lightning.__file__).resolve().parent
FOLDERS = (ROOT, ROOT.parent / "callbacks", ROOT.parent / "datamodules")
LEAST_WORDS = 5


def text(node: ast.AST) -> str | None:
    """The words of a string, an f-string, or a sum of both; ``None`` for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else None for part in node.values)
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{name}}}"
            for part, name in zip(node.values, parts, strict=True)
        )
    return None


def docstrings(tree: ast.AST) -> set[int]:
    """The nodes that document a module, class, function or attribute."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each message of a file."""
    tree = ast.parse(path.read_text())
    skipped = docstrings(tree)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        found = None if id(node) in skipped else text(node)
        if isinstance(node, ast.Constant) and id(node) in inside:
            continue
        if found is not None and len(found.split()) >= LEAST_WORDS:
            yield node.lineno, " ".join(found.split())


def main() -> None:
    """Print the messages by file."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            if path.is_relative_to(folder) and not any(part in path.parts for part in ("__pycache__",)):
                found = sorted(messages(path))
                if found:
                    print(f"\n{path.relative_to(ROOT.parent)}")
                for line, said in found:
                    print(f"{line:5}  {said}")


if __name__ == "__main__":
    main()
