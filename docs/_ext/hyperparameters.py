"""The page of hyper-parameters: every argument of every method, partition, augmentation and data module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from arguments import Argument, constructor_arguments
from plaintext import escape_formulas

from pfl_lightning import FederatedClient, datamodules
from pfl_lightning.methods import ADAPTER_METHODS, METHODS

__all__ = ["classes_of", "hyperparameters_page"]

GIVEN = {"encoder", "num_classes"}  # by the federation, not by the user
HEAD = """# Hyper-parameters

This page is generated from the code: names, types and defaults come from the constructors, meanings from their
docstrings. A method's arguments stand in a config below `model.method.init_args`, and are options of the command line
(`--model.method.init_args.lr 0.02`). A partition's stand below `data.init_args.partition.init_args`.

"""


def classes_of(base: type) -> list[type]:
    """Public, concrete classes of the data package below a base, in the order of their names."""
    found = (getattr(datamodules, name) for name in datamodules.__all__)
    return [one for one in found if inspect.isclass(one) and issubclass(one, base) and not inspect.isabstract(one)]


def hyperparameters_page() -> str:
    """Markdown of the page."""
    parts = [HEAD, "## Methods\n", "### Arguments of every method\n", _table(constructor_arguments(FederatedClient))]
    parts += [_method(method) for method in (*METHODS, *ADAPTER_METHODS)]
    parts += ["## Partitions\n", *(_class(one) for one in classes_of(datamodules.Partitioner))]
    parts += ["## Augmentations\n", *(_class(one) for one in classes_of(datamodules.Augmentation))]
    base = datamodules.FederatedDataModule
    parts += ["## Data modules\n", "### Arguments of every data module\n", _table(constructor_arguments(base))]
    parts += [_class(one, base) for one in classes_of(base)]
    return "\n".join(parts)


def _method(method: type[FederatedClient]) -> str:
    citation = method.citation
    paper = ""
    if citation is not None:
        paper = f"{citation.authors} {citation.title}. {citation.venue} {citation.year}.\n"
    return _class(method, FederatedClient, paper)


def _class(cls: type, base: type | None = None, note: str = "") -> str:
    """Section of a class: what it declares as a table, what it takes over from ``base`` as a line."""
    arguments = [one for one in constructor_arguments(cls) if one.name not in GIVEN or base is not FederatedClient]
    own = [one for one in arguments if one.owner is not base]
    inherited = [one for one in arguments if one.owner is base]
    first = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    parts = [f"### {cls.__name__}\n", _rst(escape_formulas(first)), note]
    if own:
        parts.append(_table(own))
    if inherited:
        kind = "method" if base is FederatedClient else "data module"
        values = ", ".join(f"`{one.name}` = `{one.default}`" for one in inherited if one.default is not None)
        parts.append(f"As in every {kind}: {values}.\n")
    parts.append(_rst(f"Reference: :class:`~{_path(cls)}`"))
    return "\n".join(part for part in parts if part)


def _path(cls: type) -> str:
    package = "methods" if issubclass(cls, FederatedClient) else "datamodules"
    return f"pfl_lightning.{package}.{cls.__name__}"


def _table(arguments: Sequence[Argument]) -> str:
    rows = [("argument", "type", "default", "meaning")]
    for one in arguments:
        default = "required" if one.default is None else f"``{one.default}``"
        rows.append((f"``{one.name}``", f"``{one.type}``", default, escape_formulas(one.meaning)))
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 18 20 14 48", ""]
    for row in rows:
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}" for place, cell in enumerate(row)]
    return _rst("\n".join(lines))


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n.. py:currentmodule:: pfl_lightning.datamodules\n\n{text}\n```\n"
