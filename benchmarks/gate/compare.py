"""Compares what two checkouts compute: the gate of changes that must change nothing.

    git worktree add --detach ../before COMMIT
    python benchmarks/gate/compare.py ../before . [--only PATTERN] [--groups sequential drop_in ...]

In one environment and on one thread, every method runs under every engine, runs are killed and resumed, personalized
and exported, users' modules are federated (also those of packages that are installed, see ``tests/foreign``). All that
these leave (checkpoints, results, exported files, models, logged values; no times) must be equal in every bit, under
``VectorizedEngine`` up to rounding. A case that fails in the same way in both checkouts is equal.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cases import GROUPS
from torch import Tensor

__all__ = ["compare_folders", "differences"]

RENAMED = {
    r"(?<=logged\.)(novel_)?(accuracy|loss)(?=/|$)": r"\1val_\2",
    r"(?<![a-z_])accuracy/mean": "val_accuracy/mean",
}
"""Patterns in names of values of the earlier checkout, and what stands there in the later one."""

DROPPED = ("pfl_lightning_contents",)
"""What names of values contain that the later checkout leaves out on purpose."""

HERE = Path(__file__).parent


def differences(before: dict[str, Any], now: dict[str, Any], close: bool = False) -> list[str]:
    """What differs between two flat dictionaries, in words.

    Args:
        before: Values by name.
        now: Values by name.
        close: Whether numbers may differ by rounding.
    """
    for old, new in RENAMED.items():
        before = {name if name in now else re.sub(old, new, name): value for name, value in before.items()}
    before = {name: value for name, value in before.items() if not any(word in name for word in DROPPED)}
    found = [f"only before: {name}" for name in before.keys() - now.keys()]
    found += [f"only now: {name}" for name in now.keys() - before.keys()]
    for name, value in before.items():
        if name in now and not _same(value, now[name], close):
            found.append(f"{name}: {_difference(value, now[name])}")
    return sorted(found)


def _same(one: Any, other: Any, close: bool) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if close and one.is_floating_point():
            return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
        return torch.equal(torch.nan_to_num(one, 7e7), torch.nan_to_num(other, 7e7)) if one.numel() else True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (one != one and other != other) or (close and abs(one - other) <= 1e-3 * abs(one) + 1e-5)
    if close and isinstance(one, str):
        try:
            return _same(float(one), float(other), close)
        except ValueError:
            return one == other
    return bool(one == other)


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.numel():
        return f"by {float((one.double() - other.double()).abs().max()):g} at most"
    return f"{_short(one)} became {_short(other)}"


def _short(value: Any) -> str:
    text = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def compare_folders(before: Path, now: Path) -> tuple[int, int]:
    """Print what differs between the cases of two folders, and what fails in both.

    Returns:
        Number of cases, and of those that differ.
    """
    names = sorted({path.name for folder in (before, now) for path in folder.glob("*.pt")})
    differing = 0
    for name in names:
        if not all((folder / name).exists() for folder in (before, now)):
            found = [f"runs only {'before' if (before / name).exists() else 'now'}"]
        else:
            one, other = (torch.load(folder / name, weights_only=False) for folder in (before, now))
            found = differences(one, other, close=name.startswith("vectorized"))
            if not found and "failed" in one:
                print(f"fails in both: {name.removesuffix('.pt')}: {one['failed']}", flush=True)
        if found:
            differing += 1
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            print(f"DIFFERS {name.removesuffix('.pt')}: {found[0]}{more}", flush=True)
    return len(names), differing


def _play(group: str, checkout: Path, output: Path, pattern: str) -> None:
    paths = [checkout / "src", checkout / "tests", HERE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", HERE / "cases.py", group, output, checkout, pattern]
    ended = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if ended.returncode:
        print(f"{group} in {checkout.name} ended with {ended.returncode}: {ended.stderr[-1500:]}", flush=True)
        torch.save({"failed": ended.returncode}, output / f"{group}--the process.pt")
    (output / f"{group}.log").write_text(ended.stderr)


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("now", type=Path, help="another one")
    parser.add_argument("--only", default="*", help="pattern of cases, such as sequential/fedpac*")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--output", type=Path, help="folder in which all is kept (a temporary one)")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        output = arguments.output or Path(temporary)
        folders = output / "before", output / "now"
        for group in arguments.groups:
            for checkout, folder in zip((arguments.before, arguments.now), folders, strict=True):
                _play(group, checkout.resolve(), folder, arguments.only)
            print(f"{group}: {time.monotonic() - began:.0f} s", flush=True)
        cases, differing = compare_folders(*folders)
    print(f"{cases} cases, {differing} differ, {time.monotonic() - began:.0f} s")
    sys.exit(bool(differing) or not cases)


if __name__ == "__main__":
    main()
