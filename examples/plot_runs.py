"""Draw the learning curves and the clients' accuracies of several runs.

python examples/plot_runs.py runs/fedpac_digits runs/fedavg_digits --output curves.png

A run is the folder of a config (its newest version is taken) or a version folder itself.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from matplotlib.figure import Figure


def newest(run: Path) -> Path:
    """The folder that holds the results of a run."""
    if (run / "results.json").exists():
        return run
    found = sorted(run.glob("version_*/results.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"no results.json in {run} or {run}/version_*: has the run finished?")
    return found[-1].parent


def main() -> None:
    """Read the runs and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--labels", nargs="+", help="names of the runs; by default the methods'")
    parser.add_argument("--output", default="curves.png")
    args = parser.parse_args()
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    curves, clients = figure.subplots(1, 2, width_ratios=[3, 2])
    labels, accuracies = [], []
    for index, run in enumerate(map(newest, args.runs)):
        results = json.loads((run / "results.json").read_text())
        labels.append(args.labels[index] if args.labels else results["method"])
        history = [row for row in results["history"] if "test_accuracy" in row]
        rounds = [row["round"] + 1 for row in history]
        curves.plot(rounds, [100 * row["test_accuracy"] for row in history], label=labels[-1])
        with (run / "clients.csv").open() as file:
            rows = [row["test_accuracy_last"] for row in csv.DictReader(file)]
        accuracies.append([100 * float(value) for value in rows if value])
    curves.set(xlabel="round", ylabel="test accuracy, mean over clients, %")
    curves.legend(loc="lower right")
    curves.grid(alpha=0.3)
    clients.boxplot(accuracies, tick_labels=labels, whis=(0, 100))
    clients.set(ylabel="test accuracy of a client, last round, %")
    clients.grid(alpha=0.3, axis="y")
    clients.tick_params(axis="x", rotation=20)
    figure.savefig(args.output, dpi=120)
    print(f"Saved {args.output}")


if __name__ == "__main__":
    main()
