"""Sphinx extension: what each field of a method's updates tells of a client, on the method's page."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from sphinx.application import Sphinx
from torch import nn

from pfl_lightning import methods
from pfl_lightning.client import FederatedClient
from pfl_lightning.messages import ClientUpdate, FieldSchema
from pfl_lightning.server import Aggregator

__all__ = ["COLUMNS", "SHOWS", "described_server", "leakage_section", "leakage_table", "setup"]

COLUMNS = ("class counts", "label presence", "class means", "features of single samples")
ONE, FEW = "of a class with one sample", "can be inferred where samples are few"
SHOWS: dict[str, tuple[str, str, str, str]] = {
    "weights": ("", "can be inferred, from the head", "", FEW),
    "encoder weights": ("", "", "", FEW),
    "class counts": ("yes", "yes", "", ""),
    "label presence": ("", "yes", "", ""),
    "class means": ("", "yes", "yes", ONE),
    "class sums": ("can be inferred", "yes", "yes, times counts", ONE),
    "class covariances": ("", "yes", "", "of a class with two samples, with its mean"),
    "class scores": ("", "yes", "", "scores, of a class with one sample"),
    "feature mean": ("", "", "", "of a client with one sample"),
    "feature variance": ("", "", "", ""),
    "feature products": ("", "", "", "of a client with one sample"),
    "public scores": ("", "can be inferred", "", ""),
    "amount of work": ("", "", "", ""),
    "quality of fit": ("", "", "", ""),
    "choice": ("", "", "", ""),
}
"""What each kind of content shows, by column; empty for nothing that is known."""

NOTE = """Generated from the declarations of the fields, for the method's default options and without
[privacy](../privacy.md). The number of samples comes with every update. "Can be inferred" is what attacks on updates
are known to recover; an empty cell promises nothing.
"""


class _Adapted(nn.Module):
    """Stands for a network with low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.out_features = 8

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.lora_B(self.lora_A(inputs))
        return features


def described_server(method: type[FederatedClient]) -> Aggregator:
    """A server of the method with its default options."""
    encoder: Any = _Adapted() if method in methods.ADAPTER_METHODS else nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    encoder.out_features = 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of this encoder
        client: Any = method(encoder, 5)
    server: Aggregator = client.configure_aggregator(3)
    return server


def leakage_table(method: type[FederatedClient]) -> list[tuple[str, ...]]:
    """Rows of the table: field, content, and what it shows by column; none where nothing is sent."""
    server = described_server(method)
    rows = []
    for name, content, schema in _declared(type(server).update_class):
        kind = str(schema.tells)
        if name == "weights":
            if not server.expected_weights:
                continue
            kind = kind if any("head" in own for own in server.expected_weights) else "encoder weights"
        content += "" if schema.when is None or getattr(server, schema.when) else " (not with the default options)"
        rows.append((f"`{name}`", content, *SHOWS[kind]))
    return rows


def _declared(update: type[ClientUpdate]) -> Iterator[tuple[str, str, FieldSchema]]:
    """Fields by name, with the first sentence of what their class says of them, and their declaration."""
    for declared in fields(update):
        if "schema" in declared.metadata:
            owner = next(cls for cls in update.__mro__ if declared.name in vars(cls).get("__annotations__", {}))
            said = re.search(rf"\n    {declared.name}: (.*?)(?=\n    \w+: |\Z)", inspect.getdoc(owner) or "", re.DOTALL)
            first = "" if said is None else re.split(r"[.;:]\s|[.]$|, \(", " ".join(said[1].split()))[0]
            yield declared.name, first.replace("|", r"\|"), declared.metadata["schema"]


def leakage_section(page: str) -> str:
    """The section of a method's page; methods of one table share it.

    Args:
        page: Markdown of the page, which begins with the classes that it describes.
    """
    found: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name in re.findall(r"\n\n`pfl_lightning\.methods\.(\w+)`", page):
        found.setdefault(tuple(leakage_table(getattr(methods, name))), []).append(name)
    parts = ["\n\n## What updates tell\n"]
    for rows, names in found.items():
        parts += [f"{', '.join(names)}:\n"] if len(found) > 1 else []
        if not rows:
            parts.append("Clients send nothing.\n")
            continue
        lines = [("field", "content", *COLUMNS), ("---",) * (2 + len(COLUMNS)), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return "\n".join([*parts, NOTE]) if found else ""


def _append(app: Sphinx, name: str, source: list[str]) -> None:
    if name.startswith("methods/"):
        source[0] += leakage_section(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", _append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
