"""The page of hyper-parameters has every argument of every method, partition, augmentation and data module."""

import inspect
import re

import pytest
from arguments import constructor_arguments, documented_arguments
from hyperparameters import classes_of, hyperparameters_page

from pfl_lightning import FederatedClient
from pfl_lightning.datamodules import Augmentation, FederatedDataModule, Partitioner
from pfl_lightning.methods import ADAPTER_METHODS
from pfl_lightning.methods import METHODS as PLAIN_METHODS

METHODS = (*PLAIN_METHODS, *ADAPTER_METHODS)
PAGE = hyperparameters_page()
BASES = (Partitioner, Augmentation, FederatedDataModule)
CLASSES = [*METHODS, *(one for base in BASES for one in classes_of(base))]


def accepted(cls):
    """Names and defaults that a constructor accepts, found without the page's code: by walking up ``**kwargs``."""
    found = {}
    for owner in cls.__mro__:
        if "__init__" in vars(owner):
            named = inspect.getfullargspec(owner.__init__)
            positional = named.args[1:]
            defaults = dict(zip(positional[::-1], (named.defaults or ())[::-1], strict=False))
            defaults |= named.kwonlydefaults or {}
            for name in (*positional, *named.kwonlyargs):
                found.setdefault(name, defaults.get(name, inspect.Parameter.empty))
            if named.varkw is None:
                return found
    return found


def section(name):
    """Text below a heading of the page, up to the next."""
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no section {name}"
    return found.group(1)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_argument_has_its_default(cls):
    text = section(cls.__name__)
    arguments = {name: default for name, default in accepted(cls).items() if name not in ("encoder", "num_classes")}
    for name, default in arguments.items():
        if default is inspect.Parameter.empty:
            assert f"``{name}``" in text or cls not in METHODS, f"{name} is missing"
            continue
        shown = default.__name__ if callable(default) else repr(default)
        table = rf"\* - ``{name}``\n     - .*\n     - ``{re.escape(shown)}``\n"
        line = re.escape(f"`{name}` = `{shown}`")
        assert re.search(f"{table}|{line}", text), f"{cls.__name__}: {name} = {shown} is missing"


@pytest.mark.parametrize("cls", [FederatedClient, *CLASSES], ids=lambda cls: cls.__name__)
def test_every_argument_is_documented(cls):
    undocumented = [one.name for one in constructor_arguments(cls) if not one.meaning]
    assert not undocumented, f"{cls.__name__}: name {undocumented} in the Args of its docstring"


def test_papers():
    for method in METHODS:
        if method.citation is not None:
            assert f"{method.citation.title}. {method.citation.venue} {method.citation.year}." in section(
                method.__name__
            )


class Base:
    """A base.

    Args:
        rate: Learning rate, over
            two lines: with a colon.
        name: Its name.

    Raises:
        ValueError: Never.
    """

    def __init__(self, rate: float = 0.5, *, name: str = "base") -> None:
        self.rate, self.name = rate, name


class Derived(Base):
    """A class that passes options on and forgets one argument.

    Args:
        own: Its own.
        options: Further arguments of the base.
    """

    def __init__(self, own: int, forgotten: bool = True, **options: float) -> None:
        super().__init__(**options)
        self.own, self.forgotten = own, forgotten


def test_reading_a_docstring():
    assert documented_arguments(Base) == {"rate": "Learning rate, over two lines: with a colon.", "name": "Its name."}
    found = {one.name: (one.type, one.default, one.meaning, one.owner) for one in constructor_arguments(Derived)}
    assert found == {
        "own": ("int", None, "Its own.", Derived),
        "forgotten": ("bool", "True", "", Derived),
        "rate": ("float", "0.5", "Learning rate, over two lines: with a colon.", Base),
        "name": ("str", "'base'", "Its name.", Base),
    }
