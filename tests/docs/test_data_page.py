"""docs/data.md names every data module, partition and augmentation, with the defaults that they have."""

import inspect
import re
from pathlib import Path

import pytest

from pfl_lightning import datamodules
from pfl_lightning.datamodules import Augmentation, FederatedDataModule, Partitioner

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


@pytest.mark.parametrize("base", [Augmentation, FederatedDataModule, Partitioner], ids=lambda base: base.__name__)
def test_every_class_has_a_row(base):
    found = [getattr(datamodules, name) for name in datamodules.__all__]
    concrete = [cls for cls in found if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)]
    names = {cls.__name__ for cls in concrete} - {base.__name__, "PartitionTransform"}
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 5
    assert names <= rows


def test_defaults_are_those_of_the_base():
    parameters = inspect.signature(FederatedDataModule.__init__).parameters
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w.]+) \|", PAGE, re.MULTILINE))
    assert {"validation_share", "test_share", "augment", "drop_last", "novel_clients", "seed"} <= rows.keys()
    for name, shown in rows.items():
        words = {"all": "None", "none": "None"}.get(shown, shown)
        assert str(parameters[name].default).lower() == words.lower()


def test_options_of_data_modules_are_named():
    for name in datamodules.__all__:
        cls = getattr(datamodules, name)
        if inspect.isclass(cls) and issubclass(cls, FederatedDataModule):
            options = inspect.signature(cls).parameters.values()
            named = [option.name for option in options if option.kind is not option.VAR_KEYWORD]
            assert [option for option in named if f"`{option}" not in PAGE] == []


@pytest.mark.parametrize("name", ["FromTable", "FromLEAF", "ClientFolders", "FromSilos"])
def test_clients_that_are_given_need_no_rule(name):
    assert "partition" not in inspect.signature(getattr(datamodules, name)).parameters
