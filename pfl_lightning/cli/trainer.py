"""Trainer with the further subcommands of the command line, and where its callbacks write."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import SaveConfigCallback
from rich.console import Console

from pfl_lightning.callbacks import ResultsWriter, architecture_table
from pfl_lightning.callbacks.inspection import InspectionCallback
from pfl_lightning.data import client_number, names_of
from pfl_lightning.datamodules import FederatedDataModule, partition_table, plot_partition
from pfl_lightning.datamodules.datasets.images import decode_images, images_in
from pfl_lightning.errors import UsageError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.exported import export_clients, exported_clients
from pfl_lightning.federation.loop import loop_of
from pfl_lightning.notices import counted, named_clients
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.changes import DATA, Change, check_rounds_left, listed_some, record_changes
from pfl_lightning.runs.files import PARTITION, SLURM_JOB, last_checkpoint, newest_config, read_config
from pfl_lightning.runs.folder import RunFolder, of_a_run
from pfl_lightning.state.best_round import BestRound, LastRound
from pfl_lightning.state.files import replace_file


class FederatedTrainer(L.Trainer):
    """Lightning's Trainer with the subcommands ``partition``, ``export``, ``predict`` and ``personalize``."""

    def save_checkpoint(self, filepath: str | Path, *args: Any, **options: Any) -> None:
        """Save a checkpoint, but none for SLURM: a job that is started again goes on from ``last.ckpt``."""
        if not Path(filepath).name.startswith("hpc_ckpt_"):
            super().save_checkpoint(filepath, *args, **options)

    def partition(self, model: Federation, datamodule: FederatedDataModule, output: str | None = None) -> None:
        """Print the clients' architectures, and the samples of each class that each holds, without training.

        Args:
            model: The federation.
            datamodule: The data.
            output: Folder for ``partition.png`` and ``partition.npz``; by default the run's parent folder.
        """
        datamodule.prepare_data()
        datamodule.read_whole()
        datamodule.setup("fit")
        folder = Path(output or self.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        counts = datamodule.class_counts()
        groups, names = datamodule.client_groups, [*(datamodule.client_names or ())]
        unlabeled = datamodule.unlabeled_sizes
        described = model.describe(datamodule)  # type: ignore[arg-type]  # it has properties for the attributes
        Console().print(architecture_table(described, f"{datamodule.num_clients} clients"))
        sizes, classes = datamodule.evaluated_sizes, datamodule.class_names
        table = partition_table(counts, classes, groups=groups, unlabeled=unlabeled, names=names, evaluated=sizes)
        Console().print(table)
        plot_partition(counts, datamodule.class_names, str(folder / "partition.png"), groups=groups or names or None)
        datamodule.save_partition(str(folder / PARTITION))
        print(f"Saved {folder / 'partition.png'} and {folder / 'partition.npz'}")

    def export(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        output: str | None = None,
        clients: list[int | str] | None = None,
        format: Literal["state_dict", "torch_export", "onnx"] = "state_dict",
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Write every client's own model to files that load without this package.

        With a personalization (--personalize, or one in the config) it is the personalized model.

        Args:
            model: The federation.
            datamodule: The data.
            output: Folder for ``client_<number>.pt`` and ``.json``; by default ``clients`` in the run's folder.
            clients: Numbers or names of clients; by default all.
            format: A plain state_dict (``.pt``), or the whole prediction as a graph (``.pt2``, ``.onnx``).
            ckpt_path: A checkpoint, ``last`` or ``best``; without one the model as it is.
            weights_only: Whether nothing but tensors and plain values is loaded.
        """
        assert output is not None
        Path(output).mkdir(parents=True, exist_ok=True)
        chosen = None if clients is None else list(dict.fromkeys(clients))
        if chosen == []:
            raise UsageError(f"--clients: no client is named; clients are 0 to {datamodule.num_clients - 1}")
        with self._own_models(model, datamodule, ckpt_path, weights_only) as how:
            written = export_clients(model, output, chosen, format)
        print(f"Saved {counted(len(written), 'model')} in {output}{how}")

    @contextmanager
    def _own_models(self, model: Federation, data: Any, ckpt_path: Any, weights_only: Any) -> Iterator[str]:
        """Clients' models after a checkpoint, personalized where that is asked for, of which is told."""
        self.limit_val_batches = 0  # the checkpoint is loaded, and nothing is evaluated
        self.validate(model, datamodule=data, ckpt_path=ckpt_path, verbose=False, weights_only=weights_only)
        settings = self.personalization
        with nullcontext() if settings is None else model.personalized(settings):
            yield "" if settings is None else f", personalized ({settings.train})"

    def predict(  # type: ignore[override]
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        client: str | int | None = None,
        inputs: str | None = None,
        output: str | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Write the predictions of clients' own models as tables, with class names and probabilities.

        With a personalization (--personalize, or one in the config) they are the personalized models.

        Args:
            model: The federation.
            datamodule: The data.
            client: Number or name of a client; by default all, each for its test part or its rows of the inputs.
            inputs: A file with a batch (N, ...) of what the data set holds, ``.npy`` or ``.pt``, a folder of images,
                or rows of a table (``.csv``, ``.parquet``) without the target; by default the client's test part.
                Without a client a table, whose column of the clients says by whose model a row is predicted.
            output: Folder for ``client_<number>.csv``; by default ``predictions`` in the run's folder.
            ckpt_path: A checkpoint, ``last`` or ``best``; without one the model as it is.
            weights_only: Whether nothing but tensors and plain values is loaded.
        """
        assert output is not None
        with self._own_models(model, datamodule, ckpt_path, weights_only) as how:
            chosen = None if client is None else client_number(model.data, client)
            asked = asked_inputs(datamodule, chosen, None if inputs is None else Path(inputs))
            for number, name in exported_clients(model, asked):
                who = named_clients([number], names_of(model.data))
                if number in model.never_trained:
                    warnings.warn(
                        f"{who} has trained in no round of this checkpoint, so that what {model.method_name} keeps on "
                        "clients is untrained: train more rounds, or choose another client",
                        stacklevel=2,
                    )
                given, samples = asked[number]
                found = model.predict(number, given)
                path = Path(output) / (f"{name}.csv" if inputs is None else f"{name}_{Path(inputs).stem}.csv")
                found.save(path, samples)
                accuracy = "" if found.accuracy is None else f", accuracy {100 * found.accuracy:.2f} %"
                print(f"Saved {counted(len(found.classes), 'prediction')} of {who} in {path}{accuracy}{how}")

    personalization: Personalization | None = None
    """What clients adapt before they are exported or evaluated."""

    def personalize(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Let every client adapt a trained model to its own data (--personalize), and evaluate it.

        Args:
            model: The federation.
            datamodule: The data.
            ckpt_path: A checkpoint, ``last`` or ``best``.
            weights_only: Whether nothing but tensors and plain values is loaded.
        """
        with model.personalized(self.personalization or Personalization()):
            self.test(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=weights_only)


TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq")
"""How files of tables end."""


Inputs = tuple[Any, list[str] | None]
"""Inputs, and the names of the samples; nothing for a client's own test part."""


def asked_inputs(datamodule: Any, client: int | None, path: Path | None) -> dict[int, Inputs]:
    """What the models of a client, or of all, predict, by the client's number.

    Args:
        datamodule: The data.
        client: The client; ``None`` for all that have test samples, or rows of the table.
        path: The file, for all clients a table; ``None`` for their test parts.

    Raises:
        UsageError: There is no such file, it holds something else, or it does not say whose its rows are.
    """
    if client is not None:
        return {client: (None, None) if path is None else read_inputs(path, datamodule, client)}
    if path is None:
        every = range(datamodule.num_clients)
        return {number: (None, None) for number in every if len(datamodule.client_data(number).test)}
    if not hasattr(datamodule, "rows_by_client") or path.suffix.lower() not in TABLES:
        raise UsageError(f"--inputs {path}: name the client whose model predicts them (--client)")
    try:
        rows = datamodule.rows_by_client(path)
        return {number: (datamodule.inputs_of(own), [*map(str, own.index)]) for number, own in rows.items()}
    except (OSError, ValueError) as error:
        raise UsageError(f"--inputs {path}: {error}") from error


def read_inputs(path: Path, datamodule: FederatedDataModule, client: int = 0) -> Inputs:
    """Inputs in a file or a folder of images, and the names of the images.

    Args:
        path: The file or folder.
        datamodule: The data, which say what inputs are.
        client: The client whose model takes them.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    try:
        if path.is_dir():
            files = images_in(path)
            if not files:
                raise ValueError("the folder has no images")
            channels: Any = datamodule.input_shape[0]
            found = decode_images(files, getattr(datamodule, "image_size", None), 1 if channels == 1 else 3)
            return found, [Path(file.path).name for file in files]
        if path.suffix.lower() in TABLES and getattr(datamodule, "input_encoding", None) is not None:
            names = names_of(datamodule)  # type: ignore[arg-type]
            return datamodule.inputs_of(path, names[client] if names else None), None  # type: ignore[attr-defined]
        if path.suffix not in (".npy", ".pt"):
            raise ValueError("expected .npy, .pt or a folder of images, or for a FromTable rows as CSV or Parquet")
        found = np.load(path, allow_pickle=False) if path.suffix == ".npy" else torch.load(path, weights_only=True)
        return torch.as_tensor(found), None
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError) as error:
        raise UsageError(f"--inputs {path}: {error}") from error


class SaveConfig(SaveConfigCallback):
    """Saves the resolved config into the run's folder; a resumed run keeps the first one and adds its own."""

    folder: Path
    slurm: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing yet: a run that is refused leaves no config behind."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Save the config."""
        if trainer.fast_dev_run:
            return
        path, number = self.folder / self.config_filename, 0
        origin: Path | None = None  # in a folder of its own a run goes on from that of the checkpoint
        if trainer.ckpt_path and not path.exists():
            origin = of_a_run(Path(trainer.ckpt_path))
        before = read_config(newest_config(origin or self.folder))
        rounds = loop_of(trainer).rounds
        while path.exists():
            number += 1
            path = self.folder / f"config-resumed-{number}.yaml"
        with replace_file(path) as temporary:
            how = {"skip_unset": False, "skip_validation": True, "overwrite": True, "multifile": self.multifile}
            self.parser.save(self.config, temporary, **how)  # which has been parsed
            if before and (trainer.should_stop or 0 <= trainer.max_epochs <= rounds):
                check_rounds_left(self.folder, before, read_config(temporary), rounds)
        if before:
            data = pl_module.data_before, getattr(pl_module.data, "data_fingerprint", None)
            # What the results of a run on other data must say: the options may be the same.
            other = [] if data[0] is None else [Change(DATA, *data)]
            found = record_changes(self.folder, path, before, rounds + 1, other)
            if found:
                print(f"{self.folder} resumes with different options (see changes.json): {listed_some(found)}")
        if self.slurm is not None:
            with replace_file(self.folder / SLURM_JOB) as temporary:
                temporary.write_text(json.dumps(self.slurm, indent=2) + "\n")


def place_callbacks(trainer: L.Trainer, folder: Path, slurm: dict[str, Any] | None, *, checkpoints: bool) -> None:
    """Let the Trainer's callbacks write to the run's folder, and add the one that saves the last round.

    Args:
        trainer: The Trainer, with all other callbacks.
        folder: The run's folder; a callback with a folder of its own keeps that.
        slurm: The job of SLURM that the process belongs to, with the command's words: a job that fits several seeds
            has several commands. ``None`` outside of one.
        checkpoints: Whether the Trainer writes checkpoints.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    places: dict[Any, Path] = {
        ResultsWriter: folder,
        BestRound: folder / "checkpoints",
        InspectionCallback: folder / "inspection",
    }
    callback: Any
    for callback in callbacks:
        for kind, place in places.items():
            if isinstance(callback, kind):
                callback.dirpath = callback.dirpath or str(place)
        if isinstance(callback, SaveConfig):
            callback.folder, callback.slurm = folder, slurm
    if checkpoints:
        # save_last of ModelCheckpoint follows the best round: it writes only when a best round is written.
        last = LastRound(folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True)
        callbacks.append(last)
    # A checkpoint that another callback saves has this round as the best one, if it is.
    callbacks.sort(key=lambda one: isinstance(one, Checkpoint) and not isinstance(one, BestRound))


def checkpoint_of_job(command: dict[str, Any], runs: RunFolder) -> Path | None:
    """The last round of the run that a command began before SLURM started its job again, if it did.

    Args:
        command: The job with the command's words.
        runs: Where its runs lie.
    """
    for run in reversed(runs.versions()) if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else ():
        path, last = run / SLURM_JOB, last_checkpoint(run)
        if path.is_file() and json.loads(path.read_text()) == command and last.is_file():
            return last
    return None
