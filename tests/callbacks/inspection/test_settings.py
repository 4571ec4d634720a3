"""Hyper-parameters and config, read back from the event files."""

from functools import partial

import pytest
from _helpers.events import board, events, rounds, scalars
from _helpers.toy import GivenCohorts, run, tiny_encoder
from lightning.pytorch.loggers import CSVLogger
from tensorboard.plugins.hparams import plugin_data_pb2

from pfl_lightning import VectorizedEngine
from pfl_lightning.callbacks import ResultsWriter, RunSettings
from pfl_lightning.callbacks.inspection.settings import constructor_values
from pfl_lightning.datamodules import DominantClasses
from pfl_lightning.methods import DualFed, FedPAC

METHOD = partial(FedPAC, epochs=1, lr=0.3, alignment=0.5)


def plugin(found, tag):
    """Content of the HPARAMS tab."""
    content = found.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def play(tmp_path, number=2, callback=None, **options):
    callbacks = [callback or RunSettings(), ResultsWriter(str(tmp_path))]
    return run(METHOD, number, callbacks=callbacks, logger=board(tmp_path), **options)


def value_of(one):
    return getattr(one, one.WhichOneof("kind"))


def test_hyper_parameters_with_the_final_metrics(tmp_path):
    play(tmp_path, engine=VectorizedEngine(2))
    found = events(tmp_path)
    got = {name: value_of(one) for name, one in plugin(found, "session_start_info").session_start_info.hparams.items()}
    expected = {
        "method": "FedPAC",
        "method/lr": 0.3,
        "method/alignment": 0.5,
        "method/combination": True,
        "method/head_epochs": 1,
        "method/fine_tune": "null",
        "encoder": "tiny_encoder",
        "data": "Toy",
        "data/batch_size": 4,
        "num_clients": 5,
        "partition": "GivenParts",
        "loop/cohort": 1.0,
        "seed": 11,
        "rounds": 2,
        "engine": "VectorizedEngine",
        "engine/clients_per_batch": 2,
    }
    assert {name: got[name] for name in expected} == expected
    metrics = [one.name.tag for one in plugin(found, "experiment").experiment.metric_infos]
    assert {"test_accuracy/mean", "val_accuracy/mean", "train/loss", "final/validation_selected"} <= set(metrics)
    assert set(metrics) <= set(found.Tags()["scalars"])  # the tab would show empty columns
    assert plugin(found, "session_end_info").session_end_info.status == 1  # of the enum, success


def test_the_final_figures_are_those_of_the_results(tmp_path):
    federation = play(tmp_path, 3)
    [writer] = [one for one in federation.trainer.callbacks if isinstance(one, ResultsWriter)]
    found = events(tmp_path)
    assert set(writer.summaries()) == {"last", "validation_selected", "best_test"}
    for choice, summary in writer.summaries().items():
        assert scalars(found, f"final/{choice}") == {2: pytest.approx(summary.mean)}


@pytest.mark.parametrize("config", [None, "model:\n  encoder: tiny"])
def test_the_config_is_text(tmp_path, config):
    play(tmp_path, callback=RunSettings(config))
    found = events(tmp_path)
    [event] = found.Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    lines = [line.removeprefix("    ") for line in text.splitlines()]
    if config is None:
        assert {"method: FedPAC", "method/alignment: 0.5", "seed: 11"} <= set(lines)
    else:
        assert lines == config.splitlines()


def test_a_resumed_run_adds_its_config_and_its_final_figures(tmp_path):
    options = {"enable_checkpointing": True}
    path = play(tmp_path, 1, **options).trainer.checkpoint_callback.best_model_path
    play(tmp_path, 3, ckpt_path=path, **options)
    found = events(tmp_path)
    assert rounds(found, "config/text_summary") == [0, 1]
    assert list(scalars(found, "final/last")) == [0, 2]


def test_other_loggers_and_no_results(tmp_path):
    run(METHOD, 1, callbacks=[RunSettings("a: 1")], logger=CSVLogger(tmp_path, name="", version=""))
    assert "method/alignment: 0.5" in (tmp_path / "hparams.yaml").read_text()
    assert (tmp_path / "inspection" / "config.txt").read_text() == "a: 1"
    assert "final" not in (tmp_path / "metrics.csv").read_text()


def test_values_of_a_constructor():
    rule = DominantClasses(4, 100, groups=[[0, 1], [2]], uniform_share=0.5)
    assert constructor_values(rule) == {
        "num_clients": 4,
        "samples_per_client": 100,
        "uniform_share": 0.5,
        "seed": 0,
        "overlap": False,
    }
    assert constructor_values(GivenCohorts([0], cohort=0.5))["cohort"] == 0.5
    method = DualFed(tiny_encoder((6,)), 5)
    assert constructor_values(method)["stages"] == "stage-wise"
    assert "encoder" not in constructor_values(method)
