"""Numbers of a wrong kind in Python (a config is checked by its parser): each public class names the argument."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from pfl_lightning import Federation, callbacks, datamodules, engines, methods
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, ColorJitter, Digits, DominantClasses, FederatedDataModule, RandomRotation
from pfl_lightning.phases import Phase

NEEDED = {"num_clients": 4, "partition": IID(4), "num_classes": 10, "batch_size": 8, "root": "absent"}
LEFT_OUT = {"FFALoRA", "FedSALoRA", "ClientFolders"}  # take models with adapters alone; reads its folder first


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
    return (2.5, "3", True) if "float" not in kinds else ("0.1", math.nan, True)


def cases() -> Iterator[tuple[type, str, object]]:
    """Each class of clients, data and engines, and the loop, with each wrong number."""
    bases = (FederatedClient, FederatedDataModule, engines.Engine, datamodules.Partitioner, callbacks.FederatedLoop)
    for module in (methods, datamodules, engines, callbacks):
        for cls in (getattr(module, name) for name in module.__all__ if name not in LEFT_OUT):
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Federation(methods.FedAvg, "mlp", engine="ray"), r"engine must be an engine, .* got 'ray'"),
        (lambda: Federation(methods.FedAvg, "mlp", engine=engines.RayEngine), "engine must be an engine"),
        (lambda: Federation(methods.FedAvg, "mlp", seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: Federation(methods.FedAvg, "mlp", seed=1.5), "seed must be a whole number of at least 0, got 1.5"),
        (lambda: Digits(IID(2), seed="x"), "seed must be a whole number of at least 0, got 'x'"),
        (lambda: Digits(IID(2), validation_share="a"), "validation_share must be between 0 and 1"),
        (lambda: Digits(IID(2), test_share=None), "test_share must be between 0 and 1, got None"),
        (lambda: Digits(IID(2), batch_size=True), "batch_size must be a whole number of at least 1, got True"),
        (lambda: IID(True), "num_clients must be a whole number of at least 1, got True"),
        (lambda: DominantClasses(2, samples_per_client="a"), "samples_per_client must be a whole number from 1"),
        (lambda: RandomRotation("a"), "degrees must be between 0 and 360, got 'a'"),
        (lambda: ColorJitter("a"), "brightness must be a finite number of at least 0, got 'a'"),
        (lambda: callbacks.FederatedLoop(full_participation_in_last_round="no"), "must be one of .True, False.*'no'"),
        (lambda: Phase("head", epochs="a").check_numbers(), "epochs of the phase 'head' must be a whole number"),
        (lambda: Phase("head", lr="a").check_numbers(), "lr of the phase 'head' must be a finite number"),
    ],
)
def test_other_arguments_of_a_wrong_kind(make, message):
    with pytest.raises(ValueError, match=message):
        make()
