"""Names of papers for a method with an option: ``pfl methods IFCA`` says that it is HypCluster."""

from __future__ import annotations

import re

__all__ = ["variant_of"]

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


def variant_of(word: str, methods: list[str], objectives: list[str]) -> str | None:
    """Say which method, with which options, a name of a paper stands for.

    Args:
        word: The name, such as ``"IFCA"``, ``"FedEM-FT"`` or ``"Calibre(SimCLR)"``.
        methods: Names of the methods.
        objectives: Names of the self-supervised objectives.

    Example:
        >>> from pfl_lightning.cli.options.variants import variant_of
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
