"""Data in LEAF's JSON: users, each with inputs and classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.given import clients_of
from pfl_lightning.options import DataOptions, Unpack


class FromLEAF(FederatedDataModule, gives="partition"):
    """Data in LEAF's format: each user is a client and keeps its name.

    A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`` (Caldas et al.,
    LEAF: A Benchmark for Federated Settings, 2018). A user whose samples are in several files has them all.

    Args:
        path: A file, or a folder whose ``.json`` files are read in the order of their names.
        test_path: Path of the same users' test samples, in the same form; None to hold out a share of each user's own.
        batch_size: Samples in a training batch.
        kwargs: See :class:`FederatedDataModule`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is something else, or its inputs are no numbers of one length.
    """

    read_once = ("_parts",)

    def __init__(
        self, path: str, *, test_path: str | None = None, batch_size: int = 50, **kwargs: Unpack[DataOptions]
    ) -> None:
        self.path, self.test_path = str(path), test_path
        paths = [self.path] if test_path is None else [self.path, str(test_path)]
        self._parts = [_read(Path(one)) for one in paths]
        self._clients, rule = clients_of([user for users, _, _ in self._parts for user in users])
        super().__init__(rule, batch_size, **kwargs)

    def load(self) -> Samples:
        """Make tensors of the samples."""
        inputs, targets = ([torch.from_numpy(part[place]) for part in self._parts] for place in (1, 2))
        owners = torch.from_numpy(self._clients).split([len(own) for own in targets])
        classes = tuple(str(n) for n in range(max(int(own.max()) for own in targets) + 1))
        samples = Samples(inputs[0], targets[0], classes, train_clients=owners[0])
        if len(inputs) == 1:
            return samples
        return replace(samples, test_inputs=inputs[1], test_targets=targets[1], test_clients=owners[1])


def _read(path: Path) -> tuple[list[str], Any, Any]:
    """The user of each sample, float32 inputs and int64 classes."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no LEAF data at {path}: expected a JSON file, or a folder of them; correct 'path'")
    users: list[str] = []
    inputs: list[Any] = []
    targets: list[int] = []
    for file in files:
        user = None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            for user in content["users"]:
                own = content["user_data"][user]
                if len(own["x"]) != len(own["y"]) or any(label != int(label) or label < 0 for label in own["y"]):
                    raise ValueError(f"{len(own['x'])} inputs, and {len(own['y'])} classes from 0")
                users += [str(user)] * len(own["y"])
                inputs += [np.asarray(value, dtype=np.float32) for value in own["x"]]
                targets += map(int, own["y"])
                if len(own["x"]) and inputs[-len(own["x"])].shape != inputs[0].shape:
                    raise ValueError(f"inputs of shape {inputs[-1].shape}, and others of {inputs[0].shape}")
        except (ValueError, LookupError, TypeError) as error:
            whose = "" if user is None else f", of user {user!r},"
            raise ValueError(
                f"{file}{whose} is not in LEAF's format (users, user_data with numbers x and whole numbers y from 0): "
                f"{type(error).__name__}: {error}; convert text to numbers first"
            ) from error
    if not users:
        raise ValueError(f"{path} has no samples: expected a LEAF file with samples")
    return users, np.stack(inputs), np.array(targets, dtype=np.int64)
