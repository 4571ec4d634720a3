"""``pfl study`` with runs that only pretend: short rounds, which are saved, resumed and locked as real ones.

``python -m _helpers.pretended_study study FILE`` is the study.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import yaml

from pfl_lightning.jobs import warm
from pfl_lightning.jobs.supervision import Job
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.state.files import replace_file


def study() -> None:
    """The study: configs are taken as they are, the report is a plain one."""
    from _helpers import plain_report
    from pfl_lightning.cli.main import main
    from pfl_lightning.study import check, runner

    plain_report.install()
    plain_report.figures = lambda run, choice: json.loads((run / "results.json").read_text())
    check.check_configs = lambda runs, starter: None
    runner.Job = partial(Job, entry="_helpers.pretended_study:run")  # type: ignore[misc, assignment]
    warm.PRELOADED = ("_helpers.pretended_study",)
    main()


def run() -> None:
    """A run: its state is a number that each round changes."""
    words = sys.argv[1:]
    config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    runs = RunFolder(Path(config["run_dir"]))
    checkpoint = Path(words[words.index("--ckpt_path") + 1]) if "--ckpt_path" in words else None
    folder = runs.new() if checkpoint is None else checkpoint.parents[1]
    state = [0, config["seed_everything"]] if checkpoint is None else json.loads(checkpoint.read_text())
    with RunLock(folder):
        while state[0] < config["trainer"]["max_epochs"]:
            time.sleep(0.03)
            state = [state[0] + 1, after_a_round(state[1])]
            write(folder / "checkpoints" / "last.ckpt", state)
        write(folder / "results.json", {"finished": True, "state": state})


def after_a_round(state: int) -> int:
    """The state of a run after one more round."""
    return (48271 * state + 11) % 2147483647


def write(path: Path, content: object) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(content))


if __name__ == "__main__":
    study()
