"""mypy from a user's project: arguments of the package are checked, wherever and however it is installed.

The test takes over 10 s: mypy checks the package from a user's project, without a cache.
"""

import importlib.util
import re
import subprocess
import sys

import pytest

# Lines that end with "wrong" must be errors, the others must not.
PROJECT = """
import pfl_lightning
from pfl_lightning import Federation, FederatedLoop, ResultsWriter
from pfl_lightning.datamodules import CIFAR10, Digits, DirichletOverClients, DomainFolders
from pfl_lightning.methods import Calibre, DualFed, FedAvg, FedBABU, FedClassAvg, FedPAC
from torch import nn


class MyMethod(FedAvg):
    shared = ("encoder.*",)


def loop() -> FederatedLoop:
    return FederatedLoop(cohort=0.5)


def methods(encoder: nn.Module) -> None:
    FedPAC(encoder, 10, lr=0.1, epochs=2, head_lr=0.1, eval_model="trained")
    FedPAC(encoder, 10, lr="high")  # wrong
    FedPAC(encoder, 10, learning_rate=0.1)  # wrong
    FedAvg(encoder, 10, epochs="2")  # wrong
    MyMethod(encoder, 10, fine_tune="head", fine_tune_lr=None)
    MyMethod(encoder, "ten")  # wrong
    Calibre(encoder, 10, lr=0.1, epochs=3, fine_tune_epochs=1)
    Calibre(encoder, 10, epochs=None)  # wrong
    FedBABU(encoder, 10, fine_tune_epochs=1, momentum=0.9)
    FedClassAvg(encoder, 10, lr=0.1, momentum=0.9)  # wrong
    DualFed(encoder, 10, momentum=0.9)
    DualFed(encoder, 10, momentum="much")  # wrong
    pfl_lightning.methods.FedProx(encoder, 10, mu=0.1, lr=0.1)
    pfl_lightning.methods.FedProx(encoder, 10, mu="0.1")  # wrong
    pfl_lightning.methods.FedNothing(encoder, 10)  # wrong


FederatedLoop(cohort="abc")  # wrong
FederatedLoop(cohort=10)
ResultsWriter(dirpath=1)  # wrong
pfl_lightning.callbacks.FederatedLoop(cohort="abc")  # wrong
Digits(DirichletOverClients(10, alpha=0.3), batch_size=32)
Digits(DirichletOverClients(10, alpha=0.3), batch_size="32")  # wrong
Digits(DirichletOverClients(10, alpha=0.3), batchsize=32)  # wrong
CIFAR10(DirichletOverClients(10, alpha=0.3), root="data", validation_share=0.2)
CIFAR10(DirichletOverClients(10, alpha=0.3), validation_part=0.2)  # wrong
CIFAR10(DirichletOverClients(10, alpha=0.3), validation_share="some")  # wrong
DomainFolders(DirichletOverClients(10, alpha=0.3), root="data", image_size=64, augment=True)
DomainFolders(DirichletOverClients(10, alpha=0.3), root="data", image_size="64")  # wrong
pfl_lightning.datamodules.DirichletOverClients("ten")  # wrong
reveal_type(loop())
"""

SETTINGS = """
[mypy]
strict = true
{frameworks}
"""

# Their many files are what takes mypy's time; without them a class of theirs is Any.
FRAMEWORKS = "".join(
    f"\n[mypy-{name}.*]\nfollow_imports = skip\nfollow_imports_for_stubs = true"
    for name in ("torch", "lightning", "torchmetrics", "torchvision", "ray", "numpy", "cvxpy", "matplotlib", "sklearn")
)


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy (pip install mypy)")
def test_a_users_project(tmp_path):
    (tmp_path / "train.py").write_text(PROJECT)
    (tmp_path / "mypy.ini").write_text(SETTINGS.format(frameworks=FRAMEWORKS))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "train.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    lines = PROJECT.splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    errors = {int(number) for number in re.findall(r"^train\.py:(\d+): error:", found.stdout, re.MULTILINE)}
    assert {lines[number - 1] for number in errors} == {lines[number - 1] for number in wrong}, found.stdout
    assert 'Revealed type is "pfl_lightning.callbacks.loop.FederatedLoop"' in found.stdout
