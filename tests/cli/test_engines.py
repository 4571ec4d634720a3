"""The engine by one option: --engine sequential | vectorized | processes | trainer | ray."""

import pytest
import yaml
from _helpers.configs import digits_config
from _helpers.fake_cluster import FakeCluster
from _helpers.process_helpers import forked_process_engine
from _helpers.ray_helpers import FakeRay

from pfl_lightning import VectorizedEngine
from pfl_lightning.cli import main
from pfl_lightning.cli.parser import ENGINES, expand_engine_option
from pfl_lightning.engines.workers import ray as ray_engine
from pfl_lightning.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _loud(monkeypatch):
    monkeypatch.setenv("PFL_DEBUG", "1")


def saved(tmp_path):
    found = yaml.safe_load((tmp_path / "runs" / "version_0" / "config.yaml").read_text())
    assert found["engine"] is None
    return found["model"]["engine"]


@pytest.mark.parametrize("words", [["--engine", "NAME"], ["--engine=NAME"]])
@pytest.mark.parametrize("name", ["sequential", "vectorized", "trainer", "processes"])
def test_an_engine_by_name(tmp_path, name, words, monkeypatch):
    forked_process_engine(monkeypatch)
    main(["fit", "--config", digits_config(tmp_path, {}), *(word.replace("NAME", name) for word in words)])
    assert saved(tmp_path)["class_path"] == f"pfl_lightning.{ENGINES[name]}"


def test_options_of_the_engine_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "Cluster", lambda *args: FakeCluster(FakeRay(), 2))
    words = "--engine ray --model.engine.workers 2 --model.engine.engine VectorizedEngine"
    main(["fit", "--config", digits_config(tmp_path, {}), *words.split()])
    found = saved(tmp_path)["init_args"]
    assert found["workers"] == 2
    assert found["engine"]["class_path"] == "pfl_lightning.VectorizedEngine"


def test_the_option_comes_before_what_a_config_says(tmp_path):
    other = {"class_path": "pfl_lightning.SequentialEngine", "init_args": {"gradient_clip_val": 2.0}}
    path = digits_config(tmp_path, {"model.engine": other})
    main(["fit", "--config", path, "--engine", "vectorized", "--model.engine.clients_per_batch", "7"])
    assert saved(tmp_path)["init_args"]["clients_per_batch"] == 7


def test_in_a_config_file(tmp_path):
    main(["fit", "--config", digits_config(tmp_path, {"engine": "vectorized"})])
    assert saved(tmp_path)["class_path"] == "pfl_lightning.VectorizedEngine"


def test_every_engine_has_a_name_in_a_config_file(tmp_path, monkeypatch):
    forked_process_engine(monkeypatch)
    main(["fit", "--config", digits_config(tmp_path, {"engine": "processes"})])
    assert saved(tmp_path)["class_path"] == "pfl_lightning.ProcessEngine"


def test_in_a_config_file_with_options(tmp_path):
    own = {"class_path": "pfl_lightning.VectorizedEngine", "init_args": {"clients_per_batch": 5}}
    main(["fit", "--config", digits_config(tmp_path, {"engine": "vectorized", "model.engine": own})])
    assert saved(tmp_path)["init_args"]["clients_per_batch"] == 5


def test_the_option_comes_before_the_name_in_a_config(tmp_path):
    main(["fit", "--config", digits_config(tmp_path, {"engine": "trainer"}), "--engine", "vectorized"])
    assert saved(tmp_path)["class_path"] == "pfl_lightning.VectorizedEngine"


def test_two_engines_in_a_config_file_are_refused(tmp_path):
    path = digits_config(tmp_path, {"engine": "ray", "model.engine": {"class_path": "pfl_lightning.VectorizedEngine"}})
    with pytest.raises(
        ConfigurationError, match=r"engine is 'ray', model.engine is pfl_lightning.VectorizedEngine: give"
    ):
        main(["fit", "--config", path])


@pytest.mark.parametrize("words", [["--engine", "rai"], ["--engine=rai"], ["--engine"]])
def test_a_name_that_is_none(tmp_path, words, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", digits_config(tmp_path, {}), *words])
    said = capsys.readouterr().err
    assert "vectorized" in said or "expected one argument" in said


def test_other_words_stay_as_they_are():
    words = ["fit", "--config", "fit.yaml", "--engine", "ray", "--fitted", "x", "--engine=rai", "--engine"]
    ray = ["--engine", "null", "--model.engine", "RayEngine"]
    expanded = ["fit", "--config", "fit.yaml", *ray, "--fitted", "x", "--engine=rai", "--engine"]
    assert expand_engine_option(words) == expanded


def test_validate_takes_it_too(tmp_path, monkeypatch):
    path, used = digits_config(tmp_path, {}), []
    main(["fit", "--config", path])
    evaluate = VectorizedEngine.evaluate
    monkeypatch.setattr(VectorizedEngine, "evaluate", lambda *args: used.append(1) or evaluate(*args))
    main(["validate", "--config", path, "--engine", "vectorized", "--ckpt_path", "last"])
    assert used
