"""The command line: ``pfl fit | validate | test | personalize | export | partition | methods | compare | ...``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO
from rich.console import Console

from pfl_lightning.callbacks import ArchitectureTable, FederatedLoop, Inspection, ResultsWriter, architecture_table
from pfl_lightning.callbacks.inspection import InspectionCallback
from pfl_lightning.cli.compare import compare, tensorboard
from pfl_lightning.cli.messages import shorten
from pfl_lightning.cli.parser import CLIParser, choose_engine, with_engine
from pfl_lightning.cli.personalize import personalization_table, write_personalization
from pfl_lightning.cli.runs import RunFolder
from pfl_lightning.cli.tables import encoders_table, fit_table, methods_table
from pfl_lightning.cli.trainer import FederatedTrainer, SaveConfig
from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.errors import FederationError
from pfl_lightning.federation import Federation
from pfl_lightning.phases import Personalization
from pfl_lightning.state.checkpoints import AtomicCheckpointIO, BestRound

__all__ = ["FederatedCLI", "main"]

DESCRIPTION = """Personalized federated learning on PyTorch Lightning.
Typical use: pfl fit --config configs/fedpac_digits.yaml. `pfl methods` lists the methods,
`pfl compare RUN...` puts finished runs beside each other, `pfl tensorboard RUN` looks inside one."""


class FederatedCLI(LightningCLI):
    """LightningCLI for a :class:`~pfl_lightning.Federation`, with the loop, results and checkpoints in place."""

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        if args is None or isinstance(args, list):
            args = with_engine(sys.argv[1:] if args is None else args)
        super().__init__(
            Federation,
            FederatedDataModule,
            subclass_mode_data=True,
            trainer_class=FederatedTrainer,
            trainer_defaults={"log_every_n_steps": 1},
            save_config_callback=SaveConfig,
            seed_everything_default=0,
            parser_class=CLIParser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"description": DESCRIPTION},
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Trainer methods that are subcommands, with the arguments that the CLI itself provides."""
        names = {name: skip for name, skip in LightningCLI.subcommands().items() if name != "predict"}
        own = ("partition", "personalize", "export")
        return {**names, **{name: {"model", "datamodule"} for name in own}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder and the callbacks that every run has."""
        parser.add_argument(
            "--run_dir", type=str, default="runs", help="Folder of the runs; each gets version_N in it."
        )
        parser.add_argument(
            "--engine",
            type=Literal["sequential", "vectorized", "ray", "trainer"] | None,
            default=None,
            help="How local fits run, short for --model.engine; its options follow as --model.engine.NAME.",
        )
        parser.add_argument(
            "--personalize",
            type=Personalization | None,
            default=None,
            help="What every client adapts to its own data after the training; null for nothing.",
        )
        parser.add_argument(
            "--inspect",
            type=bool | Inspection | None,
            default=None,
            help="Pictures and further scalars (docs/inspection.md): true for all, or with settings.",
        )
        parser.add_lightning_class_args(FederatedLoop, "loop")
        parser.add_lightning_class_args(ResultsWriter, "results")
        parser.add_lightning_class_args(BestRound, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "accuracy/mean",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-round-{epoch}",
                "checkpoint.auto_insert_metric_name": False,
            }
        )

    def before_instantiate_classes(self) -> None:
        """Choose the run's folder: that of the checkpoint, or a new one."""
        if self.subcommand is None:
            return
        config = self.config[self.subcommand]
        choose_engine(config)
        runs = RunFolder(Path(config.run_dir))
        self.run_folder = runs.next()
        if self.subcommand == "partition":
            return
        if config.ckpt_path is not None:
            checkpoint = runs.find_checkpoint(config.ckpt_path)
            config.ckpt_path, self.run_folder = str(checkpoint), runs.run_of(checkpoint) or self.run_folder
        elif self.subcommand != "fit":
            does = "exports" if self.subcommand == "export" else "evaluates"
            warnings.warn(
                f"pfl {self.subcommand} without --ckpt_path {does} a model that was not trained", stacklevel=2
            )
        if self.subcommand != "fit":  # an evaluation has no use for what Communication has noted
            warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
        config.weights_only = True if config.weights_only is None else config.weights_only
        if self.subcommand == "export":
            config.output = config.output or str(self.run_folder / "clients")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Let everything that a run leaves behind lie in the run's folder, whatever the logger."""
        if self.subcommand is None:
            return super().instantiate_trainer(**kwargs)
        config, folder = self.config[self.subcommand].trainer, self.run_folder
        kwargs["default_root_dir"] = config.default_root_dir or str(folder.parent)
        if self.subcommand == "export":
            kwargs["logger"] = False
        elif config.logger is None and self.subcommand != "partition":
            kwargs["logger"] = TensorBoardLogger(folder.parent.parent, name=folder.parent.name, version=folder.name)
        kwargs["plugins"] = self._own("plugins")
        kwargs["callbacks"] = self._own("callbacks")
        kwargs["callbacks"] += self._inspection(kwargs["callbacks"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in kwargs["plugins"]):
            kwargs["plugins"].append(AtomicCheckpointIO())
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(ArchitectureTable())  # type: ignore[attr-defined]
        self._place(trainer, folder)
        return trainer

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Leave out the best round's checkpoints where the Trainer is to write none: it would refuse them."""
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, BestRound)]
        trainer: L.Trainer = super()._instantiate_trainer(config, callbacks)
        return trainer

    def _own(self, name: str) -> list[Any]:
        """What the config lists for the Trainer, one or several."""
        own = self.config_init[self.subcommand].trainer[name] or []
        return [*(own if isinstance(own, list) else [own])]

    def _inspection(self, own: list[L.Callback]) -> list[InspectionCallback]:
        """The callbacks that ``inspect`` asks for, apart from those that the config lists."""
        inspect: bool | Inspection | None = self.config_init[self.subcommand].inspect
        if not inspect or self.subcommand == "partition":
            return []
        settings = Inspection() if inspect is True else inspect
        config = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
        return settings.callbacks(config, without=[type(callback) for callback in own])

    def _place(self, trainer: L.Trainer, folder: Path) -> None:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, ResultsWriter):
                callback.dirpath = callback.dirpath or str(folder)
            elif isinstance(callback, BestRound):
                callback.dirpath = callback.dirpath or str(folder / "checkpoints")
            elif isinstance(callback, InspectionCallback):
                callback.dirpath = callback.dirpath or str(folder / "inspection")
            elif isinstance(callback, SaveConfig):
                callback.folder = folder
        if self.config[self.subcommand].trainer.enable_checkpointing is not False:
            # ModelCheckpoint's own save_last follows the best round: it writes only when a best round is written.
            callbacks.append(
                ModelCheckpoint(
                    folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True
                )
            )

    def before_personalize(self) -> None:
        """Take what the config says; Calibre's settings otherwise."""
        self.trainer.personalization = self._personalization() or Personalization()  # type: ignore[attr-defined]

    def after_personalize(self) -> None:
        """Say how it went and where to look."""
        settings = self.trainer.personalization  # type: ignore[attr-defined]
        Console().print(personalization_table(self.model, settings))
        write_personalization(self.model, settings, self.run_folder)
        print(f"Results: {self.run_folder}/personalized.json, personalized.csv")

    def _personalization(self) -> Personalization | None:
        settings: Personalization | None = self.config_init[self.subcommand].personalize
        return settings

    def after_fit(self) -> None:
        """Say how it went and where to look; then personalize, if the config says how."""
        self._report_fit()
        if self._personalization() is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.before_personalize()
            self.trainer.personalize(self.model, self.datamodule)  # type: ignore[attr-defined]
            self.after_personalize()

    def _report_fit(self) -> None:
        writer = next(c for c in self.trainer.callbacks if isinstance(c, ResultsWriter))  # type: ignore[attr-defined]
        if not writer.chosen or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        Console().print(fit_table(self.model, writer))
        folder = writer.folder(self.trainer)
        print(f"Results: {folder}/results.json, clients.csv")
        if any(isinstance(logger, TensorBoardLogger) for logger in self.trainer.loggers):
            print(f"To look inside: pfl tensorboard {folder.parent}")


