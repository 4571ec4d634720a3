"""What a GPU would wait for, counted without one: launches, synchronizations and copies, of steps and beside them.

    python benchmarks/device_counts.py [--engines sequential vectorized trainer] [--methods FedAvg FedPAC]
        [--encoders mlp fedpac_cnn resnet18] [--augmented] [--unequal] [--lines 20] [--of beside step]

The device is the one that the tests pretend (``tests/_helpers/other_device.py``): it computes on the CPU and keeps its
tensors apart. How an operation counts is told in ``tests/_helpers/device_counts.py``. Each row has the numbers of a
training step (of stacked clients: of a step of the one with most), and those of each client and round beside its steps;
passes of the encoder over the client's data stand in columns of their own. No evaluation is counted.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _helpers import other_device
from _helpers.device_counts import ENGINES, KINDS, Case, count

EQUAL, UNEQUAL = (16,) * 8, (28, 16, 6, 14) * 2


def shown(numbers: Mapping[str, float]) -> str:
    """Launches, syncs, copies to the device and back."""
    return " / ".join(f"{numbers[kind]:.4g}" for kind in KINDS)


def print_lines(lines: Mapping[tuple[str, str], float], most: int) -> None:
    """Print the lines with most of all kinds."""
    by_line: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for (line, kind), number in lines.items():
        by_line[line][kind] += number
    ranked = sorted(by_line.items(), key=lambda item: -sum(item[1].values()))
    for line, numbers in ranked[:most]:
        if any(numbers.values()):
            print(f"    {shown(numbers):28} {line}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--methods", nargs="+", default=["FedAvg", "FedPAC"])
    parser.add_argument("--encoders", nargs="+", default=["mlp", "fedpac_cnn", "resnet18"])
    parser.add_argument("--augmented", action="store_true", help="crop and flip the batches, too")
    parser.add_argument("--unequal", action="store_true", help="clients of different sizes, too")
    parser.add_argument("--lines", type=int, default=0, help="lines of the package shown under each row")
    parser.add_argument("--of", choices=["beside", "step"], default="beside", help="whose lines")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    other_device.install()
    print("Numbers are launches / syncs / copies to the device / copies to the host.\n")
    print("| engine | method | encoder | batches | clients | a step | beside steps, a client and round | passes |")
    print("|---|---|---|---|---|---|---|---|")
    augmented = (False, True) if arguments.augmented else (False,)
    sizes = (EQUAL, UNEQUAL) if arguments.unequal else (EQUAL,)
    chosen = (arguments.encoders, arguments.methods, arguments.engines, augmented, sizes)
    for encoder, method, engine, augments, own in itertools.product(*chosen):
        # Images that the encoder does not shrink to nothing.
        found = count(Case(engine, method, encoder, augments, own, side=32 if encoder != "mlp" else 16))
        kinds = "augmented" if augments else "plain", "equal" if own == EQUAL else "unequal"
        cells = (engine, method, encoder, *kinds, shown(found.step), shown(found.beside), shown(found.passes))
        print(f"| {' | '.join(cells)} |", flush=True)
        if arguments.lines:
            print_lines(found.lines if arguments.of == "beside" else found.step_lines, arguments.lines)


if __name__ == "__main__":
    main()
