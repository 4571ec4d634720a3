"""Configs with one mistake each: a run, or an error of a few lines; never a traceback, and never without end.

``pytest -m slow tests/cli/test_fuzz.py`` runs them; the rest of the suite leaves them out.
"""

import logging
import os
import subprocess
import sys

import pytest
from _helpers import fuzz

CONFIGS, BATCH = 500, 10


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def written(folder, seed):
    path = folder / f"config-{seed}.yaml"
    fuzz.write(path, fuzz.mutated(seed))
    return path


def test_the_config_without_a_mistake_runs(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(fuzz.dump(fuzz.BASE))
    assert fuzz.outcome(path) == fuzz.Outcome("", "")


def test_configs_are_the_same_every_time_and_differ():
    texts = [fuzz.mutated(seed) for seed in range(50)]
    assert texts == [fuzz.mutated(seed) for seed in range(50)]
    assert len(set(texts)) > 45


@pytest.mark.slow  # 500 configs: 10 minutes
@pytest.mark.parametrize("first", range(0, CONFIGS, BATCH))
def test_a_config_with_a_mistake_runs_or_is_refused_in_a_few_lines(tmp_path, first):
    outcomes = {seed: fuzz.outcome(written(tmp_path, seed)) for seed in range(first, first + BATCH)}
    wrong = {seed: found for seed, found in outcomes.items() if found.wrong}
    assert not wrong, "\n".join(f"{seed}: {found.wrong}\n{found.said}" for seed, found in wrong.items())


@pytest.mark.slow  # a process each: 2 minutes
@pytest.mark.parametrize("seed", range(CONFIGS, CONFIGS + 10))
def test_the_command_ends_likewise(tmp_path, seed):
    command = [sys.executable, "-m", "pfl_lightning.cli", "fit", "--config", str(written(tmp_path, seed))]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1, 2)
    assert done.returncode == 0 or not fuzz.judge(done.stderr[done.stderr.index("pfl: ") :])
