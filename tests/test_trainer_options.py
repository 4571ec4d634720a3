"""Options of the outer Trainer that would have another meaning, or none, in a federation."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
from _helpers.toy import run
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import check_strategy
from pfl_lightning.methods import FedAvg

FIT = partial(FedAvg, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overfit_batches": 1}, r"overfit_batches=1\) means something else.*limit_train_batches=1"),
        ({"overfit_batches": 0.5}, r"overfit_batches=0\.5\) means something else.*limit_train_batches=0.5"),
        ({"val_check_interval": 0.5}, r"val_check_interval=0\.5\) .*use check_val_every_n_epoch, .*within a round"),
        ({"val_check_interval": 2}, r"val_check_interval=2\) .*use check_val_every_n_epoch"),
        (
            {"max_steps": 3},
            r"max_steps=3\) is about .*engine=TrainerEngine\(max_steps=3\)\).* Rounds are limited by max_ep",
        ),
        ({"min_steps": 3}, r"min_steps=3\) .*use min_epochs"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_in_a_federation_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        run(FIT, 1, **options)


def test_a_trial_of_one_client_is_taken():
    assert run(FIT, 1, fast_dev_run=True).trainer.fast_dev_run


def test_a_strategy_for_several_processes_is_refused():
    """In one process, too: Lightning would put a sampler in the place of the cohort's order."""
    one = partial(SimpleNamespace, world_size=1, num_nodes=1, num_devices=1)
    with pytest.raises(
        ConfigurationError, match=r"one process; DDPStrategy is for several.* Leave the Trainer's strategy"
    ):
        check_strategy(one(strategy=DDPStrategy()))
    check_strategy(one(strategy=SingleDeviceStrategy()))


def test_that_no_round_is_evaluated_is_said():
    with pytest.warns(
        UserWarning, match="check_val_every_n_epoch=3 is more than the 2 rounds of max_epochs: no round is"
    ):
        run(FIT, 2, check_val_every_n_epoch=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "check_val_every_n_epoch")
        run(FIT, 2, check_val_every_n_epoch=2)
        run(FIT, 1, check_val_every_n_epoch=3, limit_val_batches=0)
