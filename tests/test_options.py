"""The typed options of clients against the signatures they stand for."""

import inspect
from functools import partial
from typing import get_type_hints

import pytest
from _helpers.toy import SEED, for_toy, run
from jsonargparse import ArgumentParser

from pfl_lightning import Federation, methods
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import CIFAR10, IID, Digits, FederatedDataModule
from pfl_lightning.encoders.mlp import MLP
from pfl_lightning.names import parameters_of
from pfl_lightning.options import ClientOptions, DataOptions

GIVEN = {"self", "encoder", "num_classes", "return"}
UNPACKED = [method for method in methods.METHODS if "options" in inspect.signature(method.__init__).parameters]


def test_options_are_those_of_the_base():
    hints = get_type_hints(FederatedClient.__init__)
    assert get_type_hints(ClientOptions) == {name: hint for name, hint in hints.items() if name not in GIVEN}


@pytest.mark.parametrize("method", UNPACKED)
def test_a_method_names_all_other_options(method):
    """What a method takes itself and what it unpacks are together the base's options, without an overlap."""
    signature = inspect.signature(method.__init__)
    annotation = signature.parameters["options"].annotation
    unpacked = annotation.removeprefix("Unpack[").removesuffix("]")
    passed = set(get_type_hints(getattr(inspect.getmodule(method), unpacked)))
    own = set(signature.parameters) - GIVEN - {"options"}
    assert not passed & own
    unused = {"momentum"} if method is methods.FedClassAvg else set()  # its optimizer is Adam
    of_client = set(get_type_hints(ClientOptions))
    assert (passed | own) & of_client == of_client - unused
    assert passed <= set(parameters_of(method))  # those of the method's own base, too


@pytest.mark.parametrize("method", methods.METHODS)
def test_the_command_line_knows_options_and_defaults(method):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(method, "method", skip={"encoder", "num_classes"})
    parsed = parser.get_defaults().method.as_dict()
    made = method(MLP((4,)), 3)
    assert set(get_type_hints(ClientOptions)) <= set(parsed)
    for name in ("lr", "momentum", "weight_decay", "epochs", "fine_tune", "fine_tune_epochs", "fine_tune_lr"):
        assert parsed[name] == getattr(made, name), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, got 1.5"),
        ({"epochs": "2"}, "epochs must be a whole number of at least 1, got '2'"),
        ({"lr": "fast"}, "lr must be a finite number of at least 0, got 'fast'"),
        ({"weight_decay": None}, "weight_decay must be a finite number of at least 0, got None"),
        ({"momentum": 1.5}, "momentum must be at most 1, as steps would grow without end, got 1.5"),
    ],
)
def test_options_of_the_wrong_type_or_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        methods.FedAvg(MLP((4,)), 3, **options)


def test_signatures_have_all_options_with_their_defaults():
    """What `help` shows, of a method with own options, and of one with an own default of the base's."""
    shown = inspect.signature(methods.FedPAC).parameters
    base = {name: p.default for name, p in inspect.signature(FederatedClient.__init__).parameters.items()}
    assert list(shown)[:3] == ["encoder", "num_classes", "alignment"]
    assert {name: shown[name].default for name in base if name != "self"} == {
        k: v for k, v in base.items() if k != "self"
    }
    own = inspect.signature(methods.FedClassAvg).parameters["lr"].default
    assert own == inspect.signature(methods.FedClassAvg.__init__).parameters["lr"].default != base["lr"]
    assert "options" not in shown
    text, title = inspect.getdoc(methods.FedPAC) or "", methods.FedPAC.citation.title
    assert text.endswith(f"Paper: Xu et al. {title}. ICLR 2023.")


def test_data_options_are_those_of_the_data_module():
    signature = inspect.signature(FederatedDataModule.__init__).parameters
    named = {name for name, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    assert set(DataOptions.__annotations__) == named
    for name, annotation in DataOptions.__annotations__.items():
        assert annotation.__forward_arg__ == signature[name].annotation


@pytest.mark.parametrize("module", [Digits, CIFAR10])
def test_an_unknown_argument_of_data_is_refused_with_what_is_meant(module):
    with pytest.raises(TypeError, match=f"{module.__name__} has no argument 'batchsize'; did you mean 'batch_size'?"):
        module(IID(3), batchsize=3)
    assert "batchsize" not in inspect.signature(module).parameters


def test_representations_say_what_they_are():
    assert repr(Digits(IID(3), batch_size=10, augment=True)).endswith("batch_size=10, augment=True)")
    assert repr(FederatedLoop(0.5, min_clients=2)) == "FederatedLoop(cohort=0.5, min_clients=2)"
    federation = Federation(partial(methods.FedPAC, lr=0.1), "mlp", seed=3)
    assert repr(federation) == "Federation(FedPAC, lr=0.1, SequentialEngine, seed=3, not set up)"
    assert (
        repr(run(for_toy(methods.FedAvg, epochs=1)))
        == f"Federation(FedAvg, epochs=1, SequentialEngine, seed={SEED}, 5 clients)"
    )
