"""LightningCLI for federations: options, callbacks and folders that every run has."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, suppress
from inspect import signature
from typing import Any, Literal

import lightning as L
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO

from pfl_lightning.callbacks import ArchitectureTable, FederatedLoop, Inspection, ResultsWriter, RoundProgress
from pfl_lightning.callbacks.inspection import InspectionCallback
from pfl_lightning.callbacks.stragglers import Stragglers
from pfl_lightning.cli.allowed import check_names
from pfl_lightning.cli.parser import (
    CLIParser,
    apply_clipping,
    apply_engine_option,
    apply_metrics_option,
    expand_engine_option,
)
from pfl_lightning.cli.stopping import hangup_as_sigterm, how_to_go_on, stopping_signal
from pfl_lightning.cli.tables import print_evaluation, print_fit, print_personalization
from pfl_lightning.cli.trainer import FederatedTrainer, SaveConfig, checkpoint_of_job, place_callbacks
from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.errors import FederationError, UsageError, refused
from pfl_lightning.federation import Federation
from pfl_lightning.federation.outer_callbacks import check_strategy
from pfl_lightning.federation.preemption import slurm_job
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.files import last_checkpoint
from pfl_lightning.runs.folder import RunFolder, chosen_checkpoint, run_folder, runs_below
from pfl_lightning.state.best_round import BestRound
from pfl_lightning.state.checkpoints import AtomicCheckpointIO

_OUTPUT = {"export": "clients", "predict": "predictions"}
"""Folders in a run's."""

DESCRIPTION = """Personalized federated learning on PyTorch Lightning.
Typical use: pfl fit --config configs/fedpac_digits.yaml. `pfl methods` lists the methods,
`pfl compare RUN...` compares finished runs, `tensorboard --logdir RUN` shows one."""


PREPARED: dict[str, dict[str, Any]] = {}
"""Parsers that a :class:`ParsedCLI` has left, by subcommand, as attributes of the command line."""


