"""The models that a federation hands out are those that it scores."""

from functools import partial

import pytest
import torch
from _helpers.toy import Toy, own_model, quiet_trainer, run, tiny_encoder

from pfl_lightning import Federation
from pfl_lightning.errors import CheckpointError, FederationError
from pfl_lightning.methods import DualFed, FedAvg, FedBABU, FedPAC, FedRoD, LocalOnly

TUNED = partial(FedAvg, fine_tune="all", fine_tune_epochs=2)


@pytest.mark.parametrize("method", [FedPAC, LocalOnly, TUNED, FedBABU])
def test_a_clients_model_has_the_scored_accuracy(method):
    federation = run(method, 2)
    for client, score in federation.test_scores.items():
        inputs, labels = Toy().tensors(client, "test")
        right = federation.client_model(client)(inputs).argmax(1) == labels
        assert right.float().mean().item() == pytest.approx(score.accuracy, abs=1e-6)


def test_models_are_copies_that_can_be_trained():
    federation = run(FedPAC, 1)
    first, second = federation.client_model(0), federation.client_model(1)
    assert first is not second
    assert all(parameter.requires_grad for parameter in first.parameters())
    before = federation.client_model(1).state_dict()
    with torch.no_grad():
        first.head.weight.zero_()
        second.head.weight.zero_()
    assert torch.equal(federation.client_model(1).state_dict()["head.weight"], before["head.weight"])


def test_there_are_no_models_before_a_fit():
    with pytest.raises(FederationError, match=r"before trainer\.fit"):
        Federation(FedAvg, tiny_encoder).client_model(0)


def test_load_from_checkpoint_says_what_to_do_instead(tmp_path):
    federation = run(FedAvg, 1)
    federation.trainer.save_checkpoint(tmp_path / "some.ckpt")
    with pytest.raises(CheckpointError, match="not by load_from_checkpoint"):
        Federation.load_from_checkpoint(tmp_path / "some.ckpt", method=FedAvg, encoder=tiny_encoder, weights_only=True)


def test_validating_after_the_fit_gives_the_figures_of_the_fit():
    federation = run(TUNED, 2)
    scores = dict(federation.validation_scores)
    quiet_trainer(1).validate(federation, datamodule=Toy(), verbose=False)
    assert federation.validation_scores == scores


def test_a_fine_tuning_that_diverges_is_left_out_of_the_evaluation():
    diverging = partial(FedAvg, fine_tune="all", fine_tune_epochs=8, fine_tune_lr=1e6)
    with pytest.warns(UserWarning, match="evaluated without fine-tuning: client 0, round 1: the loss is"):
        federation = run(diverging, 1)
    assert federation.test_scores == run(FedAvg, 1).test_scores


@pytest.mark.parametrize(
    ("method", "moved"),
    [
        (FedAvg, {"head"}),
        (FedRoD, {"head", "personal_head"}),
        (partial(DualFed, projector_batch_norm=False), {"head", "global_head"}),
    ],
    ids=["FedAvg", "Fed-RoD", "DualFed"],
)
def test_fine_tuning_the_head_means_all_that_classifies(method, moved):
    federation = run(partial(method, lr=0.1, epochs=1, fine_tune="head"))
    received = {n: t.clone() for n, t in own_model(federation, 0).state_dict().items()}
    tuned = federation.client_model(0).state_dict()
    assert {name.partition(".")[0] for name, value in tuned.items() if not torch.equal(value, received[name])} == moved
