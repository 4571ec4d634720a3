"""python -m _helpers.other_device_cases CASE: what runs on another device, and how far it is from the CPU, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from _helpers import other_device, toy
from _helpers.methods import CORE
from pfl_lightning import Federation, SequentialEngine, TrainerEngine, VectorizedEngine, data, methods
from pfl_lightning.callbacks import FederatedLoop, Inspection, ResultsWriter
from pfl_lightning.datamodules import Digits, DominantClasses, RandomCrop, RandomFlip, RandomRotation
from pfl_lightning.functional import tensor_lists
from pfl_lightning.methods import DCPFL, FedAvg, FedPAC, FedProto
from pfl_lightning.privacy import ClientPrivacy

ENGINES: dict[str, Callable[[], Any]] = {
    "sequential": SequentialEngine,
    "vectorized": lambda: VectorizedEngine(forward="vmap"),
    "trainer": TrainerEngine,
}
ON = {"accelerator": other_device.NAME, "inference_mode": False}  # whose tensors such a subclass cannot be
COHORTS = [[0, 2, 3], [1, 2, 4]]


def under(engine: str) -> dict[str, Any]:
    """Methods under an engine: the largest difference of any tensor or loss from the CPU's."""
    found = {}
    for method in CORE:
        fit = toy.for_toy(method, lr=0.01, epochs=1)
        here = toy.run(fit, 2, cohorts=COHORTS, engine=ENGINES[engine]())
        with other_device.OtherDevice():
            there = toy.run(fit, 2, cohorts=COHORTS, engine=ENGINES[engine](), **ON)
        states = toy.whole_state(here), toy.whole_state(there)
        pairs = [(states[0][name].double(), states[1][name].double()) for name in states[0]]
        losses = [abs(here.test_scores[c].loss - there.test_scores[c].loss) for c in here.test_scores]
        tensors = [(one - other).abs().max().item() for one, other in pairs if one.numel()]
        found[method.__name__] = max(*tensors, *(loss for loss in losses if loss == loss), 0.0)
    return found


def without_double(_: Path) -> dict[str, Any]:
    """Every method on a device without double precision."""
    other_device.single = True
    tensor_lists.SINGLE_DEVICES.add(other_device.NAME)
    failed = {}
    for method in methods.METHODS:
        try:
            fit = toy.for_toy(method, lr=0.01, epochs=1)
            with other_device.OtherDevice():
                toy.run(fit, 1, cohorts=COHORTS, engine=SequentialEngine(), **ON)
        except Exception as error:
            failed[method.__name__] = f"{type(error).__name__}: {str(error)[:300]}"
    return failed


def augmented(_: Path) -> dict[str, Any]:
    """Launches and blocking copies to the device of a second epoch of stacked steps, with and without augmentation."""
    found, compute = {}, other_device.compute
    for name, augment in (("plain", False), ("augmented", [RandomCrop(padding=1), RandomFlip()])):
        counts = []
        for epochs in (1, 2):
            launches, blocking = 0, 0

            def counted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                nonlocal launches, blocking
                result = compute(func, args, kwargs)
                copies = str(func) in ("aten._to_copy.default", "aten.copy_.default")
                if isinstance(result, other_device.DeviceTensor) and not func.is_view and "empty" not in str(func):
                    launches += 1
                    waits = not kwargs.get("non_blocking") and not any(one is True for one in args[2:])
                    source = args[1] if str(func) == "aten.copy_.default" else args[0]
                    blocking += copies and waits and type(source) is torch.Tensor
                return result

            other_device.compute = counted
            federation = Federation(partial(FedAvg, lr=0.02, epochs=epochs), "mlp", engine=ENGINES["vectorized"]())
            trainer = toy.quiet_trainer(1, FederatedLoop(), limit_val_batches=0, **ON)
            with other_device.OtherDevice():
                trainer.fit(federation, datamodule=digits(augment=augment))
            other_device.compute = compute
            counts.append((launches, blocking))
        found[name] = [two - one for one, two in zip(*counts, strict=True)]
    return found


def fed(method: type = FedPAC, **options: Any) -> Federation:
    return Federation(partial(method, lr=0.02, epochs=1, **options), encoder="small_cnn")


def digits(**options: Any) -> Digits:
    return Digits(DominantClasses(num_clients=4, samples_per_client=60), batch_size=10, **options)


