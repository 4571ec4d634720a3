"""Runs a group of the gate's cases in the checkout that is imported, and keeps what each leaves: see ``compare.py``.

    PYTHONPATH=CHECKOUT/src:CHECKOUT/tests python benchmarks/gate/cases.py GROUP OUTPUT CHECKOUT [PATTERN]

Only what users call is used (commands, ``federate``, callbacks), and the projects of ``tests/_helpers``.
"""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["GROUPS", "flat"]

SMALL = {
    "model.encoder": "mlp",
    "model.method.init_args.epochs": 1,
    "data.init_args.partition.init_args.num_clients": 4,
    "data.init_args.partition.init_args.samples_per_client": 40,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.accelerator": "cpu",
}
OF_CLIENTS = "data.init_args.partition"
OWN_ENCODERS = ("calibre", "dcpfl", "dualfed", "fedclassavg", "fedema", "fedtgp", "fedgh", "fedkd", "fml")
"""Configs whose method needs the encoders that it has there."""

VARIED = ("fedpac", "fedper", "calibre", "fedclassavg", "dualfed", "dcpfl", "ditto", "fedproto", "scaffold", "fedfomo")
"""Methods whose runs are also resumed, killed, personalized and exported."""

FEW = ("fedpac", "dcpfl", "calibre")
"""Methods that are tried where processes have to start."""

TIMES = (
    "seconds",
    "time",
    "counted",
    "memory",
    "versions",
    "version",
    "run_dir",
    "ckpt_path",
    "dirpath",
    "model_path",
    "k_models",
)
"""What names of values contain that may differ."""

Values = dict[str, Any]
Case = tuple[str, Callable[[Path], Values]]


def flat(value: Any, name: str = "") -> Values:
    """All tensors and plain values of nested containers, by dotted names; without times and versions."""
    if isinstance(value, Tensor):
        return {name: value.detach().cpu().clone()}
    if isinstance(value, bytes | bytearray):
        with contextlib.suppress(Exception):
            return flat(torch.load(io.BytesIO(value), weights_only=False), f"{name}.packed")
        return {name: bytes(value)}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {name: value if isinstance(value, str | int | float | bool | None) else repr(value).partition(" at ")[0]}
    found: Values = {}
    for key, inner in items:
        if not any(word in str(key) for word in TIMES):
            found |= flat(inner, f"{name}.{key}" if name else str(key))
    return found


# ---------------------------------------------------------------------- commands


def command(words: list[str]) -> None:
    """A command of ``pfl`` in this process."""
    from pfl_lightning.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(words)


def words_of(action: str, config: str, folder: Path, **options: Any) -> list[str]:
    """The arguments of a small run of a config."""
    left_out = ["model.encoder"] if config.startswith(OWN_ENCODERS) else []
    left_out += [OF_CLIENTS] if "base:" in Path(f"configs/{config}.yaml").read_text() else []
    small = {name: value for name, value in SMALL.items() if not name.startswith(tuple(left_out))}
    chosen = {"config": f"configs/{config}.yaml", "run_dir": folder / "runs", **small, "trainer.max_epochs": 2}
    chosen |= {name.replace("__", "."): value for name, value in options.items()}
    return [action, *(str(word) for name, value in chosen.items() for word in (f"--{name}", value))]


def left_in(folder: Path) -> Values:
    """The last checkpoint, results and exported files of a run."""
    (version,) = (folder / "runs").glob("version_*")
    found: Values = {}
    for path in sorted(version.rglob("*")):
        name = str(path.relative_to(version))
        if path.name == "last.ckpt" or path.suffix == ".pt":
            found |= flat(torch.load(path, map_location="cpu", weights_only=False), name)
        elif path.suffix == ".json":
            found |= flat(json.loads(path.read_text()), name)
        elif path.suffix == ".csv":
            with path.open() as file:
                found |= flat(list(csv.DictReader(file)), name)
    return found


def fitted(config: str, folder: Path, **options: Any) -> Values:
    """What a run leaves."""
    command(words_of("fit", config, folder, **options))
    return left_in(folder)


def resumed(config: str, folder: Path) -> Values:
    """What a run of one round leaves that is resumed to two."""
    command(words_of("fit", config, folder, trainer__max_epochs=1))
    command(words_of("fit", config, folder, ckpt_path="last"))
    return left_in(folder)


def killed(config: str, folder: Path) -> Values:
    """What a run leaves that is killed in its second round, and resumed."""
    words = words_of("fit", config, folder)
    words += ["--trainer.callbacks+=_helpers.kill.KillInRound", "--trainer.callbacks.round=1"]
    dying = [sys.executable, "-W", "ignore", "-m", "pfl_lightning.cli", *words, "--trainer.callbacks.batch=2"]
    code = subprocess.run(dying, capture_output=True).returncode
    if code != -9:
        raise RuntimeError(f"the run was not killed: exit code {code}")
    command(words_of("fit", config, folder, ckpt_path="last"))
    return left_in(folder)


def after(config: str, folder: Path) -> Values:
    """What personalization, test and export leave."""
    command(words_of("fit", config, folder))
    command(words_of("personalize", config, folder, ckpt_path="last", personalize__epochs=2))
    command(words_of("test", config, folder, ckpt_path="last"))
    command(words_of("export", config, folder, ckpt_path="last"))
    return left_in(folder)


