"""A project's own Datasets and loaders, divided among clients."""

import pickle

import lightning as L
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pfl_lightning.datamodules import (
    IID,
    ConceptShift,
    DirichletOverClients,
    FeatureShift,
    FromFile,
    FromLoaders,
    PartitionError,
    Quantity,
    save_partition,
)
from pfl_lightning.datamodules.adapters.labels import classes_of

TRAIN, CLASSES = 60, 3


def tensors(number=TRAIN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, 2, generator=generator), torch.arange(number) % CLASSES)


class Texts(Dataset):
    """Dictionaries of tensors of different lengths."""

    def __init__(self, number=TRAIN):
        self.number, self.read = number, []

    def __len__(self):
        return self.number

    def __getitem__(self, place):
        self.read.append(place)
        return {"tokens": torch.arange(1, 2 + place % 4), "label": place % CLASSES, "place": place}


def padded(items):
    """By length, as a packed sequence needs them."""
    ordered = sorted(items, key=lambda item: -len(item["tokens"]))
    return {
        "tokens": pad_sequence([item["tokens"] for item in ordered], batch_first=True),
        "label": torch.tensor([item["label"] for item in ordered]),
        "place": torch.tensor([item["place"] for item in ordered]),
    }


class Project(L.LightningDataModule):
    """Loaders as they are given."""

    vocabulary = ("a", "b")

    def __init__(self, train=None, val=None, test=None, **options):
        super().__init__()
        self.sets, self.options, self.calls = {"train": train or tensors(), "val": val, "test": test}, options, []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return DataLoader(self.sets["train"], **{"batch_size": 8, "shuffle": True, **self.options})


class WithVal(Project):
    def val_dataloader(self):
        return DataLoader(self.sets["val"], batch_size=5)


class WithTest(Project):
    def test_dataloader(self):
        return DataLoader(self.sets["test"], batch_size=7)


class WithBoth(WithVal, WithTest):
    pass


