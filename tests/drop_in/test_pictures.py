"""Pictures of what is in a user's module, under methods that know its features."""

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import GivenCohorts, Toy, quiet_trainer

from pfl_lightning import federate
from pfl_lightning.callbacks import FeatureEmbedding, Inspection
from pfl_lightning.methods import FedAvg, FedPAC, FedProto


def inspected(method, folder, data=None, **options):
    torch.manual_seed(0)
    federation, data = federate(Net(), data or Data(), method, seed=1, **options)
    inspection = Inspection(every_n_rounds=1, clients=3, samples=10, dirpath=str(folder))
    trainer = quiet_trainer(1, GivenCohorts(range(3)), inspection)
    trainer.fit(federation, datamodule=data)
    return trainer.callback_metrics, {str(path.relative_to(folder)) for path in folder.rglob("*.png")}


@pytest.mark.parametrize("data", [Data, Toy])
def test_all_pictures_of_a_module_with_features(data, tmp_path):
    division = {"num_clients": 3} if data is Data else {}
    _, pictures = inspected(FedPAC, tmp_path, data(), **division)
    for name in ("features", "cka", "attribution_ranks", "combination"):
        assert any(name in picture for picture in pictures), (name, pictures)


def test_prototypes_have_no_attribution(tmp_path):
    _, pictures = inspected(FedProto, tmp_path, num_clients=3)
    assert any("features" in picture for picture in pictures)
    assert not any("attribution" in picture for picture in pictures)


def test_a_module_without_features_says_so(tmp_path):
    federation, data = federate(Net(), Data(), FedAvg, num_clients=3)
    trainer = quiet_trainer(1, FeatureEmbedding(dirpath=str(tmp_path)))
    with pytest.warns(UserWarning, match="FeatureEmbedding shows nothing: Net has no encoder with features"):
        trainer.fit(federation, datamodule=data)
