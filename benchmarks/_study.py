"""Shared code of the accuracy benchmarks: one process per run, no run computed twice, a table at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from typing import Any


@dataclass(frozen=True)
class Study:
    """Some methods on the same data.

    Attributes:
        description: The script's docstring.
        output: Default folder of the runs.
        paper: What the paper reports, by method, as text; "" where it does not.
        default: The methods that are run unless others are named.
        build: From (method, seed, arguments) to a federation and its data module.
        rounds: Default number of rounds.
        add_arguments: Adds the study's own arguments.
        tag: From the arguments to what tells its runs from those of other arguments, for the folder's name.
        evaluate_every: Default number of rounds between evaluations.
        finish: Called after the training with the trainer, the federation, the data module, the method, the arguments
            and the folder; it may leave results of its own.
        find: From a folder and the arguments to the results of a finished run, or None.
        table: From (method, results of its seeds) by method and the arguments to the table.
        untrained: The methods that skip the training.
        cohort: From the arguments to the clients of a round, a share or a number.
    """

    description: str
    output: str
    paper: Mapping[str, str]
    default: tuple[str, ...]
    build: Callable[[str, int, argparse.Namespace], tuple[Any, Any]]
    rounds: int
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    tag: Callable[[argparse.Namespace], str] = lambda args: ""
    evaluate_every: int = 1
    finish: Callable[[Any, Any, Any, str, argparse.Namespace, Path], None] = lambda *_: None
    find: Callable[[Path, argparse.Namespace], dict[str, Any] | None] | None = None
    table: Callable[[Mapping[str, list[dict[str, Any]]], argparse.Namespace], str] | None = None
    untrained: tuple[str, ...] = ()
    cohort: Callable[[argparse.Namespace], int | float] = lambda args: 1.0


def main(study: Study) -> None:
    """Run the study from the command line."""
    args = _parse(study)
    if args.only:
        return _run_one(study, args.only, args.seeds[0], args)
    jobs = [(name, seed) for seed in args.seeds for name in args.methods]
    if not args.table_only:
        with ThreadPoolExecutor(args.processes) as pool:
            list(pool.map(lambda job: _spawn(study, *job, args), jobs))
    seeds = ", ".join(str(seed) for seed in args.seeds)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {args.rounds} rounds, seeds {seeds}\n")
    print(_table(study, args))
    return None


def _parse(study: Study) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=study.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of the images")
    parser.add_argument("--output", default=study.output)
    parser.add_argument("--rounds", type=int, default=study.rounds)
    parser.add_argument(
        "--methods", nargs="+", default=list(study.default), choices=list(study.paper), metavar="METHOD"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--evaluate-every", type=int, default=study.evaluate_every, help="rounds between evaluations")
    parser.add_argument("--table-only", action="store_true", help="print the table of the runs that are there")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    study.add_arguments(parser)
    return parser.parse_args()


NOT_SETTINGS = ("data", "output", "methods", "seeds", "threads", "processes", "accelerator", "table_only", "only")


def _folder(study: Study, name: str, seed: int, args: argparse.Namespace) -> Path:
    """A folder of its own for every method, seed and setting."""
    slug = name.lower().replace(", ", "-").replace(" ", "-").replace("+", "plus").replace("/", "")
    settings = {key: value for key, value in sorted(vars(args).items()) if key not in NOT_SETTINGS}
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    return Path(args.output) / f"{slug}{study.tag(args)}-rounds{args.rounds}-seed{seed}-{digest}"


def _results(study: Study, name: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Results of a finished run; None for an interrupted one, which only has its results so far."""
    folder = _folder(study, name, seed, args)
    if study.find is not None:
        return study.find(folder, args)
    path = folder / "results.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found if found is not None and found["rounds"] == args.rounds else None


def _spawn(study: Study, name: str, seed: int, args: argparse.Namespace) -> None:
    """Run one method in a process of its own, unless its results are there."""
    if _results(study, name, seed, args) is not None:
        return
    own = [*sys.argv[1:], "--only", name, "--seeds", str(seed)]
    subprocess.run([sys.executable, sys.argv[0], *own], check=True)


def _run_one(study: Study, name: str, seed: int, args: argparse.Namespace) -> None:
    """Train one method and leave its results in its folder."""
    import lightning as L
    import torch

    from pfl_lightning.callbacks import FederatedLoop, ResultsWriter

    torch.set_num_threads(args.threads)
    L.seed_everything(seed, verbose=False)
    folder = _folder(study, name, seed, args)
    federation, data = study.build(name, seed, args)
    trainer = L.Trainer(
        max_epochs=args.rounds,
        accelerator=args.accelerator,
        devices=1,
        logger=L.pytorch.loggers.CSVLogger(folder, name="", version=""),
        callbacks=[FederatedLoop(cohort=study.cohort(args)), ResultsWriter(str(folder))],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=args.evaluate_every,
    )
    if name not in study.untrained:
        trainer.fit(federation, datamodule=data)
    study.finish(trainer, federation, data, name, args, folder)


def _table(study: Study, args: argparse.Namespace) -> str:
    """The results as Markdown: means over seeds, ± the deviation over clients for one seed, over seeds for several."""
    found = {name: [_results(study, name, seed, args) for seed in args.seeds] for name in args.methods}
    results = {name: [run for run in runs if run is not None] for name, runs in found.items()}
    if study.table is not None:
        return study.table(results, args)
    spread = "seeds" if len(args.seeds) > 1 else "clients"
    lines = [
        f"| method | last round, mean ± std over {spread} | worst decile | selected on validation | best on test "
        "| KB up a client and round | s a round | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in args.methods:
        if results[name]:
            lines.append(_row(name + runs_missing(results[name], args), results[name], study.paper[name]))
    return "\n".join(lines)


def runs_missing(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Note in a row for which not all seeds were run."""
    return "" if len(results) == len(args.seeds) else f" ({len(results)} of {len(args.seeds)} seeds)"


def _row(name: str, results: list[dict[str, Any]], paper: str) -> str:
    last = [100 * r["accuracy"]["last"]["mean"] for r in results]
    decile = [100 * r["accuracy"]["last"]["worst_decile"] for r in results]
    best = [100 * r["accuracy"]["best_test"]["mean"] for r in results]
    chosen = [r["accuracy"]["validation_selected"] for r in results]
    selected = f"{mean(100 * c['mean'] for c in chosen):.2f}" if all(chosen) else "-"
    deviation = stdev(last) if len(last) > 1 else 100 * results[0]["accuracy"]["last"]["std"]
    best_text = f"{mean(best):.2f}" + (f" ± {stdev(best):.2f}" if len(best) > 1 else "")
    upload = mean(r["bytes"]["up"] / r["rounds"] / r["num_clients"] / 1000 for r in results)
    seconds = mean(r["seconds_per_round"] for r in results)
    return (
        f"| {name} | {mean(last):.2f} ± {deviation:.2f} | {mean(decile):.2f} | {selected} | {best_text} "
        f"| {upload:,.1f} | {seconds:.1f} | {paper} |"
    )
