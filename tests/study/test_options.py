"""Configs that are merged, and options that are read and changed."""

import pytest

from pfl_lightning.runs.config import option_of
from pfl_lightning.study.options import merge, with_option


def test_mappings_are_merged_key_by_key_and_lists_are_replaced():
    below = {"trainer": {"max_epochs": 5, "callbacks": [1]}, "seed": 0}
    assert merge(below, {"trainer": {"callbacks": [2]}}) == {"trainer": {"max_epochs": 5, "callbacks": [2]}, "seed": 0}
    assert below["trainer"]["callbacks"] == [1]


@pytest.mark.parametrize(
    ("above", "kept"),
    [("FedAvg", True), ("pfl_lightning.methods.FedAvg", True), ("FedPer", False), (None, True)],
)
def test_another_class_replaces_the_arguments(above, kept):
    below = {"class_path": "pfl_lightning.methods.FedAvg", "init_args": {"lr": 0.1}}
    merged = merge(below, {"init_args": {"epochs": 2}} | ({"class_path": above} if above else {}))
    assert merged["init_args"] == ({"lr": 0.1, "epochs": 2} if kept else {"epochs": 2})


@pytest.mark.parametrize(
    ("one", "other", "kept"),
    [
        ("mine.small.Net", "mine.big.Net", False),
        ("mine.small.Net", "Net", True),
        ("pfl_lightning.methods.FedAvg", "pfl_lightning.methods.fedavg.FedAvg", True),
        ("torch.optim.SGD", "torch.optim.sgd.SGD", True),
        ("torch.optim.SGD", "mine.SGD", False),
    ],
)
def test_classes_of_one_name_are_one_only_where_they_must_be(one, other, kept):
    merged = merge({"class_path": one, "init_args": {"lr": 0.1}}, {"class_path": other})
    assert ("init_args" in merged) is kept


def test_arguments_below_without_a_class_are_those_of_any_class():
    assert merge({"init_args": {"lr": 0.1}}, {"class_path": "FedPer"}) == {
        "init_args": {"lr": 0.1},
        "class_path": "FedPer",
    }


def test_arguments_over_the_name_of_a_class():
    assert merge("mlp", {"init_args": {"hidden": 3}}) == {"class_path": "mlp", "init_args": {"hidden": 3}}
    assert with_option({"encoder": "mlp"}, "encoder.init_args.hidden", 3)["encoder"]["class_path"] == "mlp"
    assert merge({"class_path": "mlp"}, "small_cnn") == "small_cnn"


def test_options_beside_a_class_are_its_arguments():
    digits = {"data": {"class_path": "Digits", "init_args": {"batch_size": 3}}}
    found = merge(digits, {"data": {"partition": {"num_clients": 3}}})
    assert found["data"]["init_args"] == {"batch_size": 3, "partition": {"num_clients": 3}}
    assert merge(digits, {"data": {"init_args": {"batch_size": 5}, "seed": 1}})["data"] == {
        "class_path": "Digits",
        "init_args": {"batch_size": 5, "seed": 1},
    }
    assert merge({}, {"class_path": "Digits", "seed": 1}) == {"class_path": "Digits", "init_args": {"seed": 1}}


def test_the_name_of_the_same_class_leaves_it_its_arguments():
    method = {"class_path": "FedAvg", "init_args": {"lr": 0.05}}
    for name in ("FedAvg", "pfl_lightning.methods.FedAvg"):
        assert merge({"method": method}, {"method": name}) == {"method": method}
    assert merge({"method": method}, {"method": "FedProx"}) == {"method": "FedProx"}
    assert with_option({"model": {"method": method}}, "model.method", "FedAvg") == {"model": {"method": method}}
    assert merge({"class_path": "FedAvg", "lr": 1}, "FedAvg") == "FedAvg"  # no class with arguments


def test_options_are_read_and_set_with_and_without_init_args():
    config = {"data": {"class_path": "Digits", "init_args": {"batch_size": 10}}}
    assert option_of(config, "data.init_args.batch_size") == option_of(config, "data.batch_size") == 10
    assert option_of(config, "data.init_args.seed") is None
    assert with_option(config, "data.batch_size", 5) == with_option(config, "data.init_args.batch_size", 5)
    assert option_of(with_option(config, "data.partition.class_path", "IID"), "data.partition.class_path") == "IID"
    assert with_option({"a": [1]}, "a+", 2) == {"a": [1, 2]}
