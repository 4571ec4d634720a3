"""The data module: every client gets its own samples, and no client another's."""

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from pfl_lightning.datamodules import (
    IID,
    Digits,
    DirichletOverClients,
    DominantClasses,
    FederatedDataModule,
    FromFile,
    Partitioner,
    PartitionError,
    RandomCrop,
    Samples,
)


class Toy(FederatedDataModule):
    """Inputs that say which sample they are: training samples 0, 1, ..., test samples 1000, 1001, ..."""

    def __init__(self, partition, *args, size=120, test_size=90, classes=3, **kwargs):
        super().__init__(partition, *args, **kwargs)
        self.size, self.test_size, self.classes, self.loads = size, test_size, classes, 0

    def load(self):
        self.loads += 1
        names = tuple(f"class {c}" for c in range(self.classes))

        def numbered(size, start):
            return torch.arange(start, start + size, dtype=torch.float32)[:, None], torch.arange(size) % self.classes

        test = numbered(self.test_size, 1000) if self.test_size else (None, None)
        return Samples(*numbered(self.size, 0), names, *test)


class Pair(FederatedDataModule):
    def load(self):
        return torch.zeros(4, 2), torch.zeros(4)


def test_a_load_that_returns_no_samples():
    with pytest.raises(ValueError, match=r"Pair\.load must return Samples, got tuple"):
        Pair(IID(2)).setup("fit")


def ready(*args, **kwargs) -> Toy:
    data = Toy(*args, **kwargs)
    data.setup("fit")
    return data


def seen_by(data, client):
    own = data.client_data(client)
    return [set(part.loader(7).tensors()[0].flatten().int().tolist()) for part in (own.train, own.validation, own.test)]


@pytest.mark.parametrize("test_size", [90, 0])
@pytest.mark.parametrize("rule", [IID(6), DominantClasses(6, 12), DirichletOverClients(6, 0.1)])
def test_no_client_sees_anothers_data_and_tests_are_never_trained_on(rule, test_size):
    data = ready(rule, test_size=test_size)
    trained = [train | validation for train, validation, _ in (seen_by(data, k) for k in range(6))]
    assert sum(map(len, trained)) == len(set().union(*trained))
    for client in range(6):
        train, validation, test = seen_by(data, client)
        assert not train & validation
        assert train
        assert test
        assert not test & set().union(*trained)
        assert all((sample >= 1000) == bool(test_size) for sample in test)
        assert all(sample < 1000 for sample in train | validation)


def test_setup_loads_once_and_reports_what_is_there():
    data = Toy(IID(4), validation_share=0.2)
    assert data.num_clients == 4
    with pytest.raises(RuntimeError, match="Toy has no data yet: call setup"):
        _ = data.num_classes
    data.setup("fit")
    data.setup("test")
    assert data.loads == 1
    assert data.num_classes == 3
    assert data.input_shape == (1,)
    assert data.class_names == ("class 0", "class 1", "class 2")
    assert [len(data.client_data(client).train) for client in range(4)] == [24] * 4
    assert data.class_counts().sum(axis=1).tolist() == [24] * 4
    with pytest.raises(IndexError, match="no client 4: the partition has clients 0 to 3"):
        data.client_data(4)


def test_validation_is_a_stratified_share_that_leaves_every_class_a_training_sample():
    data = ready(IID(1), validation_share=0.25, size=120)
    own = data.client_data(0)
    assert own.validation.class_counts(3).tolist() == [10, 10, 10]
    few = ready(IID(40), validation_share=0.9, size=120)  # three samples a client
    for client in range(40):
        own = few.client_data(client)
        held = own.train.class_counts(3) + own.validation.class_counts(3)
        assert ((own.train.class_counts(3) > 0) == (held > 0)).all()
    assert len(ready(IID(2), validation_share=0.0).client_data(0).validation) == 0


@pytest.mark.parametrize("ending", [".npz", ".json"])
@pytest.mark.parametrize("test_size", [90, 0])
def test_a_saved_partition_gives_the_same_splits(tmp_path, ending, test_size):
    data = ready(DirichletOverClients(5, 0.3, seed=3), test_size=test_size, seed=1)
    path = tmp_path / f"partition{ending}"
    data.save_partition(path)
    again = ready(FromFile(str(path)), test_size=test_size, seed=2)
    for client in range(5):
        assert seen_by(again, client) == seen_by(data, client)


