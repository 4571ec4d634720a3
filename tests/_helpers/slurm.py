"""A job on a SLURM cluster, as far as a process sees it: variables, signals, and an ``scontrol`` that is not one."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L

HOOKS = (
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def enter_job(monkeypatch, folder: Path, *, restarts: int = 0, then: str = ":", code: int = 0) -> Path:
    """Let this process believe that it is a task of job 17.

    Args:
        monkeypatch: Pytest's fixture.
        folder: Where ``scontrol`` is put.
        restarts: How often SLURM has started the job again.
        then: What ``scontrol`` does after it was recorded, in shell; ``$PPID`` is the task.
        code: Its exit code.

    Returns:
        The file that records the arguments of every call of ``scontrol``.
    """
    calls, program = folder / "calls.txt", folder / "bin" / "scontrol"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{then}\nexit {code}\n')
    program.chmod(0o755)
    variables = {"JOB_ID": 17, "JOB_NAME": "fit", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    if restarts:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return calls


class SignalAt(L.Callback):
    """Sends signals to this process, once, from a hook of a round.

    Args:
        hook: Name of the hook.
        round: The round.
        batch: For a hook of batches, the batch.
        signals: Names of the signals, in their order.
    """

    def __init__(self, hook: str, round: int = 1, batch: int = 0, signals: tuple[str, ...] = ("SIGUSR1",)) -> None:
        assert hook in HOOKS, hook
        self.hook, self.round, self.batch, self.signals = hook, round, batch, list(signals)
        setattr(self, hook, self._send)

    def _send(self, trainer: L.Trainer, pl_module: Any, *batch: Any) -> None:
        index = batch[2] if len(batch) > 2 else None
        early = self.hook in ("on_sanity_check_start", "on_train_start")
        if not early and (trainer.sanity_checking or trainer.current_epoch != self.round):
            return
        if index in (None, self.batch):
            while self.signals:
                os.kill(os.getpid(), getattr(signal, self.signals.pop(0)))
