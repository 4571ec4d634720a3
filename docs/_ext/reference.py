"""The API reference: one page for every public module, generated from its public names."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from types import ModuleType

from plaintext import escape_formulas

__all__ = ["GROUPS", "MODULES", "documented_names", "public_names", "reference_pages"]

MODULES = {
    "pfl_lightning": "Federations, clients, servers",
    "pfl_lightning.methods": "Methods",
    "pfl_lightning.callbacks": "Callbacks",
    "pfl_lightning.datamodules": "Data modules",
    "pfl_lightning.engines": "Engines",
    "pfl_lightning.encoders": "Encoders",
    "pfl_lightning.functional": "Functions on tensors",
    "pfl_lightning.self_supervised": "Self-supervised objectives",
    "pfl_lightning.client": "Client",
    "pfl_lightning.client.declarations": "Shared parts and loss terms",
    "pfl_lightning.federation.own_models": "Federation: clients' own models",
    "pfl_lightning.federation.predictions": "Federation: predictions",
    "pfl_lightning.federation.saved_state": "Federation: checkpoints",
    "pfl_lightning.server": "Server",
    "pfl_lightning.messages": "Messages",
    "pfl_lightning.phases": "Phases of a local fit",
    "pfl_lightning.federation.personalization": "Personalization",
    "pfl_lightning.data": "Protocols of the data",
    "pfl_lightning.fit.data": "Data of a local fit",
    "pfl_lightning.fit.public": "Public samples",
    "pfl_lightning.metrics": "Metrics",
    "pfl_lightning.seeding": "Seeds",
    "pfl_lightning.errors": "Errors",
    "pfl_lightning.state.client_states": "Stores of clients' states",
    "pfl_lightning.state.tensors": "Named tensors",
    "pfl_lightning.state.checkpoints": "Checkpoints",
    "pfl_lightning.report": "Reports of finished runs",
    "pfl_lightning.cli": "Command line",
}
"""Modules of the reference and their titles. A name is described in the first of them that offers it."""

GROUPS = {
    "pfl_lightning.datamodules.partition": "Partitions",
    "pfl_lightning.datamodules.augmentation": "Augmentations",
    "pfl_lightning.datamodules.clients": "Data of one client",
    "pfl_lightning.callbacks.inspection": "Inspection callbacks",
}
"""Packages whose public names have a page of their own; a name keeps the path under which users import it."""


def public_names(module: ModuleType) -> list[str]:
    """Public names of a module: ``__all__``, or what it defines without a leading underscore."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return list(declared)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return [name for name in own if not name.startswith("_")]


@functools.cache
def documented_names() -> Mapping[str, Mapping[str, str]]:
    """Path under which each public name is described, by module and name."""
    paths: dict[int, str] = {}
    found: dict[str, dict[str, str]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        found[module_name] = {}
        for name in sorted(public_names(module), key=str.lower):
            value, path = getattr(module, name), f"{module_name}.{name}"
            if inspect.ismodule(value):
                continue
            if inspect.isclass(value) or inspect.isroutine(value):
                path = paths.setdefault(id(value), path)
            found[module_name][name] = path
    return found


def reference_pages() -> dict[str, str]:
    """Markdown of the pages, by file name."""
    pages: dict[str, dict[str, object]] = {name: {} for name in MODULES | GROUPS}
    links: dict[str, list[str]] = {name: [] for name in MODULES}
    for module_name, names in documented_names().items():
        module = importlib.import_module(module_name)
        for name, path in names.items():
            if path != f"{module_name}.{name}":
                links[module_name].append(path)
                continue
            value = getattr(module, name)
            home = getattr(value, "__module__", "") or ""
            page = next((group for group in GROUPS if f"{home}.".startswith(f"{group}.")), module_name)
            pages[page][path] = value
    written = [name for name in pages if pages[name] or links.get(name)]
    index = {"reference/index.md": _index(written)}
    return index | {f"reference/{name}.md": _page(name, pages[name], links.get(name, [])) for name in written}


def _index(written: list[str]) -> str:
    order = sorted(written, key=lambda name: (name.count("."), list(MODULES | GROUPS).index(name)))
    rows = "\n".join(f"| [`{name}`]({name}.md) | {(MODULES | GROUPS)[name]} |" for name in order)
    tree = "\n".join(order)
    return (
        "# API reference\n\n"
        "Generated from the docstrings. A class or function that several modules offer is described once.\n\n"
        f"| module | content |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    )


def _page(name: str, own: dict[str, object], links: list[str]) -> str:
    text = inspect.cleandoc(importlib.import_module(name).__doc__ or "")
    directive = f".. py:currentmodule:: {name.rpartition('.')[0]}" if name in GROUPS else f".. py:module:: {name}"
    parts = [f"# {(MODULES | GROUPS)[name]}\n", f"`{name}`\n", _rst(f"{directive}\n\n{text}")]
    classes = [path for path, value in own.items() if inspect.isclass(value)]
    functions = [path for path, value in own.items() if inspect.isroutine(value)]
    values = [path for path in own if path not in classes and path not in functions]
    if len(own) > 1:
        rows = "\n".join(f"   * - :obj:`~{path}`\n     - {_summary(own[path])}" for path in classes + functions)
        parts.append(_rst(f".. list-table::\n   :widths: 30 70\n\n{rows}"))
    parts += [_rst(f".. autoclass:: {path}") for path in classes]
    parts += [_rst(f".. autofunction:: {path}") for path in functions]
    parts += [_rst(f".. autodata:: {path}\n   :no-value:") for path in values]
    if links:
        names = ", ".join(f":obj:`~{path}`" for path in links)
        parts.append(_rst(f"Offered here, too, and described elsewhere: {names}."))
    return "\n".join(parts)


def _summary(value: object) -> str:
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    plain = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", first)  # a reference is resolved in its class, not in a table
    return escape_formulas(" ".join(plain.split()))


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```\n"
