"""Data that train without an error and probably not as meant: labels, inputs that are not finite, unused items."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from _helpers.toy import GivenParts
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning.datamodules import (
    IID,
    ClassesPerClient,
    FederatedDataModule,
    FromDatasets,
    FromSilos,
    Partitioner,
    Samples,
)
from pfl_lightning.datamodules.partition.base import check_parts


class Given(FederatedDataModule):
    """Samples that a test gives."""

    samples: Samples

    def load(self) -> Samples:
        return self.samples


@pytest.fixture(autouse=True)
def _any_other_warning_fails() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _pairs(labels: list[int]) -> TensorDataset:
    return TensorDataset(torch.rand(len(labels), 3), torch.tensor(labels))


def _set_up(samples: Samples, rule: Partitioner | None = None) -> Given:
    data = Given(rule or IID(num_clients=2))
    data.samples = samples
    data.setup()
    return data


def test_labels_from_one_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"labels go from 1 to 3.*no item has class 0.*subtract 1"):
        FromDatasets(IID(num_clients=2), train=_pairs([1, 2, 3] * 10)).setup()
    with pytest.raises(ValueError, match=r"10 of 30 targets are outside \(the first: item 2\); subtract 1"):
        Samples(torch.rand(30, 3), torch.tensor([1, 2, 3] * 10), ("a", "b", "c"))


def test_named_classes_may_be_absent() -> None:
    data = FromDatasets(IID(num_clients=2), train=_pairs([1, 2, 3] * 10), class_names="wxyz")
    data.setup()
    assert data.num_classes == 4
    own = _pairs([0, 1] * 10)
    own.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    other = FromDatasets(IID(num_clients=2), train=own)
    other.setup()
    assert other.num_classes == 3


def test_a_stray_last_label_is_named_with_its_set_and_item() -> None:
    usual = [0, 1, 2, 3] * 30
    with pytest.warns(UserWarning, match=r"label 4 occurs in only 1 of 145 items, in the test set \(first: item 7"):
        FromDatasets(IID(num_clients=2), train=_pairs(usual), test=_pairs([*usual[:7], 4, *usual[:17]])).setup()
    silos = [DataLoader(_pairs(usual)) for _ in range(3)]
    silos[1] = DataLoader(_pairs([*usual, 4]))
    with pytest.warns(UserWarning, match="label 4 occurs in only 1 of 361 items, in the train set of client 1"):
        FromSilos(silos).setup()


def test_silos_with_labels_from_one_warn_and_run() -> None:
    data = FromSilos([_pairs([1, 2] * 10), _pairs([1, 2] * 10)])
    with pytest.warns(UserWarning, match="no item has class 0"):
        data.setup()
    assert data.num_classes == 3


def test_training_items_of_a_single_class_are_named() -> None:
    with pytest.warns(UserWarning, match="all 20 training items have class 1"):
        _set_up(Samples(torch.rand(20, 3), torch.ones(20, dtype=torch.int64), ("a", "b")))


@pytest.mark.parametrize("part", ["train_inputs", "test_inputs", "unlabeled_inputs"])
def test_inputs_of_every_part_are_checked_once(part: str) -> None:
    parts = {name: torch.rand(20, 3) for name in ("train_inputs", "test_inputs", "unlabeled_inputs")}
    parts[part][4:, 1] = float("nan")
    labels = torch.arange(20) % 2
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data = _set_up(Samples(train_targets=labels, test_targets=labels, class_names=("a", "b"), **parts))
    said = [str(warning.message) for warning in found]
    names = {"train_inputs": ["training", "validation"]}.get(part, [part.removesuffix("_inputs")])
    assert [text.split()[0] for text in said] == names
    assert all("items of client 0 and 1 more have values that are not finite (16 of 20 items" in text for text in said)
    assert data.num_classes == 2


def test_items_that_a_rule_leaves_unused_are_counted() -> None:
    labels = torch.arange(600) % 10
    samples = Samples(torch.rand(600, 3), labels, tuple("0123456789"), torch.rand(100, 3), labels[:100])
    rule = ClassesPerClient(num_clients=7, classes_per_client=3)
    used = len(np.unique(np.concatenate(rule.partition(labels.numpy()))))
    assert used < 600
    with pytest.warns(UserWarning, match=f"ClassesPerClient leaves {600 - used} of 600 training items"):
        data = _set_up(samples, rule)
    size = len(data.client_data(0).train) + len(data.client_data(0).validation)
    asked = _set_up(samples, ClassesPerClient(num_clients=7, classes_per_client=3, samples_per_client=size))
    assert asked.fingerprint == data.fingerprint  # the sizes that were asked for need no warning


def test_validation_items_of_a_rule_are_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_parts(GivenParts([6, 4], [5, 5], [1, 1]), [np.arange(6), np.arange(6, 10)], 20)
    with pytest.warns(UserWarning, match="GivenParts leaves 3 of 23 training items unused with 2 clients"):
        check_parts(GivenParts([6, 4], [5, 5], [1, 1]), [np.arange(6), np.arange(6, 10)], 23)
