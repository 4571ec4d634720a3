"""``pfl predict --exported``: predictions of an exported model, from its files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pfl_lightning.cli.commands import WordParser
from pfl_lightning.cli.trainer import TABLES, read_inputs
from pfl_lightning.federation.exported import description
from pfl_lightning.federation.predictions import predict_exported
from pfl_lightning.notices import counted


def exported_parser() -> WordParser:
    """The options of ``pfl predict --exported``."""
    parser = WordParser("pfl predict --exported", description="Predict with an exported model, from its files alone.")
    parser.add_argument("--exported", required=True, metavar="FILE", help="client_N.pt, with client_N.json next to it")
    parser.add_argument(
        "--inputs", required=True, metavar="FILE", help="rows (.csv, .parquet), a batch (.npy, .pt), a folder of images"
    )
    parser.add_argument("--output", default="predictions", metavar="FOLDER", help="by default 'predictions'")
    return parser


def predict(args: Sequence[str]) -> None:
    """Write the predictions of an exported model as a table, with class names and probabilities."""
    asked = exported_parser().parse_args(args)
    about, path = description(asked.exported), Path(asked.inputs)
    given: Any = path, None
    if path.suffix.lower() not in TABLES:
        like: Any = SimpleNamespace(input_shape=about["input_shape"], image_size=(about["image_size"] or [None])[0])
        given = read_inputs(path, like)
    found = predict_exported(asked.exported, given[0])
    target = Path(asked.output) / f"{Path(asked.exported).stem}_{path.stem}.csv"
    found.save(target, given[1])
    print(f"Saved {counted(len(found.classes), 'prediction')} of client {about['name'] or about['client']} in {target}")
