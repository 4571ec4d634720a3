"""A script that tests what ``load_from_checkpoint`` gave: the clients as they were in that round."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from _helpers.project import SEED, Data, Net
from _helpers.toy import Toy, assert_same, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg, FedPer


def fitted(tmp_path: Any, weights_only: bool = True, **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """A Trainer after three rounds, with the file of the first, and loaders."""
    samples = Toy().load()
    train = DataLoader(TensorDataset(samples.train_inputs, samples.train_targets), 8)
    test = DataLoader(TensorDataset(samples.test_inputs, samples.test_targets), 7)
    kept = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_weights_only=weights_only)
    loop, module = FederatedLoop(method=FedPer, num_clients=3, seed=SEED, **options), Net()
    trainer = quiet_trainer(3, kept, loop, enable_checkpointing=True)
    trainer.fit(module, train, test)
    return trainer, loop, module, test, str(tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_loaded_module_is_the_federation_of_its_round(tmp_path, weights_only):
    trainer, loop, module, test, path = fitted(tmp_path, weights_only)
    before = loop.federation.client_model(1).state_dict()
    last = trainer.test(module, test, verbose=False)
    loaded = Net.load_from_checkpoint(path)
    first = trainer.test(loaded, test, verbose=False)
    assert first == trainer.test(loaded, test, verbose=False) != last
    assert trainer.validate(loaded, test, verbose=False)[0]["val_loss"] == pytest.approx(first[0]["test_loss"])
    # The one that was fitted is as it was.
    assert trainer.test(module, test, verbose=False) == last
    after = loop.federation.client_model(1).state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    # The heads are the clients' own of that round.
    assert first == trainer.test(module, test, ckpt_path=path, verbose=False)


def test_another_instance_of_the_data_module_leaves_the_federation_of_the_fit(tmp_path):
    """As in a script that makes its data module again for the test."""
    kept = ModelCheckpoint(tmp_path, save_weights_only=True)
    loop, module = FederatedLoop(method=FedPer, num_clients=3, seed=SEED), Net()
    trainer = quiet_trainer(2, kept, loop, enable_checkpointing=True)
    trainer.fit(module, Data())
    federation, expected = loop.federation, trainer.test(module, Data(), verbose=False)
    heads = federation.client_model(1).state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every client is evaluated with the weights")
        loaded = Net.load_from_checkpoint(kept.best_model_path)
        assert trainer.test(loaded, Data(), verbose=False) == expected
    assert loop.federation is federation
    assert_same(federation.client_model(1).state_dict(), heads, atol=0)
    assert trainer.test(module, Data(), verbose=False) == expected


def test_a_module_of_no_checkpoint_is_tested_with_its_own_weights(tmp_path):
    trainer, loop, module, test, _ = fitted(tmp_path)
    fitted_loop = (loop.federation, loop.data, loop.rounds)
    torch.manual_seed(3)
    other = Net()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.warns(UserWarning, match="from no checkpoint of this Trainer"):
        found = trainer.test(other, test, verbose=False)[0]
    assert (loop.federation, loop.data, loop.rounds) == fitted_loop
    assert_same(other.state_dict(), before, atol=0)
    assert found["test_loss"] != trainer.test(module, test, verbose=False)[0]["test_loss"]
    assert "test_loss" in trainer.test(Net(), Data(), verbose=False)[0]


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    trainer, _, module, test, path = fitted(tmp_path)
    expected = trainer.test(module, test, ckpt_path=path, verbose=False)
    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    torch.save({"weights": 1}, tmp_path / "b.ckpt")
    assert trainer.test(Net.load_from_checkpoint(path), test, verbose=False) == expected


def test_a_shared_evaluation_is_one_of_a_loaded_module_too(tmp_path):
    trainer, _, module, test, path = fitted(tmp_path, shared_evaluation=True)
    expected = trainer.test(module, test, ckpt_path=path, verbose=False)
    assert trainer.test(Net.load_from_checkpoint(path), test, verbose=False) == expected


def test_another_module_with_a_ckpt_path_is_not_warned_of(tmp_path):
    trainer, _, module, test, path = fitted(tmp_path)
    expected = trainer.test(module, test, ckpt_path=path, verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every client is evaluated with the weights")
        assert trainer.test(Net(), test, ckpt_path=path, verbose=False) == expected


@pytest.mark.parametrize(("method", "says"), [(FedPer, True), (FedAvg, False)])
def test_an_evaluation_alone_says_that_clients_have_no_weights_of_their_own(method, says):
    trainer = quiet_trainer(1, FederatedLoop(method=method, num_clients=3, seed=SEED))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.test(Net(), Data(), verbose=False)
    assert any("every client is evaluated with the weights" in str(each.message) for each in said) == says
