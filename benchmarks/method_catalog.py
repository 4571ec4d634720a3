"""The list of methods, objectives and encoders that `pfl methods` reads without importing torch.

    python benchmarks/method_catalog.py

writes ``catalog.json`` after a method, an objective or an encoder was added or described otherwise; a test compares.
"""

from __future__ import annotations

import json

import torch

from pfl_lightning import methods
from pfl_lightning.cli.methods import CATALOG
from pfl_lightning.client import FederatedClient
from pfl_lightning.encoders import build_encoder, encoder_class, encoder_names, num_parameters
from pfl_lightning.methods._partner import PartnerClient
from pfl_lightning.self_supervised import OBJECTIVES


def make_catalog() -> dict[str, list[list[str]]]:
    """The rows of the catalog, from the classes themselves."""
    return {"methods": _methods(), "objectives": _objectives(), "encoders": _encoders()}


def _methods() -> list[list[str]]:
    rows = []
    for method in (*methods.METHODS, *methods.ADAPTER_METHODS):
        shared = ", ".join(pattern.removesuffix(".*") for pattern in method.shared) or "none"
        paper = method.citation
        text = f"{paper.title} ({paper.authors}, {paper.venue})" if paper else "the baseline without a federation"
        modules = (
            "adapters"
            if method in methods.ADAPTER_METHODS
            else "yes"
            if method.model_agnostic
            else "classifiers"
            if method.feature_based
            else ""
        )
        needs = ", ".join(_needs(method, adapters=method in methods.ADAPTER_METHODS))
        rows.append([method.__name__, str(paper.year) if paper else "", text, shared, modules, needs])
    return rows


def _needs(method: type[FederatedClient], *, adapters: bool) -> list[str]:
    """What a method needs, by what its class says."""
    sends_head = "head.*" in method.shared and "encoder.*" not in method.shared
    found = {
        "features": method.feature_based and not method.model_agnostic,
        "adapters": adapters,
        "public data": method.needs_public,
        "validation": method.needs_validation,
        "one width": method.equal_features or sends_head,
        "partner": issubclass(method, PartnerClient),
    }
    return [need for need, needed in found.items() if needed]


def _objectives() -> list[list[str]]:
    rows = []
    for name, objective in OBJECTIVES.items():
        first, *rest = (" ".join(text.split()) for text in (objective.__doc__ or "").split("\n\n"))
        source = next((text for text in rest if text.startswith("Source: ")), "")
        end = source.find(". ", source.find(" 20"))  # after the year
        said = source[: end if end > 0 else None].removeprefix("Source: ").removesuffix(".")
        rows.append([name, objective.__name__, first.partition(": ")[2].removesuffix("."), said])
    return rows


def _encoders() -> list[list[str]]:
    """Registered encoders for images of 3 x 32 x 32, made without memory for their parameters."""
    rows = []
    for name in encoder_names():
        kind = encoder_class(name).__name__
        try:
            with torch.device("meta"):
                encoder = build_encoder(name, (3, 32, 32))
            rows.append([name, kind, str(encoder.out_features), f"{num_parameters(encoder):,}"])
        except (ValueError, TypeError) as error:  # of an encoder for other samples
            rows.append([name, kind, "-", str(error)])
    return rows


if __name__ == "__main__":
    CATALOG.write_text(json.dumps(make_catalog(), indent=1) + "\n")