def under(**options: Any) -> Iterator[Case]:
    """Runs of all configs of the digits."""
    for path in sorted(Path("configs").glob("*_digits*.yaml")):
        yield path.stem, partial(fitted, path.stem, **options)


def varied(play: Callable[[str, Path], Values], methods: Sequence[str] = VARIED) -> Iterator[Case]:
    """A play of some methods."""
    for method in methods:
        yield method, partial(play, f"{method}_digits")


# ---------------------------------------------------------------------- users' modules


def of_federation(federation: Any, trainer: Any) -> Values:
    """The models of server and clients, and what was logged."""
    found = flat(dict(federation.global_model().state_dict()), "global")
    for client in range(federation.num_clients):
        with contextlib.suppress(IndexError):
            found |= flat(dict(federation.client_model(client).state_dict()), f"client {client}")
    return found | flat({name: float(value) for name, value in trainer.callback_metrics.items()}, "logged")


def project(method: str, engine: str, scheduled: bool, folder: Path) -> Values:
    """The project of ``tests/_helpers`` under a method, by ``federate``."""
    from _helpers.project import Data, run_project
    from changing import Changing

    import pfl_lightning
    from pfl_lightning import methods

    own = {"module": Changing(), "data": Data(drop_last=True)} if scheduled else {}
    made = getattr(pfl_lightning, engine)()
    federation, trainer = run_project(getattr(methods, method), 3, engine=made, head="fc", **own)
    return of_federation(federation, trainer)


def callback_form(method: str, folder: Path) -> Values:
    """``FederatedLoop(method=...)`` in the project's own calls."""
    import lightning as L
    from _helpers.project import Data, Net

    from pfl_lightning import FederatedLoop, methods

    data = Data()
    L.seed_everything(7, verbose=False)
    loop = FederatedLoop(method=getattr(methods, method), partition=data.toy.partition, head="fc", seed=7)
    trainer = L.Trainer(max_epochs=2, callbacks=[loop], logger=False, accelerator="cpu", enable_checkpointing=False)
    module = Net()
    trainer.fit(module, datamodule=data)
    found = flat(dict(module.state_dict()), "module")
    found |= flat({name: float(value) for name, value in trainer.callback_metrics.items()}, "logged")
    return found | flat(trainer.test(module, datamodule=data, verbose=False), "test")


def drop_in() -> Iterator[Case]:
    """Users' modules."""
    for method in ("FedAvg", "FedPer", "FedPAC", "Ditto", "FedProto", "FedRep", "FedRoD", "FedProx"):
        for engine in ("SequentialEngine", "TrainerEngine"):
            for scheduled in (False, True):
                name = f"{method}-{engine}{'-changing' if scheduled else ''}"
                yield name, partial(project, method, engine, scheduled)
        yield f"callback-{method}", partial(callback_form, method)


def older(folder: Path) -> Values:
    """The same project in the package pytorch_lightning."""
    import test_older_package as old
    from _helpers.toy import GivenCohorts

    from pfl_lightning import federate
    from pfl_lightning.methods import FedPer

    module, data = old.Old(), old.OldData()
    federation, divided = federate(module, data, FedPer, data.toy.partition, head="fc", seed=7)
    trainer = old.older_trainer(2, GivenCohorts(range(5)))
    trainer.fit(federation, datamodule=divided)
    return of_federation(federation, trainer)


def foreign() -> Iterator[Case]:
    """The modules of packages that are installed."""
    from _helpers.foreign import PROJECTS
    from _helpers.foreign.project import federated_run, one_client_run

    from pfl_lightning.methods import FedAvg, FedPer

    def played(project: Any, folder: Path) -> Values:
        method = FedPer if project.head else FedAvg
        found = flat(of_federation(*federated_run(project, folder, method)), "federated")
        for number, module in enumerate(one_client_run(project, 1)):
            found |= flat(dict(module.state_dict()), f"one client {number}")
        return found

    for each in PROJECTS:
        if not each.fails and each.is_installed():
            yield each.id, partial(played, each)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sequential": partial(under, engine="sequential"),
    "trainer": partial(under, engine="trainer"),
    "vectorized": partial(under, engine="vectorized"),
    "processes": partial(varied, partial(fitted, engine="processes"), FEW),
    "resumed": partial(varied, resumed),
    "killed": partial(varied, killed, FEW),
    "after": partial(varied, after),
    "drop_in": drop_in,
    "older": lambda: iter([("pytorch_lightning", older)]),
    "older_first": lambda: iter([("pytorch_lightning", older)]),
    "foreign": foreign,
}


def main() -> None:
    """Run a group."""
    group, output, checkout, pattern = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]), sys.argv[4]
    if group == "older_first":
        import pytorch_lightning  # noqa: F401  # before the package
    os.chdir(checkout)
    warnings.simplefilter("ignore")
    os.environ["PFL_DEBUG"] = "1"
    torch.set_num_threads(1)
    for name, play in GROUPS[group]():
        if not fnmatch.fnmatch(f"{group}/{name}", pattern):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    found = play(Path(folder))
            except (Exception, SystemExit) as error:
                found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                traceback.print_exc()
        torch.save(found, output / f"{group}--{name}.pt")


if __name__ == "__main__":
    main()
