"""A small archive in the format of STL-10's binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NAMES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def write_stl10(root: Path, train: int = 40, test: int = 20, unlabeled: int = 30) -> Path:
    """Noise on a color a class; classes one after the other, from 1. Returns the folder with the files."""
    rng = np.random.default_rng(0)
    folder = Path(root) / "stl10_binary"
    folder.mkdir(parents=True)
    colors = rng.integers(40, 215, (10, 3, 1, 1))
    for name, count in (("train", train), ("test", test), ("unlabeled", unlabeled)):
        classes = np.arange(count) % 10
        images = colors[classes] + rng.integers(-40, 40, (count, 3, 96, 96))
        images.astype(np.uint8).tofile(folder / f"{name}_X.bin")
        if name != "unlabeled":
            (classes + 1).astype(np.uint8).tofile(folder / f"{name}_y.bin")
    (folder / "class_names.txt").write_text("\n".join(NAMES) + "\n")
    (folder / "fold_indices.txt").write_text(" ".join(map(str, range(train))) + "\n")
    return folder