def divided(datamodule, rule=None, **options):
    data = FromLoaders(rule or IID(4), datamodule=datamodule, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def parts(data):
    return [data.client_data(client) for client in range(data.num_clients)]


def test_every_item_is_at_one_client_and_the_loader_s_settings_hold():
    own = WithBoth(val=tensors(30, 1), test=tensors(45, 2), drop_last=True)
    data = divided(own)
    assert own.calls == ["prepare", "fit", "test"]
    assert (data.batch_size, data.eval_batch_size, data.drop_last, data.num_classes) == (8, 5, True, CLASSES)
    places = torch.cat([part.train.indices for part in parts(data)])
    assert sorted(places.tolist()) == list(range(TRAIN))
    for part in parts(data):
        assert part.validation.source.dataset is own.sets["val"]
        assert part.test.source.dataset is own.sets["test"]
        assert len(part.validation) > 0
        assert len(part.test) > 0


def test_evaluation_splits_have_the_classes_of_the_training_split():
    data = divided(WithBoth(val=tensors(60, 1), test=tensors(60, 2)), DirichletOverClients(4, alpha=0.2, seed=3))
    for part in parts(data):
        trained = part.train.class_counts(CLASSES)
        for other in (part.validation, part.test):
            counts = other.class_counts(CLASSES)
            assert not bool(counts[trained == 0].any())
            shares = counts / counts.sum(), trained / trained.sum()
            assert float((shares[0] - shares[1]).abs().max()) <= 1 / len(other) + 1e-6


@pytest.mark.parametrize(
    ("own", "validates", "tests", "trains"),
    [
        (WithVal(val=tensors(30)), "val", None, TRAIN),
        (WithTest(test=tensors(30)), "train", "test", TRAIN - 4 * 2),
        (Project(), "train", "train", 45 - 4),
    ],
    ids=["val", "test", "neither"],
)
def test_what_is_missing(own, validates, tests, trains, caplog):
    data = divided(own)
    assert sum(len(part.train) for part in parts(data)) == pytest.approx(trains, abs=4)
    seen = set()
    for part in parts(data):
        assert part.validation.source.dataset is own.sets[validates]
        assert len(part.validation) > 0
        assert (len(part.test) > 0) == (tests is not None)
        if tests is not None:
            assert part.test.source.dataset is own.sets[tests]
        seen |= {("train", place) for place in part.train.indices.tolist()}
    for part in parts(data):
        for other, name in ((part.validation, validates), (part.test, tests)):
            assert not seen & {(name, place) for place in other.indices.tolist()}
    assert ("neither val_dataloader nor test_dataloader" in caplog.text) == (type(own) is Project)


def test_a_share_that_is_given_is_taken_from_the_clients_own():
    own = WithBoth(val=tensors(30), test=tensors(30))
    for part in parts(divided(own, validation_share=0.2)):
        assert part.validation.source.dataset is own.sets["train"]
        assert len(part.validation) == 3


def test_batches_are_read_when_they_are_needed_and_collated_by_their_owner():
    texts = Texts()
    data = divided(WithVal(train=texts, val=Texts(30), collate_fn=padded))
    texts.read.clear()
    part = data.client_data(2).train
    loader = part.loader(data.batch_size, generator=torch.Generator().manual_seed(4), shuffle=True)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        expected = part.indices[torch.randperm(len(part), generator=generator)].split(8)
        for batch, places in zip(loader, expected, strict=True):
            assert sorted(batch["place"].tolist()) == sorted(places.tolist())
            lengths = (batch["tokens"] > 0).sum(1)
            assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
            assert batch["label"].tolist() == (batch["place"] % CLASSES).tolist()
    assert len(texts.read) == 2 * len(part)


def test_a_loader_that_does_not_shuffle_keeps_the_order():
    data = divided(WithVal(val=tensors(30), shuffle=False))
    part = data.client_data(0).train
    loader = part.loader(8, generator=torch.Generator(), shuffle=True)
    got = torch.cat([inputs for inputs, _ in loader])
    assert torch.equal(got, data.datamodule.sets["train"].tensors[0][part.indices])


class Targets(Dataset):
    """Items that cannot be read, with separate targets."""

    targets = (2, 0, 1, 1)

    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise AssertionError("the targets are known without it")


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


@pytest.mark.parametrize(
    ("dataset", "labels", "expected"),
    [
        (Targets(), None, [2, 0, 1, 1]),
        (Subset(Targets(), [3, 0]), None, [1, 2]),
        (Subset(Subset(Targets(), [3, 1, 0]), [2]), None, [2]),
        (TensorDataset(torch.zeros(2, 3), torch.ones(2), torch.tensor([[4], [1]])), None, [4, 1]),
        (TensorDataset(torch.zeros(2, 3)), None, None),
        (TensorDataset(torch.zeros(2, 3), torch.tensor([0.5, 1.0])), None, None),
        (Items([("x", 1), ("y", torch.tensor(2))]), None, [1, 2]),
        (Items([("x", np.int64(1)), ("y", True)]), None, [1, 1]),
        (Items([{"text": "x", "label": 1}, {"text": "y", "label": 0}]), None, [1, 0]),
        (Items([{"label": 1, "target": 0}]), None, None),
        (Items([("x", 1.5)]), None, None),
        (Items([("x", -1)]), None, None),
        (Items([("x", "cat")]), None, None),
        (Items([("x", 1, 2)]), None, None),
        (Items(["cat", "dog"]), lambda item: len(item) % 2, [1, 1]),
        (Subset(Items([("x", 5), ("y", 7)]), [1]), lambda item: item[1] - 5, [2]),
    ],
)
def test_classes(dataset, labels, expected):
    got = classes_of(dataset, labels)
    assert (None if got is None else got.tolist()) == expected


def test_public_samples_are_refused():
    with pytest.raises(ValueError, match=r"cannot set public here, where the data module's own .*use FromLightning"):
        FromLoaders(IID(4), datamodule=WithBoth(val=tensors(30, 1), test=tensors(45, 2)), public=5)


def test_labels_that_are_no_classes_are_refused():
    with pytest.raises(ValueError, match="labels must give a whole number from 0"):
        classes_of(tensors(), lambda item: float(item[0][0]))


REGRESSION = TensorDataset(torch.randn(TRAIN, 2), torch.randn(TRAIN))


@pytest.mark.parametrize("rule", [IID(4), Quantity(IID(4), sizes=(5, 10))])
def test_a_regression_is_divided_without_classes(rule):
    data = divided(WithVal(train=REGRESSION, val=REGRESSION), rule)
    assert data.num_classes == 0
    assert all(0 < len(part.train) <= 15 for part in parts(data))
    assert all(len(part.validation) > 0 for part in parts(data))


@pytest.mark.parametrize("rule", [DirichletOverClients(4), Quantity(DirichletOverClients(4), sizes=(5,))])
def test_a_rule_by_classes_needs_classes(rule):
    with pytest.raises(PartitionError, match=r"needs classes, .* regression use IID"):
        divided(WithVal(train=REGRESSION, val=REGRESSION), rule)


def test_the_partition_can_be_saved_and_read(tmp_path):
    own = WithBoth(val=tensors(30, 1), test=tensors(45, 2))
    first = divided(own, DirichletOverClients(4, seed=5))
    first.save_partition(tmp_path / "partition.npz")
    again = divided(own, FromFile(str(tmp_path / "partition.npz")))
    assert again.fingerprint == first.fingerprint
    for one, two in zip(parts(first), parts(again), strict=True):
        assert torch.equal(one.train.indices, two.train.indices)
        assert torch.equal(one.test.indices, two.test.indices)
        assert len(two.validation) == len(one.validation)


class Streamed(IterableDataset):
    def __iter__(self):
        return iter([1])


class Several(Project):
    def train_dataloader(self):
        return self.options["loaders"]


ONE = DataLoader(tensors())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (Several(loaders=[1, 2]), "gives a list, expected a DataLoader, or a list, a dictionary or a CombinedLoader"),
        (Several(loaders=range(3)), "gives a range, expected a DataLoader"),
        (Several(loaders={"a": ONE, "b": None}), "gives a NoneType, expected a DataLoader"),
        (Several(loaders=DataLoader(Streamed())), "loads a Streamed, which cannot be indexed"),
        (
            Several(loaders=DataLoader(tensors(), sampler=[(0, 1), (2, 3)])),
            "has a list, which gives tuples instead of item indices: .* a list of loaders, one for each client",
        ),
    ],
)
def test_loaders_that_cannot_be_divided(own, message):
    with pytest.raises(TypeError, match=message):
        divided(own)


