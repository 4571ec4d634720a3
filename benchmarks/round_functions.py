"""Counts the functions of the package that run in one FedAvg round, and the files that they stand in.

A reader who wants to follow a round has to open that many functions and files. The round has three clients with one
local epoch each and no evaluation; it is the third of a run, so that set-up and what is computed once are left out.
The data module's functions count, too. Comprehensions and generator expressions do not: they are no functions to open.

usage: python benchmarks/round_functions.py [--list]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning as L
import torch
from torch import nn

import pfl_lightning
from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FederatedDataModule, Samples
from pfl_lightning.methods import FedAvg

PACKAGE = Path(pfl_lightning.__file__).parent
FOLDERS = tuple(f"{(PACKAGE / name).resolve()}/" for name in ("", "callbacks", "datamodules"))
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@dataclass(frozen=True, order=True)
class Function:
    """A function of the package.

    Attributes:
        file: Its file, relative to the project.
        line: First line of its definition.
        name: Its qualified name.
    """

    file: str
    line: int
    name: str


class Noise(FederatedDataModule):
    """Thirty samples of two classes, without a test set."""

    def load(self) -> Samples:
        """Draw the samples."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(30, 6, generator=generator)
        return Samples(inputs, torch.arange(30) % 2, ("even", "odd"))


def encoder(input_shape: Sequence[int]) -> nn.Module:
    """One linear layer to four features."""
    layer = nn.Linear(input_shape[0], 4)
    layer.out_features = 4
    return layer


class Counter(L.Callback):
    """Records the functions that run between the ends of two rounds.

    Args:
        round: The round that is counted.
    """

    def __init__(self, round: int) -> None:
        self.round = round
        self.codes: set[CodeType] = set()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start after the round before, and stop after the round."""
        if trainer.current_epoch == self.round - 1:
            sys.setprofile(self._see)
        elif trainer.current_epoch == self.round:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)


def count_functions() -> list[Function]:
    """Return the functions of the package that run in one FedAvg round of three clients, sorted by file."""
    counter = Counter(round=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=counter.round + 1,
        callbacks=[FederatedLoop(), counter],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = sys.getprofile()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Federation(partial(FedAvg, epochs=1), encoder, seed=0), datamodule=Noise(IID(3), batch_size=4))
    finally:
        sys.setprofile(before)
    found = set()
    for code in counter.codes:
        path = str(Path(code.co_filename).resolve())
        if path.startswith(FOLDERS) and code.co_name not in COMPREHENSIONS:
            file = str(Path(path).relative_to(PACKAGE.resolve().parent))
            found.add(Function(file, code.co_firstlineno, code.co_qualname))
    return sorted(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function")
    listed = parser.parse_args().list
    functions = count_functions()
    files = sorted({function.file for function in functions})
    for file in files:
        own = [function for function in functions if function.file == file]
        print(f"{len(own):4}  {file}")
        for function in own if listed else ():
            print(f"        {function.line:4} {function.name}")
    print(f"{len(functions):4}  functions in {len(files)} files")


if __name__ == "__main__":
    main()