class FederatedCLI(LightningCLI):
    """LightningCLI for a :class:`~pfl_lightning.Federation`, with the loop, results and checkpoints in place."""

    def __init__(self, args: ArgsType = None) -> None:
        if args is None or isinstance(args, list):
            self._argv = list(sys.argv[1:] if args is None else args)  # as they were typed
            args = expand_engine_option(self._argv)
        else:
            self._argv = []
        self._typed = self._argv[0] if self._argv else ""  # which is a subcommand where there is one
        self._held = ExitStack()  # the run's folder
        with self._held:
            super().__init__(
                Federation,
                FederatedDataModule,
                subclass_mode_data=True,
                trainer_class=FederatedTrainer,
                trainer_defaults={"log_every_n_steps": 1, "devices": 1},
                save_config_callback=SaveConfig,
                seed_everything_default=0,
                parser_class=CLIParser,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={"description": DESCRIPTION, "prog": "pfl"},
                args=args,
            )

    def setup_parser(self, *args: Any) -> None:
        """Make the parser, or take the one that was prepared for the subcommand."""
        if self._typed not in PREPARED:
            super().setup_parser(*args)
        vars(self).update(PREPARED.get(self._typed, {}))

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Trainer methods that are subcommands, with the arguments that the CLI itself provides."""
        names = {name: skip for name, skip in LightningCLI.subcommands().items() if name != "predict"}
        added = ("partition", "personalize", "export", "predict")
        return {**names, **{name: {"model", "datamodule"} for name in added}}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that knows which subcommand was typed."""
        return super().init_parser(**{"command": self._typed, **kwargs})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Give the options to the subcommand that was typed alone: those of all would take most of the start."""
        if self._typed in self.subcommands() and self._typed != subcommand:
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder and the callbacks that every run has."""
        engines = Literal["sequential", "vectorized", "processes", "ray", "trainer"]
        for name, kind, default, text in (
            ("run_dir", str, "runs", "Folder of the runs; each gets version_N in it."),
            ("engine", engines | None, None, "Engine of local fits; its options follow as --model.engine.NAME."),
            ("personalize", Personalization | None, None, "Personalization of every client after the training."),
            ("inspect", bool | Inspection | None, None, "Pictures and further scalars: true, or settings."),
            ("stragglers", Stragglers | None, None, "Simulated seconds: clients that are slow, late or gone."),
        ):
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        text = "Further metrics of clients: names, or import paths of torchmetrics' classes."
        parser.add_argument("--metrics", type=str, nargs="+", default=[], help=text)
        # The model is a federation here: the loop makes none.
        parser.callback_keys.append("loop")
        made = {*signature(federate).parameters} - {"cohort"}
        parser.add_class_arguments(FederatedLoop, "loop", fail_untyped=False, sub_configs=True, skip=made)
        parser.add_lightning_class_args(ResultsWriter, "results")
        parser.add_lightning_class_args(BestRound, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val_accuracy/mean",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-round-{round}",
                "checkpoint.auto_insert_metric_name": False,
            }
        )

    def before_instantiate_classes(self) -> None:
        """Check what the config names; choose the run's folder: that of the checkpoint, or a new one."""
        config = self.config[self.subcommand]
        check_names(config)
        self._check_trains(config)
        apply_engine_option(config)
        apply_metrics_option(config)
        apply_clipping(config)
        runs = RunFolder(runs_below(config.run_dir, config.trainer.default_root_dir))
        job = slurm_job()
        self._slurm = None if job is None else {"job": job, "arguments": [*self._argv]}
        if self.subcommand == "partition":
            self.run_folder = runs.base / "partition"  # nothing is written there
            return
        known = None
        if self.subcommand == "fit" and self._slurm is not None:
            began = checkpoint_of_job(self._slurm, runs)
            config.ckpt_path = str(began) if began is not None else config.ckpt_path
        if config.ckpt_path is not None:
            options = yaml.safe_load(self._parser(self.subcommand).dump(config, skip_unset=False))
            elsewhere = any(word.startswith("--run_dir") for word in self._argv)
            config.ckpt_path, known = chosen_checkpoint(
                runs, config.ckpt_path, options, goes_on=self.subcommand == "fit", elsewhere=elsewhere
            )
        self.run_folder = self._held.enter_context(run_folder(runs, known, lock=self.subcommand == "fit"))
        if config.ckpt_path is None and self.subcommand != "fit":
            does = "exports" if self.subcommand == "export" else "evaluates"
            warnings.warn(
                f"pfl {self.subcommand} without --ckpt_path {does} a model that was not trained", stacklevel=2
            )
        if self.subcommand != "fit":  # an evaluation needs no state of callbacks of fits
            warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
        if "weights_only" in config and config.weights_only is None:
            config.weights_only = True
        if self.subcommand in ("test", "validate"):
            config.verbose = False  # Lightning's table has the names of logged values; the CLI has its own
        if self.subcommand in ("export", "predict"):
            config.output = config.output or str(self.run_folder / _OUTPUT[self.subcommand])

    def _check_trains(self, config: Any) -> None:
        """Refuse results of models that were never trained, unless they are asked for.

        Raises:
            UsageError: A fit has no round and no personalization, or a personalization has no checkpoint.
        """
        zero = next((name for name in ("max_epochs", "limit_train_batches") if config.trainer[name] == 0), None)
        untrained = zero and not config.personalize and not config.trainer.fast_dev_run
        wrong = f"--trainer.{zero} is 0: nothing would be trained" if self.subcommand == "fit" and untrained else ""
        if self.subcommand == "personalize" and config.ckpt_path is None:
            wrong = "pfl personalize needs --ckpt_path, the trained model that clients adapt: last, best or a file"
        if wrong:
            raise UsageError(
                f"{wrong}; to let each client adapt untrained models on purpose: pfl fit --trainer.max_epochs 0 "
                "--personalize.train all (or another choice)"
            )

    def _set_seed(self) -> None:
        """Seed everything.

        Raises:
            UsageError: The seed is out of bounds.
        """
        try:
            super()._set_seed()
        except ValueError as error:
            raise UsageError(f"--seed_everything: {error}") from error

    def _parse_ckpt_path(self) -> None:
        """Take no options from a checkpoint: those of the config count, and it is read later, with checks."""

    def instantiate_classes(self) -> None:
        """Make what the config names.

        Raises:
            UsageError: A class cannot be made from its arguments.
        """
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            raise refused(error) from error
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError) as error:
            reason = str(error) or "out of memory"
            raise UsageError(
                f"a class in the config rejects its init_args, correct them: {type(error).__name__}: {reason}"
            ) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, which writes all files of a run to the run's folder, whatever the logger."""
        config, folder = self.config[self.subcommand].trainer, self.run_folder
        # Lightning goes on from any checkpoint of SLURM's that it finds there: it must not be another run's.
        root = str(config.default_root_dir or "")
        kwargs["default_root_dir"] = (
            root if "://" in root else str(folder if self.subcommand == "fit" else folder.parent)
        )
        if self.subcommand in ("export", "predict"):
            kwargs["logger"] = False
        elif config.logger is None and self.subcommand != "partition":
            kwargs["logger"] = TensorBoardLogger(folder.parent.parent, name=folder.parent.name, version=folder.name)
        kwargs["plugins"] = self._configured("plugins")
        kwargs["callbacks"] = self._configured("callbacks")
        kwargs["callbacks"] += self._inspection(kwargs["callbacks"])
        kwargs["callbacks"] += filter(None, [self.config_init[self.subcommand].stragglers])
        kwargs |= self._progress(kwargs["callbacks"], config.enable_progress_bar)
        if not any(isinstance(plugin, CheckpointIO) for plugin in kwargs["plugins"]):
            kwargs["plugins"].append(AtomicCheckpointIO())
        trainer: Any = super().instantiate_trainer(**kwargs)
        adapts = Personalization() if self.subcommand == "personalize" else None  # unless the config says how
        trainer.personalization = self.config_init[self.subcommand].personalize or adapts
        check_strategy(trainer)  # now: a fit would first start the others, and wait for them
        trainer.callbacks.append(ArchitectureTable())
        place_callbacks(trainer, folder, self._slurm, checkpoints=config.enable_checkpointing is not False)
        made: L.Trainer = trainer
        return made

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Leave out the best round's checkpoints where the Trainer is to write none: it would refuse them."""
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, BestRound)]
        return super()._instantiate_trainer(config, callbacks)

    def _configured(self, name: str) -> list[Any]:
        """Plugins or callbacks that the config lists for the Trainer, one or several."""
        found = self.config_init[self.subcommand].trainer[name] or []
        return [*(found if isinstance(found, list) else [found])]

    def _inspection(self, configured: list[L.Callback]) -> list[InspectionCallback]:
        """The callbacks that ``inspect`` asks for, apart from those that the config lists."""
        inspect: bool | Inspection | None = self.config_init[self.subcommand].inspect
        if not inspect or self.subcommand == "partition":
            return []
        settings = Inspection() if inspect is True else inspect
        config = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_unset=False)
        return settings.callbacks(config, without=[type(callback) for callback in configured])

    def _progress(self, callbacks: list[L.Callback], wanted: bool | None) -> dict[str, Any]:
        """A line or a row for each round of a fit, and Lightning's progress bar on terminals alone."""
        if self.subcommand == "fit" and wanted is not False:
            callbacks += [] if any(isinstance(one, RoundProgress) for one in callbacks) else [RoundProgress()]
        own_bar = any(isinstance(one, ProgressBar) for one in callbacks)
        return {"enable_progress_bar": False} if wanted is None and not own_bar and not sys.stdout.isatty() else {}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; a stop from outside has the exit code of its signal (129, 130, 143), and says how to go on."""
        try:
            with hangup_as_sigterm() as hangups:
                super()._run_subcommand(subcommand)
        except (SystemExit, KeyboardInterrupt, FederationError, OSError) as error:
            number = stopping_signal(error, self.trainer.received_sigterm, hangups)
            if number is None:
                raise
            how = how_to_go_on(self._argv, last_checkpoint(self.run_folder)) if subcommand == "fit" else ""
            with suppress(OSError):  # the terminal may be gone
                print(f"pfl: stopped by {number.name}. {how}".rstrip(), file=sys.stderr)
            sys.exit(128 + number)

    def after_personalize(self) -> None:
        """Print the accuracies and where they are saved."""
        print_personalization(self.trainer, self.model, self.run_folder)

    def after_test(self) -> None:
        """Print the accuracies and where they are saved."""
        print_evaluation(self.trainer, self.model, "test" if self.subcommand == "test" else "validate")

    after_validate = after_test

    def after_fit(self) -> None:
        """Print the results; then personalize, if the config asks for it."""
        print_fit(self.trainer, self.model)
        trainer: Any = self.trainer
        if trainer.personalization is not None and not trainer.fast_dev_run:
            trainer.personalize(self.model, self.datamodule)
            self.after_personalize()


class ParsedCLI(FederatedCLI):
    """A command line up to where it would make what the config names; later ones of the process have its parser."""

    def _nothing(self, *args: Any) -> None: ...

    before_instantiate_classes = instantiate_classes = _run_subcommand = _set_seed = _nothing  # type: ignore[assignment]

    def after_instantiate_classes(self) -> None:
        """Leave the parser, which knows by now what the arguments of classes are."""
        names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
        PREPARED[self._typed] = {name: vars(self)[name] for name in names}


def prepare() -> None:
    """Make the parser of ``pfl fit``, and let it read a config, for all copies of this process."""
    words = ("--model.encoder=small_cnn", "--model.method=FedAvg", "--data=Digits", "--data.partition=IID")
    ParsedCLI(["fit", *words, "--data.partition.num_clients=2"])
