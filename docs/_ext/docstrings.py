"""Sphinx extension: docstrings as this package writes them, and their cross-references.

A reference may name what the API reference describes under another path, or not at all.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any

from docutils import nodes
from plaintext import escaped_lines
from reference import documented_names
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

__all__ = ["setup"]

LOOKED_IN = (
    "torch",
    "torch.nn",
    "matplotlib.figure",
    "pfl_lightning.datamodules.counting",
    "pfl_lightning.client",
    "pfl_lightning.options",
)
"""Modules of names that annotations use without a path."""


@functools.cache
def _public_paths() -> dict[int, str]:
    found: dict[int, str] = {}
    for module, names in documented_names().items():
        for name, path in names.items():
            found[id(getattr(importlib.import_module(module), name))] = path
    return found


@functools.cache
def _import(path: str) -> Any:
    """Value of a dotted path; ``None`` if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            if inspect.isclass(value) and name in inspect.get_annotations(value):
                return value  # a field of a dataclass, which is described with its class
            value = getattr(value, name, None)
        return value
    return None


def _find(target: str, node: pending_xref) -> Any:
    """What a reference names: by its path, beside the class or module that it stands in, or among the builtins."""
    places = [node.get("py:class"), node.get("py:module"), *LOOKED_IN, "builtins"]
    module = node.get("py:module")
    if module and node.get("py:class"):
        places.insert(0, f"{module}.{node['py:class']}")
    paths = [target, *(f"{place}.{target}" for place in places if place)]
    found = next((value for value in map(_import, paths) if value is not None), None)
    if found is None and node.get("reftype") == "class":  # in a signature: a type that the method's own module names
        own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "pfl_lightning"]
        found = next((vars(module)[target] for module in own if target in vars(module)), None)
    return found


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Link to where a name is described; plain text for a name that exists and is described nowhere here.

    A reference to a name that does not exist stays unresolved, which ``nitpicky`` reports.
    """
    if node.get("refdomain") != "py":
        return None
    value = _find(node["reftarget"].partition("[")[0], node)
    if value is None:
        return None
    path = _public_paths().get(id(value))
    if path is not None:
        domain = env.get_domain("py")
        found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)
        if found is not None:
            return found
    return contnode


def _plain_attribute(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading ``Text: more text`` of an attribute as its type: it looks at the first line alone."""
    if what in ("attribute", "data", "property") and lines:
        lines[:0] = ["..", ""]  # an empty comment


def _escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = escaped_lines(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-docstring", _plain_attribute, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _escape, priority=900)  # after napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
