"""What somebody changes in the module between two calls of the Trainer: no client sees it, and a warning says so."""

import copy
import pickle
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from torch import nn

from pfl_lightning import FederatedLoop, federate
from pfl_lightning.drop_in.outer.user_module_owner import UserModuleOwner, changed_since, fingerprint
from pfl_lightning.methods import FedAvg, FedPer

SAYS = "changes made to Own between calls of the Trainer do not reach the clients"


class Own(Net):
    """Has hyper-parameters, attributes of many kinds, a frozen layer, and hooks that change itself."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(norm=True)
        self.save_hyperparameters()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.words, self.score, self.kinds = ["a"], float("nan"), {1}
        self.tensors, self.function = [torch.zeros(2)], len
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def prepare_data(self) -> None:
        self.words.append("b")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = len(batch)
        return self(batch[0])


class Failing(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise RuntimeError("on its way")


def fitted(**options: Any) -> tuple[Own, L.Trainer, FederatedLoop, Data]:
    module, data, loop = Own(), Data(), FederatedLoop(method=FedAvg, num_clients=2, seed=0, **options)
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, data)
    return module, trainer, loop, data


def change(module: Own) -> None:
    module.body.requires_grad_(False)
    module.frozen.requires_grad_(True)
    module.fc.bias.data.fill_(100.0)  # of which no version of the tensor tells
    module.lr = 0.5
    module.hparams.width = 4
    module.extra = nn.Dropout(0.5)


def test_changes_between_two_fits_are_named_once():
    module, _, loop, data = fitted()
    change(module)
    with pytest.warns(UserWarning, match=SAYS) as found:
        quiet_trainer(1, loop).fit(module, data)
    said = next(str(one.message) for one in found if "changes made" in str(one.message))
    for part in (
        "layers extra",
        "requires_grad of body.0.bias, body.0.weight, body.1.bias, body.1.weight and 4 more",
        "values of fc.bias",
        "hyper-parameters width",
        "attributes lr",
        "pass a new FederatedLoop",
    ):
        assert part in said, part
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "changes made")
        quiet_trainer(1, loop).fit(module, data)


def test_a_federation_of_its_own_warns_too_and_copies_forget():
    module = Own()
    federation, data = federate(module, Data(), FedPer, num_clients=2, head="fc", seed=0)
    quiet_trainer(1).fit(federation, datamodule=data)
    for other in (copy.deepcopy(federation.owner), pickle.loads(pickle.dumps(federation.owner))):
        assert not other.look()
    module.fc = nn.Linear(3, 5)
    with pytest.warns(UserWarning, match=f"{SAYS}.*: layers fc; values of fc.bias, fc.weight. .*call it again"):
        quiet_trainer(1).fit(federation, datamodule=data)


def test_what_was_loaded_for_a_test_is_named_and_what_trains_is_left_for_the_next_fit():
    module, _, loop, data = fitted()
    module.load_state_dict(Own().state_dict())
    module.freeze()
    with pytest.warns(
        UserWarning, match=f"{SAYS}.*: values of body.*; .*ckpt_path='best'|{SAYS}.*ckpt_path='best'"
    ) as f:
        quiet_trainer(1, loop).test(module, data, verbose=False)
    assert not any("requires_grad" in str(one.message) for one in f)
    with pytest.warns(UserWarning, match=f"{SAYS}.*: requires_grad of"):
        quiet_trainer(1, loop).fit(module, data)


def test_calls_without_changes_do_not_warn():
    module, trainer, loop, data = fitted()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "changes made")
        trainer.test(module, data, verbose=False)
        loop.federation.global_model()  # whose frozen parameters are those of the module
        trainer.predict(module, data.test_dataloader())
        assert module.found == 2
        module.eval()
        trainer.validate(module, data, verbose=False)
        quiet_trainer(1, loop).fit(module, data)


def test_a_call_that_failed_leaves_nothing_to_compare_with():
    module, _, loop, data = fitted()
    with pytest.raises(RuntimeError, match="on its way"):
        quiet_trainer(1, loop, Failing()).fit(module, data)
    module.lr = 0.5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "changes made")
        quiet_trainer(1, loop).fit(module, data)


def test_kinds_of_attributes():
    module = Own()
    look = fingerprint(module)
    assert not changed_since(look, module)["attributes"]
    module.words.append("c")
    module.function, module.kinds, module.tensors = max, {2}, 3
    module.new = None
    assert changed_since(look, module)["attributes"] == {"words", "function", "kinds", "tensors", "new"}


def test_a_diverged_model_is_as_it_was():
    module = Own()
    module.fc.bias.data.fill_(float("nan"))
    owner = UserModuleOwner(module)
    owner.end_call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        owner.begin_call(fits=True)
    owner.end_call()
    module.fc.bias.data.fill_(0.0)
    with pytest.warns(UserWarning, match="clients: values of fc.bias"):
        owner.begin_call(fits=True)