def print_methods(args: list[str]) -> None:
    """Print the methods with paper and year, and the encoders; with a config, the federation's own architectures."""
    if {"-h", "--help"} & set(args):
        print(
            "usage: pfl methods                  the methods and the encoders\n"
            "       pfl methods --config FILE    the architectures of a run, and how many clients have each"
        )
        return None
    if args:
        cli = FederatedCLI(args=args, run=False)
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        rows, number = cli.model.describe(cli.datamodule), cli.datamodule.num_clients
        return Console().print(architecture_table(rows, f"{number} clients"))
    Console().print(methods_table())
    Console().print(encoders_table())
    return None


OTHER_COMMANDS = {"methods": print_methods, "compare": compare, "tensorboard": tensorboard}
"""Subcommands that need no Trainer."""


def _quiet() -> None:
    """Drop notices that are about ordinary training and mislead here."""
    for message in (".*returned `None`, this fit will run with no optimizer.*", ".*does not have many workers.*"):
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("ignore", module="lightning.pytorch.utilities._pytree")
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended.*")  # pfl methods --config


def main(args: list[str] | None = None) -> None:
    """Entry point of ``pfl``."""
    words = sys.argv[1:] if args is None else args
    _quiet()
    try:
        if words[:1] and words[0] in OTHER_COMMANDS:
            OTHER_COMMANDS[words[0]](words[1:])
        else:
            FederatedCLI(args=args)
    except (FederationError, MisconfigurationException, ValueError, OSError) as error:
        if os.environ.get("PFL_DEBUG"):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        sys.exit(f"pfl: {shorten(str(error))}{notes}\n(PFL_DEBUG=1 shows where)")
    return None


if __name__ == "__main__":
    main()
