"""Folders of finished runs, written by hand."""

import csv
import json

import numpy as np
import yaml


def summary(values):
    worst = sorted(values)[: -(-len(values) // 10)]
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values)),
        "worst_decile": float(np.mean(worst)),
        "num_clients": len(values),
    }


def write_run(folder, method="FedAvg", clients=(0.25, 0.5, 0.75), *, seed=0, config=None, curve=None, **changes):
    """A run of results.json's second form.

    Args:
        clients: Test accuracies of the clients in the last round; the best round's are 0.1 more.
        curve: Mean test accuracy of each round; each takes 2 s, 1 MB up and 3 MB down.
        changes: Further entries of results.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curve = [float(np.mean(clients))] if curve is None else curve
    best = [value + 0.1 for value in clients]
    results = {
        "format": 2,
        "method": method,
        "method_arguments": {"lr": 0.1},
        "data": {"name": "Digits", "fingerprint": "sha256:d"},
        "partition": {"name": "Dirichlet", "fingerprint": f"sha256:p{seed}"},
        "versions": {"torch": "2.9.0"},
        "seed": seed,
        "finished": True,
        "rounds": len(curve),
        "num_clients": len(clients),
        "evaluated": {"score": "classifier", "model": "aggregated"},
        "accuracy": {
            "last": {"round": len(curve), "test": summary(clients), "validation": None},
            "validation_selected": None,
            "best_test": {"round": 1, "test": summary(best), "validation": None},
        },
        "bytes": {"up": 1_000_000 * len(curve), "down": 3_000_000 * len(curve)},
        "seconds": 2.0 * len(curve),
        "seconds_per_round": 2.0,
        "history": [
            {"round": n, "seconds": 2.0, "bytes_up": 1_000_000, "bytes_down": 3_000_000, "test": {"accuracy": value}}
            for n, value in enumerate(curve, start=1)
        ],
        **changes,
    }
    (folder / "results.json").write_text(json.dumps(results))
    with (folder / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "test_accuracy_last", "test_accuracy_best_test"])
        writer.writerows([client, *pair] for client, pair in enumerate(zip(clients, best, strict=True)))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_personalized(folder, participating=None, novel=None):
    """What ``pfl personalize`` leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = folder / "results.json"
    rounds = json.loads(trained.read_text())["rounds"] if trained.is_file() else 0
    content = {"format": 2, "method": "FedAvg", "seed": 0, "round": rounds}
    groups = {"participating": participating, "novel": novel}
    content |= {name: summary(values) for name, values in groups.items() if values}
    (folder / "personalized.json").write_text(json.dumps(content))
    rows = [(0, value) for value in participating or ()] + [(1, value) for value in novel or ()]
    with (folder / "personalized.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "novel", "test_accuracy"])
        writer.writerows([client, *row] for client, row in enumerate(rows))
    return folder
