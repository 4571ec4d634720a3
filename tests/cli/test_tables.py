"""What `pfl fit` says at its end."""

import pytest
from _helpers.configs import digits_config

from pfl_lightning.cli import main


def test_a_run_without_an_evaluation_says_why_and_how_to_get_one(tmp_path, capsys):
    rare = {"trainer.max_epochs": 2, "trainer.check_val_every_n_epoch": 5, "trainer.enable_model_summary": False}
    file = digits_config(tmp_path, rare)
    main(["fit", "--config", file])
    said = capsys.readouterr().out.splitlines()[-1]
    checkpoint = tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt"
    assert "without accuracies: no round was evaluated (check_val_every_n_epoch is 5, and the run has 2 rounds)" in said
    assert f"`pfl test --ckpt_path {checkpoint}`" in said
    main(["test", "--config", file, "--ckpt_path", str(checkpoint)])
    assert (checkpoint.parent.parent / "test.json").is_file()


@pytest.mark.parametrize("every", [1, 2])
def test_nothing_is_said_where_a_round_was_evaluated(tmp_path, capsys, every):
    changes = {"trainer.max_epochs": 2, "trainer.check_val_every_n_epoch": every, "trainer.enable_model_summary": False}
    main(["fit", "--config", digits_config(tmp_path, changes)])
    assert "without accuracies" not in capsys.readouterr().out