def test_a_file_counts_the_data_sets_own_order(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"train": [[5, 3], [8, 100]], "test": [[1], [7, 2]]}')
    with_test = ready(FromFile(str(path)), validation_share=0.0)
    assert seen_by(with_test, 1) == [{8, 100}, set(), {1007, 1002}]
    whole = ready(FromFile(str(path)), validation_share=0.0, test_size=0)
    assert seen_by(whole, 1) == [{8, 100}, set(), {7, 2}]
    path.write_text('{"train": [[5, 3], [8, 100]]}')
    drawn = ready(FromFile(str(path)), validation_share=0.0, test_size=0)
    assert not seen_by(drawn, 0)[2] & {5, 3, 8, 100}
    path.write_text('{"train": [[5, 3], [8, 100]], "test": [[8], [7]]}')
    with pytest.raises(PartitionError, match=r"1 samples are both in a training and in a test split \(the first: 8\)"):
        ready(FromFile(str(path)), test_size=0)


def test_clients_without_samples_and_batches_that_never_fill_are_named():
    class Empty(Partitioner):
        def partition(self, labels):
            return [np.arange(5), np.zeros(0, dtype=np.int64)]

    with pytest.raises(PartitionError, match=r"client\(s\) \[1\] have no training samples"):
        ready(Empty(2))
    with pytest.raises(PartitionError, match=r"client 0 no batch \(4 such clients\): it has 27 training samples"):
        ready(IID(4), 50, drop_last=True)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        Toy(IID(4), 0)
    with pytest.raises(ValueError, match="validation_share"):
        Toy(IID(4), validation_share=1.5)
    with pytest.raises(ValueError, match=r"augment needs images of shape \(C, H, W\)"):
        ready(IID(4), augment=True)


def test_normalization_measures_the_training_pool():
    data = Digits(IID(4), augment=True)
    data.setup()
    inputs = torch.cat([torch.cat([x for x, _ in data.client_data(k).train.loader(50)]) for k in range(4)])
    assert abs(float(inputs.mean())) < 0.02
    assert abs(float(inputs.std()) - 1) < 0.02
    assert data.transform.augmentations == (RandomCrop(1),)
    given = Digits(IID(4), mean=[0.5], std=[0.25])
    given.setup()
    assert given.transform.mean == (0.5,)
    plain = Digits(IID(4), normalize=False)
    plain.setup()
    assert plain.client_data(0).train.loader(9).tensors()[0].max() == 1.0
    assert plain.input_shape == (1, 8, 8)


def test_loaders_give_client_ids_and_the_rounds_cohort():
    data = ready(IID(5))
    assert [batch.tolist() for batch in data.train_dataloader()] == [[0], [1], [2], [3], [4]]
    assert [batch.tolist() for batch in data.val_dataloader()] == [[0], [1], [2], [3], [4]]
    assert len(data.test_dataloader()) == 5
    data.cohort = lambda round_: [4, 0, 2]
    assert [batch.tolist() for batch in data.train_dataloader()] == [[4], [0], [2]]


def test_the_trainer_sees_a_new_cohort_every_epoch():
    class Record(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.ids = []

        def training_step(self, ids, batch_idx):
            self.ids.append((self.trainer.current_epoch, *ids.tolist()))

        def configure_optimizers(self):
            return None

    data, module = Toy(IID(6)), Record()
    data.cohort = {0: [0, 3], 1: [1, 4], 2: [2, 5]}.__getitem__  # no other round is asked for
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "reload_dataloaders_every_n_epochs": 1,  # as FederatedLoop sets it
    }
    with pytest.warns(UserWarning, match=r"Record is not a federation, .*what federate returns"):
        L.Trainer(max_epochs=3, **options).fit(module, data)
    assert module.ids == [(0, 0), (0, 3), (1, 1), (1, 4), (2, 2), (2, 5)]


def test_the_warning_comes_before_the_validation_of_a_module_that_is_no_federation():
    class Plain(L.LightningModule):
        def training_step(self, batch, batch_idx):
            _inputs, _classes = batch

        validation_step = training_step

        def configure_optimizers(self):
            return None

    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with (
        pytest.warns(UserWarning, match="Plain is not a federation"),
        pytest.raises(ValueError, match="unpack"),
    ):
        trainer.fit(Plain(), Toy(IID(6)))


def test_every_option_is_known_to_the_command_line():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    data = ["--data=pfl_lightning.datamodules.Digits", "--data.partition=pfl_lightning.datamodules.IID"]
    options = ["--data.partition.num_clients=3", "--data.validation_share=0.3", "--data.mean=[0.5]", "--data.std=[1.0]"]
    built = parser.parse_args([*data, *options]).data.init_args
    assert built.validation_share == 0.3
    assert built.partition.init_args.num_clients == 3
    with pytest.raises(Exception, match="validatoin_share"):
        parser.parse_args([*data, "--data.validatoin_share=0.3"])


@pytest.mark.parametrize("rule", [3, IID], ids=["number", "class"])
def test_a_partition_that_is_no_rule(rule):
    with pytest.raises(TypeError, match=r"partition must be a rule, such as IID\(num_clients=10\), got "):
        Pair(rule)