def test_a_single_loader_in_a_list_is_taken():
    assert divided(Several(loaders=[DataLoader(tensors(), batch_size=9)])).batch_size == 9


@pytest.mark.parametrize("rule", [ConceptShift(IID(4)), FeatureShift(IID(4))])
def test_views_need_data_that_the_package_reads(rule):
    with pytest.raises(ValueError, match=r"FromDatasets|FeatureShift"):
        divided(WithVal(val=tensors(30)), rule)


def test_drop_last_needs_a_batch_for_every_client():
    with pytest.raises(PartitionError, match="drop_last leaves client 0 no batch"):
        divided(WithVal(val=tensors(30), drop_last=True), IID(10))


@pytest.mark.parametrize("option", ["augment", "batch_size", "drop_last", "mean"])
def test_what_the_project_says_itself_is_no_option(option):
    with pytest.raises(ValueError, match=f"cannot set {option} here, where the data module's own"):
        FromLoaders(IID(2), datamodule=Project(), **{option: 1})


def test_what_it_does_not_have_is_the_project_s():
    data = divided(WithVal(val=tensors(30)))
    assert data.vocabulary == ("a", "b")
    with pytest.raises(AttributeError, match="WithVal"):
        data.nothing_of_the_kind  # noqa: B018


def test_encoders_need_data_of_a_known_shape():
    from _helpers.toy import quiet_trainer

    from pfl_lightning import Federation
    from pfl_lightning.methods import FedAvg

    federation = Federation(FedAvg, "mlp")
    data = FromLoaders(IID(2), datamodule=WithVal(val=tensors(30)))
    with pytest.raises(ValueError, match="an encoder needs FromLightning or FromDatasets"):
        quiet_trainer(1).fit(federation, datamodule=data)


def test_it_survives_pickling():
    data = divided(WithVal(val=tensors(30)))
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.client_data(1).train.indices, data.client_data(1).train.indices)
    assert again.vocabulary == ("a", "b")


@pytest.mark.parametrize("listed", [True, False])
def test_nothing_is_said_to_be_held_out_by_a_share_where_a_file_lists_the_items(tmp_path, caplog, listed):
    save_partition(tmp_path / "lists.npz", [np.arange(20), np.arange(20, 40)], [np.arange(40, 50), np.arange(50, 60)])

    class Alone(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(tensors(), batch_size=8, shuffle=True)

    rule = FromFile(str(tmp_path / "lists.npz")) if listed else IID(2)
    data = FromLoaders(rule, datamodule=Alone())
    data.setup()
    assert ("held out for tests" in caplog.text) != listed
    assert len(data.client_data(0).test) > 0
