"""Runs that are kept from earlier versions stand in one row with those of today."""

import pytest
import yaml
from _helpers.results import kept_runs

from pfl_lightning.cli import main
from pfl_lightning.runs.config import differing, run_options

KEPT = next(run for run in kept_runs("digits-methods") if run["run"] == "runs/all/FedAvg/seed_0")["config.yaml"]


def options(config):
    return run_options(config, "FedAvg", {}, rounds=1)


def test_no_later_option_tells_a_run_of_today_from_a_kept_one(tmp_path):
    """A new option of the loop or of methods belongs into LATER, with the value that leaves runs as they were."""
    (tmp_path / "kept.yaml").write_text(yaml.safe_dump(KEPT))
    main(["fit", "--config", f"{tmp_path}/kept.yaml", "--run_dir", str(tmp_path), "--trainer.max_epochs", "1"])
    [today] = tmp_path.glob("version_*/config.yaml")
    found = [options(config) for config in (KEPT, yaml.safe_load(today.read_text()))]
    assert differing(found) == []


SCHEDULER = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}}


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ({"lr_scheduler": None}, {"lr_scheduler": None, "schedule": "continue"}, []),  # of nothing
        ({"lr_scheduler": SCHEDULER}, {"lr_scheduler": SCHEDULER, "schedule": "restart"}, []),
        ({"lr_scheduler": SCHEDULER}, {"lr_scheduler": SCHEDULER, "schedule": "rounds"}, ["model.method.schedule"]),
    ],
)
def test_a_run_from_before_the_choice_started_its_schedules_again(one, other, differ):
    configs = [{"model": {"method": {"class_path": "FedAvg", "init_args": each}}} for each in (one, other)]
    assert differing([options(each) for each in configs]) == differ


def test_another_limit_of_updates_is_told():
    assert differing([options({"loop": {}}), options({"loop": {"max_update_ratio": 10.0}})]) == [
        "loop.max_update_ratio"
    ]
