"""What ``pfl methods`` lists, kept in ``catalog.json`` and ``costs.json``: reading it takes no import of torch.

``python -m pfl_lightning.cli.options.catalog`` writes the file, after a method, an objective or an encoder was added
or described otherwise; a test compares the two. A file from before another class was added is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pfl_lightning.client import FederatedClient

__all__ = ["COSTS", "Catalog", "MethodCosts", "Need", "make_catalog", "read_catalog", "read_costs", "variant_of"]

PACKAGE = Path(__file__).parents[2]
FILE = Path(__file__).with_name("catalog.json")
COSTS = Path(__file__).with_name("costs.json")
"""What methods cost and serve, as ``benchmarks/method_costs.py`` measured it."""
REGISTRIES = ("encoders/__init__.py", "methods/__init__.py", "self_supervised/registry.py")
"""Files that change when a class is added, removed or renamed."""

VARIANTS = {
    "fedavg+": "FedAvg with fine_tune",
    "heurfedamp": "FedAMP with attention=cosine, its default",
    "ifca": "HypCluster with by_samples=false",
    "ktpfl+weight": "KTpFL with weights=true",
    "pfedhnpc": "PFedHN with personal_head=true",
    "local": "LocalOnly",
    "scriptconvergent": "LocalOnly with a personalization (configs/script_convergent_cifar10.yaml)",
    "scriptfair": "LocalOnly with a personalization (configs/script_fair_cifar10.yaml)",
}
"""Names without their punctuation, and what the package has for each."""


class Need(StrEnum):
    """What a method needs of models and data, as the table of ``pfl methods`` names it."""

    FEATURES = "features"
    ADAPTERS = "adapters"
    PUBLIC = "public data"
    VALIDATION = "validation"
    ENCODERS = "equal encoders"
    WIDTH = "one width"
    PARTNER = "partner"


@dataclass(frozen=True)
class Catalog:
    """Rows of the tables of ``pfl methods``.

    Attributes:
        methods: Name, year, paper, weights that travel, which LightningModules it trains, and what it needs, but equal
            encoders, which are measured (:class:`Need`, separated by commas).
        objectives: Name, class, description and source of the self-supervised objectives.
        encoders: Name, class, features and parameters on images of 3 x 32 x 32, or why they do not take them.
    """

    methods: list[list[str]]
    objectives: list[list[str]]
    encoders: list[list[str]]


def read_catalog() -> Catalog:
    """The catalog of the file, or one made now if the file is from before another class was added."""
    content = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return Catalog(**content["rows"]) if content.get("registries") == _digest() else make_catalog()


def make_catalog() -> Catalog:
    """The catalog, from the classes themselves."""
    return Catalog(_methods(), _objectives(), _encoders())


def _digest() -> str:
    return hashlib.sha256(b"".join((PACKAGE / name).read_bytes() for name in REGISTRIES)).hexdigest()


def _methods() -> list[list[str]]:
    from pfl_lightning import methods

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


def _needs(method: type[FederatedClient], *, adapters: bool) -> list[Need]:
    """What a method needs, by what its class says."""
    from pfl_lightning.methods._partner import PartnerClient

    sends_head = "head.*" in method.shared and "encoder.*" not in method.shared
    found = {
        Need.FEATURES: method.feature_based and not method.model_agnostic,
        Need.ADAPTERS: adapters,
        Need.PUBLIC: method.needs_public,
        Need.VALIDATION: method.needs_validation,
        Need.WIDTH: method.equal_features or sends_head,
        Need.PARTNER: issubclass(method, PartnerClient),
    }
    return [need for need, needed in found.items() if needed]


def _objectives() -> list[list[str]]:
    from pfl_lightning.self_supervised import OBJECTIVES

    rows = []
    for name, objective in OBJECTIVES.items():
        first, *rest = (" ".join(text.split()) for text in (objective.__doc__ or "").split("\n\n"))
        source = next((text for text in rest if text.startswith("Source: ")), "")
        end = source.find(". ", source.find(" 20"))  # after the year
        said = source[: end if end > 0 else None].removeprefix("Source: ").removesuffix(".")
        rows.append([name, objective.__name__, first.partition(": ")[2].removesuffix("."), said])
    return rows


def _encoders() -> list[list[str]]:
    from pfl_lightning.encoders import describe_encoders

    rows = []
    for row in describe_encoders((3, 32, 32)):
        numbers = (str(row.out_features), f"{row.parameters:,}") if row.parameters else ("-", str(row.reason))
        rows.append([row.name, row.encoder, *numbers])
    return rows


@dataclass(frozen=True)
class MethodCosts:
    """Measured costs of a method; ratios are to FedAvg with the same settings.

    Attributes:
        method: Name of the class.
        down: What the server sends a client: modules of the model, and fields beside them.
        up: What a client sends.
        down_bytes: Bytes to a client in a round.
        up_bytes: Bytes from a client in a round.
        client_bytes: Bytes that are stored of a client from round to round.
        server_bytes: Bytes of the server's state.
        server_bytes_per_client: Bytes that the server keeps of each client beside it.
        work: Operations of a round's forward and backward passes, as a ratio.
        time: Time of a round, as a ratio; ``None`` where it was not measured.
        overhead: Time of a round over that of its passes in a plain loop, or ``None``.
        overhead_long: The same where a client takes more steps: FedPAC's 600 images and 5 epochs, or ``None``.
        unequal_encoders: Whether two encoders of one feature width train together.
        novel_accuracy: Test accuracy in [0, 1] of clients that never train, on ten classes, after ten rounds at one
            rate for all methods, without a personalization.
        measured: Day and machine.
    """

    method: str
    down: list[str]
    up: list[str]
    down_bytes: int
    up_bytes: int
    client_bytes: int
    server_bytes: int
    server_bytes_per_client: int
    work: float
    time: float | None
    overhead: float | None
    unequal_encoders: bool
    novel_accuracy: float
    measured: str = ""
    overhead_long: float | None = None


def read_costs() -> dict[str, MethodCosts]:
    """The measured methods by name."""
    rows = json.loads(COSTS.read_text())["rows"] if COSTS.is_file() else []
    return {row["method"]: MethodCosts(**row) for row in rows}


def variant_of(word: str, methods: list[str], objectives: list[str]) -> str | None:
    """Say which method, with which options, a name of a paper stands for.

    Args:
        word: The name, such as ``"IFCA"``, ``"FedEM-FT"`` or ``"Calibre(SimCLR)"``.
        methods: Names of the methods.
        objectives: Names of the self-supervised objectives.

    Example:
        >>> from pfl_lightning.cli.options.catalog import variant_of
        >>> variant_of("FedEM-FT", ["FedAvg", "FedEM"], ["simclr"])
        'FedEM with fine_tune'
        >>> variant_of("pFL-SimCLR", ["PFLSSL"], ["simclr"])
        'PFLSSL with objective=simclr'
    """
    plain = re.sub(r"[\s\-_.()]", "", word.lower())
    if plain in VARIANTS:
        return VARIANTS[plain]
    own = {name.lower(): name for name in methods}
    if plain in own:
        return own[plain]
    if plain.endswith("ft") and plain[:-2] in own:
        return f"{own[plain[:-2]]} with fine_tune"
    for objective in objectives:
        for prefix, name in (("", "PFLSSL or Calibre"), ("pfl", "PFLSSL"), ("calibre", "Calibre")):
            if plain == prefix + objective.lower():
                return f"{name} with objective={objective}"
    return None


if __name__ == "__main__":
    FILE.write_text(json.dumps({"registries": _digest(), "rows": asdict(make_catalog())}, indent=1) + "\n")
