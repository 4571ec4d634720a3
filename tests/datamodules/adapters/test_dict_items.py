"""Data sets whose items are dictionaries, as those of Hugging Face's `datasets`, read into tensors."""

import numpy as np
import pytest
import torch
from PIL import Image

from pfl_lightning.datamodules import IID, FromDatasets


class Rows:
    """A map-style data set of dictionaries: pictures and classes under the given keys."""

    def __init__(self, image="image", **labels):
        self.image, self.labels = image, labels or {"label": 1}

    def __len__(self):
        return 40

    def __getitem__(self, place):
        pixels = np.full((4, 4), place, dtype=np.uint8)
        return {self.image: Image.fromarray(pixels), **{key: place % 4 * by for key, by in self.labels.items()}}


def read(**options):
    data = FromDatasets(IID(num_clients=2), validation_share=0.0, **options)
    data.setup()
    return data


@pytest.mark.parametrize("dataset", [Rows(), Rows("img", labels=1), Rows("pixel_values", target=1)])
def test_usual_names_are_found(dataset):
    data = read(train=dataset, test=dataset)
    assert (data.num_classes, data.input_shape) == (4, (1, 4, 4))
    inputs, targets = next(iter(data.client_data(0).test.loader(batch_size=40)))
    assert len(inputs) == len(targets) == 40 or len(inputs) == len(targets) == 20


def test_keys_say_which():
    dataset = Rows("img", label=0, fine_label=1)
    assert read(train=dataset, keys=("img", "fine_label")).num_classes == 4
    assert read(train=dataset, keys=("img", "label"), class_names=["all"]).num_classes == 1


def test_the_entries_are_those_of_pairs():
    dataset = Rows()
    pairs = [(item["image"], item["label"]) for item in (dataset[place] for place in range(len(dataset)))]
    one, two = (read(train=found).client_data(1).train for found in (dataset, pairs))
    batches = [next(iter(split.loader(batch_size=16))) for split in (one, two)]
    assert all(torch.equal(*parts) for parts in zip(*batches, strict=True))


def test_unlabeled_items():
    data = read(train=Rows(), unlabeled=Rows("image", other=1))
    assert sum(data.unlabeled_sizes) == 40


@pytest.mark.parametrize("dataset", [Rows("picture"), Rows("img", fine_label=1, coarse_label=2)])
def test_unusual_names_are_asked_for(dataset):
    with pytest.raises(TypeError, match=r"item 0 of the training set has the entries .*: say which .* keys=\("):
        read(train=dataset)


def test_a_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    rows = {"image": [[[float(k)] * 2] * 2 for k in range(20)], "label": [k % 2 for k in range(20)]}
    dataset = datasets.Dataset.from_dict(rows).with_format("torch")
    assert read(train=dataset).num_classes == 2
