"""Predictions: of each client's own model, and a warning where the global model has parts that nobody has trained."""

import warnings

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import SEED, WEIGHTS_ONLY, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, federate, predict_clients
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import Ditto, FedAvg, FedBABU, FedPAC, FedPer, LocalOnly

SAID = "trainer.predict uses the global model"
INPUTS = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))


class Predicting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.5

    def predict_step(self, batch, batch_idx):
        assert not self.training
        return self(batch[0]) / self.temperature


class DataToPredict(Data):
    def predict_dataloader(self):
        return loader()


def loader(inputs=INPUTS):
    return DataLoader(TensorDataset(inputs), batch_size=3)


def fitted(method, module=None, data=None, **options):
    loop = FederatedLoop(method=method, num_clients=3, seed=SEED, head="fc", **options)
    trainer, module = quiet_trainer(2, loop), module or Predicting()
    trainer.fit(module, data or Data())
    return trainer, module, loop


def said(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message) for one in found if SAID in str(one.message)]


def expected(federation, client, inputs=INPUTS):
    model = federation.client_model(client).eval()
    with torch.no_grad():
        return model(inputs) / model.temperature


def assert_each_client_s(found, federation, clients=range(3), inputs=INPUTS):
    assert list(found) == list(clients)
    for client, batches in found.items():
        assert torch.allclose(torch.cat(batches), expected(federation, client, inputs), atol=1e-6)


@pytest.mark.parametrize("method", [FedPer, FedAvg, Ditto])
@pytest.mark.parametrize("own_trainer", [True, False])
def test_each_client_predicts_with_its_own_model(method, own_trainer):
    trainer, module, loop = fitted(method)
    options = {"trainer": trainer} if own_trainer else {}
    found, messages = said(lambda: predict_clients(loop.federation, loader(), **options))
    assert not messages
    assert_each_client_s(found, loop.federation)
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1])) == (method is FedAvg)
    assert_each_client_s(predict_clients(loop.federation, loader(), clients=[2, 0]), loop.federation, [2, 0])
    trainer.fit(module, Data())  # goes on with the same federation
    assert loop.federation.round == 1


def test_loaders_of_each_client_and_of_its_data():
    federation, data = federate(Predicting(), [DataToPredict(), DataToPredict()], FedPer, head="fc", seed=SEED)
    quiet_trainer(1).fit(federation, datamodule=data)
    assert_each_client_s(predict_clients(federation), federation, range(2))
    other = INPUTS + 1
    assert_each_client_s(predict_clients(federation, {1: loader(other)}), federation, [1], other)
    with pytest.raises(ConfigurationError, match=r"no entry for client 0; it has \[1\]"):
        predict_clients(federation, {1: loader()}, clients=[0])


def test_what_cannot_be_predicted():
    _, _, loop = fitted(FedAvg)
    with pytest.raises(ConfigurationError, match="client 0: neither its data module nor Predicting has a predict_data"):
        predict_clients(loop.federation)
    with pytest.raises(IndexError, match="there is no client 5"):
        predict_clients(loop.federation, loader(), clients=[5])
    unfitted, _ = federate(Predicting(), Data(), FedAvg, num_clients=2)
    with pytest.raises(FederationError, match="there are no clients before"):
        predict_clients(unfitted, loader())


def test_the_project_s_predict_dataloader_is_every_client_s():
    _, _, loop = fitted(FedPer, data=DataToPredict())
    assert_each_client_s(predict_clients(loop.federation), loop.federation)


@pytest.mark.parametrize(
    ("method", "parts"), [(FedPer, "fc.*"), (FedBABU, "fc.*"), (LocalOnly, "body.*, fc.*"), (FedAvg, ""), (Ditto, "")]
)
def test_parts_that_no_client_shares_are_named(method, parts, tmp_path):
    trainer, module, loop = fitted(method)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, messages = said(lambda: trainer.predict(module, loader()))
    assert len(messages) == bool(parts)
    if parts:
        assert f"the global model of Predicting, but clients do not share {parts}:" in messages[0]
    own = loop.federation.client_model(1)
    assert not said(lambda: trainer.predict(own, loader()))[1] or method is FedBABU  # whose head is the same for all
    again = FederatedLoop(method=method, num_clients=3, seed=SEED, head="fc")
    call = {"datamodule": DataToPredict(), "ckpt_path": tmp_path / "last.ckpt", **WEIGHTS_ONLY}
    _, messages = said(lambda: quiet_trainer(2, again).predict(Predicting(), **call))
    assert len(messages) == bool(parts)


def test_weights_of_each_client_s_own_are_said_to_be_the_first_client_s():
    trainer, module, loop = fitted(FedPAC)
    with pytest.warns(UserWarning, match=r"FedPAC sends each client weights of its own.*first client.*predict_clients"):
        trainer.predict(module, loader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*sends each client")
        trainer.predict(loop.federation.client_model(2), loader())
        trainer, module, _ = fitted(FedAvg)
        trainer.predict(module, loader())


def test_the_other_form_names_them_too():
    federation, data = federate(Predicting(), Data(), FedPer, num_clients=2, head="fc", seed=SEED)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    _, messages = said(lambda: trainer.predict(federation, dataloaders=loader()))
    assert len(messages) == 1


def test_loaders_of_one_s_own_are_not_taken_for_ids_of_clients():
    data = Data()
    data.prepare_data()
    data.setup("fit")
    module, loop = Predicting(), FederatedLoop(method=FedAvg, num_clients=3, seed=SEED)
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, data.train_dataloader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not a federation")
        assert len(trainer.predict(module, loader())) == len(loader())
