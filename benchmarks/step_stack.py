"""Lists the files of the package that stand on the stack when a local step runs: the layers between a user and a step.

Two ways lead there. `pfl fit` trains a built-in method on the digits; `trainer.fit` trains a user's LightningModule
under FedPAC, with `FederatedLoop(method=...)` among the callbacks. A file counts once, in the order of the calls. Files
that a call has left again do not stand on the stack: `python benchmarks/round_functions.py` counts those.

usage: python benchmarks/step_stack.py
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import tempfile
import warnings
from pathlib import Path
from types import FrameType
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pfl_lightning
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.cli.main import main as pfl
from pfl_lightning.client import FederatedClient
from pfl_lightning.methods import FedPAC

PACKAGE = Path(pfl_lightning.__file__).parent
CONFIG = PACKAGE.resolve().parent / "configs" / "fedavg_digits.yaml"
FOLDERS = tuple(f"{(PACKAGE / name).resolve()}/" for name in ("", "callbacks", "datamodules"))


def own_files(frame: FrameType | None) -> list[str]:
    """Return the package's files from the outermost call of a frame to the innermost, each once."""
    found: list[str] = []
    while frame is not None:
        path = str(Path(frame.f_code.co_filename).resolve())
        if path.startswith(FOLDERS):
            found.append(str(Path(path).relative_to(PACKAGE.resolve().parent)))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(found)))


class Net(L.LightningModule):
    """A user's module, which looks at the stack in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)
        self.stack: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, `(batch, 2)`."""
        return self.head(self.body(inputs).relu())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        STACKS["trainer.fit"] = own_files(inspect.currentframe())
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


STACKS: dict[str, list[str]] = {}


def user_step() -> list[str]:
    """Return the files on the stack of a user's `training_step` under FedPAC."""
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, torch.arange(60) % 2), batch_size=10)
    loop = FederatedLoop(method=FedPAC, num_clients=3)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[loop], **quiet).fit(Net(), loader)
    return STACKS["trainer.fit"]


def command_step() -> list[str]:
    """Return the files on the stack of a client's `training_step` under `pfl fit`."""
    step = FederatedClient.training_step

    def seen(*args, **kwargs):  # type: ignore[no-untyped-def]
        STACKS["pfl fit"] = [*own_files(inspect.currentframe()), "pfl_lightning/client/base.py"]
        return step(*args, **kwargs)

    patched = mock.patch.object(FederatedClient, "training_step", seen)
    with tempfile.TemporaryDirectory() as folder, patched, contextlib.redirect_stdout(io.StringIO()):
        pfl(["fit", "--config", str(CONFIG), "--run_dir", folder, "--trainer.max_epochs", "1"])
    return list(dict.fromkeys(STACKS["pfl fit"]))


def main() -> None:
    """Print both ways."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = {"pfl fit": command_step(), "trainer.fit of a user's module": user_step()}
    for way, files in ways.items():
        print(f"{way}: {len(files)} files", *files, sep="\n    ")


if __name__ == "__main__":
    main()
