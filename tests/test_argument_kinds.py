"""Numbers of a wrong kind in Python (a config is checked by its parser): each public class names the argument."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from pfl_lightning import callbacks, datamodules, engines, methods
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, FederatedDataModule

NEEDED = {"num_clients": 4, "partition": IID(4), "num_classes": 10, "batch_size": 8, "root": "absent"}
LORA = {"FFALoRA", "FedSALoRA"}  # take models with adapters alone


def encoder() -> nn.Module:
    """Ten features, as many as SphereFed needs for ten classes."""
    network = nn.Linear(16, 10)
    return network


def needed(cls: type) -> dict[str, Any] | None:
    """Arguments without defaults; None where there are others than the usual ones."""
    wanted = {
        name
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    known = NEEDED | ({"encoder": encoder()} if "encoder" in wanted else {})
    return {name: known[name] for name in wanted} if wanted <= known.keys() else None


def wrong(annotation: str) -> tuple[object, ...]:
    """Values of another kind than a parameter's annotation, or none."""
    kinds = set(annotation.replace(" ", "").split("|"))
    if not kinds <= {"int", "float", "None"}:
        return ()
    return (2.5, "3") if "float" not in kinds else ("0.1", math.nan)


def cases() -> Iterator[tuple[type, str, object]]:
    """Each class of clients, data and engines, and the loop, with each wrong number."""
    bases = (FederatedClient, FederatedDataModule, engines.Engine, datamodules.Partitioner, callbacks.FederatedLoop)
    for module in (methods, datamodules, engines, callbacks):
        for cls in (getattr(module, name) for name in module.__all__ if name not in LORA):
            if not (inspect.isclass(cls) and issubclass(cls, bases)) or inspect.isabstract(cls) or needed(cls) is None:
                continue
            for name, parameter in inspect.signature(cls.__init__).parameters.items():
                yield from ((cls, name, value) for value in wrong(str(parameter.annotation)))


CASES = list(cases())


def test_the_cases_cover_every_kind_of_class():
    assert {cls.__name__ for cls, _, _ in CASES} >= {"FedAvg", "IID", "Digits", "SequentialEngine", "FederatedLoop"}
    assert len(CASES) > 300


@pytest.mark.parametrize("name", sorted({cls.__name__ for cls, _, _ in CASES}))
def test_a_number_of_a_wrong_kind_is_refused_by_name(name):
    for cls, argument, value in (case for case in CASES if case[0].__name__ == name):
        with pytest.raises((TypeError, ValueError), match=argument.replace("_", "[_ ]")):
            cls(**(needed(cls) | {argument: value}))
