"""All inspection callbacks by one option: --inspect true, with settings, in a config, after a resume."""

import warnings

import pytest
import yaml
from _helpers.configs import digits_config
from _helpers.events import events, rounds, scalars

from pfl_lightning.cli import main


@pytest.fixture(autouse=True)
def _loud(monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")


def config(tmp_path, changes):
    short = {"trainer.max_epochs": 2, "trainer.enable_model_summary": False}
    return digits_config(tmp_path, short | changes, "FedPAC", "small_cnn", "DominantClasses")


def images(tmp_path):
    return set(events(tmp_path / "runs").Tags()["images"])


ALL = {
    *("partition", "combination_weights", "features/features", "cka_matrix/features", "attribution_ranks"),
    *("accuracy_by_bytes", "clients/curves"),
}


def test_true_turns_all_on(tmp_path):
    main(["fit", "--config", config(tmp_path, {}), "--inspect", "true"])
    found = events(tmp_path / "runs")
    assert set(found.Tags()["images"]) == ALL
    assert {"clients/test_accuracy", "clients/train_alignment"} <= set(found.Tags()["histograms"])
    run = tmp_path / "runs" / "version_0"
    assert list(run.glob("*/features/metadata.tsv"))
    assert not (run / "inspection").exists()
    [event] = found.Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    shown = yaml.safe_load("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    assert shown == yaml.safe_load((run / "config.yaml").read_text())
    assert shown["model"]["method"]["init_args"]["epochs"] == 1


def test_nothing_is_on_by_default(tmp_path):
    main(["fit", "--config", config(tmp_path, {})])
    assert images(tmp_path) == set()
    main(["fit", "--config", config(tmp_path, {}), "--inspect", "false"])
    assert not events(tmp_path / "runs", 1).Tags()["images"]


def test_settings_on_the_command_line(tmp_path):
    words = ["--inspect.every_n_rounds", "1", "--inspect.clients", "2", "--trainer.max_epochs", "3"]
    main(["fit", "--config", config(tmp_path, {}), *words])
    found = events(tmp_path / "runs")
    assert rounds(found, "combination_weights") == [0, 1, 2]
    tables = sorted((tmp_path / "runs" / "version_0").glob("*/features/metadata.tsv"))
    assert len(tables) == 3  # one for each drawn round
    for table in tables:
        rows = table.read_text().splitlines()[1:]
        assert len({row.split("\t")[1] for row in rows}) == 2


def test_settings_in_a_config_and_callbacks_of_ones_own(tmp_path):
    own = [{"class_path": "pfl_lightning.callbacks.CombinationWeights", "init_args": {"every_n_rounds": 1}}]
    path = config(
        tmp_path,
        {"inspect": {"every_n_rounds": 10, "samples": 3}, "trainer.callbacks": own, "trainer.max_epochs": 3},
    )
    main(["fit", "--config", path])
    found = events(tmp_path / "runs")
    assert rounds(found, "combination_weights") == [0, 1, 2]  # the config's own, once
    assert rounds(found, "features/features") == [0, 2]


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    words = ["fit", "--config", config(tmp_path, {}), "--inspect.every_n_rounds", "1"]
    main(words)
    main([*words, "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    found = events(tmp_path / "runs")
    assert set(found.Tags()["images"]) == ALL
    for tag in ALL - {"partition"}:
        assert rounds(found, tag) == [0, 1, 2], tag
    assert rounds(found, "partition") == [0]
    assert list(scalars(found, "bytes/total")) == [0, 1, 2]
    assert rounds(found, "config/text_summary") == [0, 2]


def test_without_a_logger_pictures_lie_in_the_folder_of_the_run(tmp_path):
    main(["fit", "--config", config(tmp_path, {}), "--inspect", "true", "--trainer.logger", "false"])
    folder = tmp_path / "runs" / "version_0" / "inspection"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names >= {f"{tag}-round-0002.png" for tag in ALL - {"partition"}} | {
        "partition-round-0001.png",
        "config.txt",
    }


def test_an_evaluation_of_an_inspected_run_says_nothing_of_callbacks(tmp_path):
    path = config(tmp_path, {})
    main(["fit", "--config", path, "--inspect", "true"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*callbacks used to create the checkpoint.*")
        main(["test", "--config", path, "--ckpt_path", "last"])
        main(["test", "--config", path, "--ckpt_path", "last", "--inspect", "true"])
    assert events(tmp_path / "runs").Tags()["images"]


def test_settings_without_meaning_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PFL_DEBUG")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "--config", config(tmp_path, {}), "--inspect.every_n_rounds", "0"])
    assert "every_n_rounds must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(tmp_path, {}), "--inspect.every", "3"])
    assert "options of Inspection: clients, dirpath, every_n_rounds, part, samples" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