def resumed(folder: Path) -> dict[str, Any]:
    """A run that goes on from a checkpoint, against one that was not interrupted."""
    losses = []
    with other_device.OtherDevice():
        for stops in ((3,), (2, 3)):
            for rounds in stops:
                federation = fed()
                saved = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
                trainer = toy.quiet_trainer(rounds, FederatedLoop(), saved, enable_checkpointing=True, **ON)
                path = folder / "last.ckpt" if len(stops) > 1 and rounds == 3 else None
                trainer.fit(federation, datamodule=digits(), ckpt_path=path)
            trainer.test(federation, datamodule=digits(), verbose=False)
            losses.append([score.loss for score in federation.test_scores.values()])
            (folder / "last.ckpt").unlink(missing_ok=True)
    return {"difference": max(abs(one - other) for one, other in zip(*losses, strict=True))}


def inspected(folder: Path) -> dict[str, Any]:
    """All pictures, augmentation, fine-tuning and novel clients, against the CPU."""
    augment = [RandomCrop(padding=1), RandomFlip(), RandomRotation(15)]
    losses: list[list[float]] = []
    with other_device.OtherDevice():
        for options in ({**ON, "accelerator": "cpu"}, ON):
            losses.append([])
            runs = (fed(), digits(augment=augment)), (fed(FedAvg, fine_tune="all"), digits(novel_clients=1))
            for federation, data in runs:
                pictures = Inspection().callbacks({}, without=[])
                for callback in pictures:
                    callback.dirpath = str(folder / options["accelerator"])
                loop, writer = FederatedLoop(), ResultsWriter(dirpath=str(folder))
                toy.quiet_trainer(2, loop, writer, *pictures, **options).fit(federation, datamodule=data)
                federation.client_model(1)
                losses[-1] += [score.loss for score in federation.test_scores.values()]
    names = [sorted(path.name for path in (folder / place).glob("*.png")) for place in ("cpu", other_device.NAME)]
    assert names[0] == names[1]
    return {
        "difference": max(abs(one - other) for one, other in zip(*losses, strict=True)),
        "pictures": len(names[1]),
    }


class Module(L.LightningModule):
    """A project's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.encoder(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def drop_in(folder: Path) -> dict[str, Any]:
    """A project's module and loaders under a method that works on its features."""
    found = load_digits()
    data = TensorDataset(torch.tensor(found.images).float() / 16, torch.tensor(found.target))
    train, rest = (DataLoader(Subset(data, part), batch_size=16) for part in (range(400), range(400, 600)))
    metrics = []
    for options in ({**ON, "accelerator": "cpu"}, ON):
        torch.manual_seed(0)
        loop, module = FederatedLoop(method=FedPAC, num_clients=3, head="head"), Module()
        trainer = toy.quiet_trainer(2, loop, **options)
        with other_device.OtherDevice():
            trainer.fit(module, train, rest)
            trainer.test(module, rest, verbose=False)
            trainer.predict(module, rest)
        metrics.append([score.logged["accuracy"] for score in loop.federation.test_scores.values()])
    return {"difference": max(abs(one - other) for one, other in zip(*metrics, strict=True))}


def private(folder: Path) -> dict[str, float]:
    """Rounds with privacy: the largest difference of any tensor."""
    os.environ["PFL_PRIVACY_SEED"] = "17"
    store, far = {"privacy": ClientPrivacy(0.5)}, [0.0]
    for method in (FedAvg, partial(FedPAC, combination=False), FedProto, DCPFL):
        made = partial(method, lr=0.01, epochs=1)
        here = toy.run(made, 2, loop=FederatedLoop(0.5), store=store)
        with other_device.OtherDevice():
            there = toy.run(made, 2, loop=FederatedLoop(0.5), store=store, **ON)
        states = toy.whole_state(here), toy.whole_state(there)
        far += [(states[0][n].double() - states[1][n].double()).abs().max().item() for n in states[0]]
    return {"difference": max(far)}


def main() -> None:
    """Run a case; the last line that is printed is its result."""
    (case,) = sys.argv[1:]
    warnings.simplefilter("ignore")
    other_device.install()
    rooms: list[int] = []  # as on a GPU with room for the data

    def free_memory(device: torch.device) -> int:
        rooms.append(1 << 30 if device.type == other_device.NAME else 0)
        return rooms[-1]

    data.free_memory = free_memory
    with tempfile.TemporaryDirectory() as folder:
        functions = {
            "augmented": augmented,
            "without_double": without_double,
            "resumed": resumed,
            "inspected": inspected,
            "drop_in": drop_in,
            "private": private,
        }
        found = under(case) if case in ENGINES else functions[case](Path(folder))
    print(json.dumps({"found": found, "products": other_device.products, "copied": sum(map(bool, rooms))}))


if __name__ == "__main__":
    main()
