"""The pictures of docs/tutorials/liar.md.

    pfl study studies/robust.yaml --methods "FedPAC,FedPAC + filter" --output runs/liar
    python benchmarks/liar.py runs/liar

``liar_attacks.png`` has the honest clients' accuracy under each attack, without and with the filter, from the study's
runs. ``liar_scores.png`` has the scores by which the filter judges the updates of a round under inner products: the
script runs that row of the study, and keeps them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from matplotlib.figure import Figure

from pfl_lightning import Federation, VectorizedEngine
from pfl_lightning.callbacks import Attack, FederatedLoop
from pfl_lightning.datamodules import Digits, DominantClasses
from pfl_lightning.functional.robust import krum_scores
from pfl_lightning.methods import FedPAC
from pfl_lightning.robust import MultiKrum
from pfl_lightning.robust.filters import scaled_distances
from pfl_lightning.robust.rules import Entry, Verdict
from pfl_lightning.runs.folder import folder_name
from pfl_lightning.study.reader import read_study

STUDY = Path(__file__).parents[1] / "studies" / "robust.yaml"


class Watched(MultiKrum):
    """The filter, which keeps each client's score of each round, in units of their median."""

    def __init__(self) -> None:
        super().__init__(byzantine=3, tolerance=1.6, colluding=True)
        self.seen: list[dict[int, float]] = []

    def judge(self, entries: Sequence[Entry], refused: int) -> Sequence[Verdict]:
        """Judge as ever."""
        left = self.byzantine - refused
        scores = krum_scores(scaled_distances(entries), left, skip=left - 1)
        clients = [one.update.client for one in entries]
        self.seen.append(dict(zip(clients, (scores / scores.median()).tolist(), strict=True)))
        return super().judge(entries, refused)


def watch(rounds: int = 10) -> tuple[list[dict[int, float]], frozenset[int]]:
    """Scores by round under inner products, and who lies."""
    partition = DominantClasses(num_clients=10, samples_per_client=80, seed=0)
    data = Digits(partition=partition, batch_size=16, validation_share=0.2, drop_last=True, seed=0)
    attack, watched = Attack("inner_product", liars=3), Watched()
    method = partial(FedPAC, lr=0.05, epochs=3)
    federation = Federation(method, "mlp", engine=VectorizedEngine(), seed=0, robust=watched)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=rounds,
        limit_val_batches=0,
        devices=1,
        accelerator="cpu",
        callbacks=[FederatedLoop(), attack],
        **quiet,
    )
    trainer.fit(federation, datamodule=data)
    return watched.seen, attack.lying


def draw_attacks(study: Path, path: Path) -> None:
    """Bars for each setting of the study; a run that ended early has none."""
    settings = list(read_study(STUDY).settings)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for shift, row, color in ((-0.2, "FedPAC", "tab:red"), (0.2, "FedPAC + filter", "tab:green")):
        heights = []
        for setting in settings:
            found = study / "runs" / folder_name(setting) / folder_name(row) / "seed_0" / "version_0" / "results.json"
            results = json.loads(found.read_text())
            heights.append(100 * results["accuracy"]["last"]["test"]["mean"] if results["finished"] is True else 0.0)
        places = [place + shift for place in range(len(settings))]
        axes.bar_label(axes.bar(places, heights, 0.4, color=color, label=row), fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(settings)), [name.replace(" ", "\n", 1) for name in settings], fontsize=8)
    axes.set(ylabel="accuracy of honest clients (%)", ylim=(0, 100))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def draw_scores(seen: Sequence[dict[int, float]], lying: frozenset[int], path: Path) -> None:
    """A point for each client and round."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, color, lie in (("honest clients", "tab:blue", False), ("liars", "tab:red", True)):
        points = [(n, s) for n, scores in enumerate(seen, 1) for c, s in scores.items() if (c in lying) == lie]
        axes.scatter(*zip(*points, strict=True), color=color, label=name, s=14)
    axes.axhline(Watched().tolerance, color="gray", linestyle="--", label="tolerance")
    axes.set(xlabel="round", ylabel="score, in medians of the round", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of the study's runs")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where the pictures go")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    draw_attacks(options.study, options.folder / "liar_attacks.png")
    draw_scores(*watch(), options.folder / "liar_scores.png")


if __name__ == "__main__":
    main()
