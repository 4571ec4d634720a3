"""`--trainer.gradient_clip_val` clips the clients' gradients, whatever trains them."""

import pytest
import torch
import yaml
from _helpers.configs import digits_config
from jsonargparse import Namespace

from pfl_lightning.cli import main
from pfl_lightning.cli.parser import apply_clipping
from pfl_lightning.errors import ConfigurationError


def applied(engine, clip=1.0, algorithm=None):
    trainer = Namespace(gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
    config = Namespace(trainer=trainer, model=Namespace(engine=engine))
    apply_clipping(config)
    assert config.trainer.gradient_clip_val is config.trainer.gradient_clip_algorithm is None
    return config.model.engine


def named(name, **options):
    return Namespace(class_path=f"pfl_lightning.{name}", init_args=Namespace(**options))


def test_without_an_engine():
    assert applied(None) == named("SequentialEngine", gradient_clip_val=1.0)


def test_an_engine_keeps_its_other_options():
    found = applied(named("VectorizedEngine", clients_per_batch=3, gradient_clip_val=None))
    assert found == named("VectorizedEngine", clients_per_batch=3, gradient_clip_val=1.0)


def test_the_algorithm():
    found = applied(named("SequentialEngine", gradient_clip_algorithm="norm"), algorithm="value").init_args
    assert (found.gradient_clip_val, found.gradient_clip_algorithm) == (1.0, "value")


def test_workers_clip_with_their_own_engine():
    inner = named("SequentialEngine", gradient_clip_val=1.0)
    assert applied(named("RayEngine", workers=2, engine=None)) == named("RayEngine", workers=2, engine=inner)
    assert applied(named("RayEngine")) == named("RayEngine", engine=inner)


def test_two_values_are_an_error():
    with pytest.raises(ConfigurationError, match=r"trainer.gradient_clip_val is 1.0, model.engine.init_args.gradient_"):
        applied(named("SequentialEngine", gradient_clip_val=2.0))
    assert applied(named("SequentialEngine", gradient_clip_val=1.0)).init_args.gradient_clip_val == 1.0


def test_0_is_no_clipping():
    assert applied(None, clip=0) is None
    assert applied(named("SequentialEngine"), clip=0.0) == named("SequentialEngine", gradient_clip_val=None)
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val is 0, .*give one of them"):
        applied(named("SequentialEngine", gradient_clip_val=2.0), clip=0)


def test_a_run_is_that_of_the_engines_own_option(tmp_path):
    config = digits_config(tmp_path, {})
    own = ["--engine", "sequential", "--model.engine.gradient_clip_val", "0.01"]
    for words in (["--trainer.gradient_clip_val", "0.01"], own, []):
        main(["fit", "--config", config, *words])
    runs = [tmp_path / "runs" / f"version_{k}" for k in range(3)]
    saved = yaml.safe_load((runs[0] / "config.yaml").read_text())
    assert saved["model"]["engine"]["init_args"]["gradient_clip_val"] == 0.01
    checkpoints = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in runs]
    clipped, by_engine, unclipped = (found["state_dict"]["models.0.head.weight"] for found in checkpoints)
    assert torch.equal(clipped, by_engine)
    assert not torch.equal(clipped, unclipped)
