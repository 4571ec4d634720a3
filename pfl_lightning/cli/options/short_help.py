"""``pfl fit --help`` on two screens of 80 columns and 40 lines: the frequent options, and where the others are."""

from __future__ import annotations

import textwrap

from pfl_lightning.cli.commands import TRAINER_COMMANDS

__all__ = ["short_help"]

WIDTH = 80
"""Columns of a screen."""

HEAD = """usage: pfl {command} --config FILE [--config FILE ...] [options]

{does}
All options can be set in a config, a YAML file; options on the command line
override it, and later ones override earlier ones. These are the frequent
options; --help all lists all.
"""

TRAINING = """
A run
  --config FILE                       A config; more than one are merged.
                                      Examples are in configs/.
  --seed_everything N                 Seed of the run (default: 0).
  --run_dir DIR                       Folder of the runs (default: runs); each
                                      is a version_N there.
  --ckpt_path last|best|FILE          Checkpoint to go on from, or to evaluate.
  --print_config                      Print the config with all its defaults.

Rounds and clients
  --trainer.max_epochs N              Rounds of communication: an epoch of the
                                      Trainer is a round.
  --loop.cohort N|SHARE               Clients that train in a round: 5, or 0.5
                                      of them; by default all.
  --loop.eval_cohort N|SHARE          Clients that are evaluated in a round.
  --trainer.check_val_every_n_epoch N Rounds from one validation to the next.
  --trainer.accelerator auto|cpu|gpu  Where clients train.
  --trainer.precision 16-mixed|...    Precision of local fits.
  --trainer.gradient_clip_val X       Clip the clients' gradients.

Method: what clients learn, and what they send
  --model.method NAME                 FedAvg, FedPAC, Calibre, ...: see
                                      `pfl methods`.
  --model.method.lr X                 Options of the method; every one has lr,
  --model.method.epochs N             epochs (local epochs a round), momentum,
                                      weight_decay, optimizer, ...
  --model.method.help NAME            The options of a method.

Encoder: the clients' network up to the features
  --model.encoder NAME                small_cnn, resnet18, ... (`pfl methods`),
                                      a class of yours (my_module.MyNet), or
                                      [NAME, NAME]: clients take them in turn.
  --model.encoder.help NAME           The options of an encoder class.

Data and their partition over clients
  --data NAME                         Digits, CIFAR10, ImageFolder, ...
  --data.batch_size N                 Options of the data module.
  --data.partition NAME               IID, DominantClasses, ...
  --data.partition.num_clients N      Options of the partition.
  --data.help NAME                    The options of a data module.
  --data NAME --data.partition.help NAME
                                      The options of a partition.

Engine: how local fits run (docs/engines.md)
  --engine sequential                 One client after another (default).
  --engine vectorized                 Many small models at once, on a GPU.
  --engine processes                  Worker processes of this machine.
  --engine ray                        Those of Ray, here or on a cluster.
  --engine trainer                    A Lightning Trainer for each fit.
  --model.engine.help NAME            The options of an engine, as RayEngine:
                                      --engine ray --model.engine.workers 4.

After and during the training
  --personalize.train linear|linear+encoder|head|all|nothing
                                      Let clients adapt the trained model.
  --personalize.help                  Its options.
  --inspect true                      Pictures and scalars in TensorBoard.
  --inspect.help                      Which there are.
  --trainer.callbacks+=NAME           A callback, such as EarlyStopping.
  --trainer.callbacks.help NAME       Its options.
"""

OF_COMMAND = {
    "export": """
Export
  --output DIR                        Folder of client_<number>.pt and .json
                                      (default: in the run).
  --clients [N,N,...]                 Numbers of clients (default: all).
""",
    "partition": """
Partition
  --output DIR                        Folder of partition.png and partition.npz
                                      (default: run_dir).
""",
}
"""Options that one subcommand has."""

TAIL = """
More help
  --help all                          All options.
  --help trainer                      Those that begin with --trainer; or model,
                                      data, loop, ...
  pfl methods                         Methods, objectives and encoders.
"""


def short_help(command: str) -> str:
    """Help on a subcommand that has a Trainer.

    Args:
        command: Its name.
    """
    lines = TRAINING.splitlines(keepends=True)
    options = "".join(line for line in lines if command != "partition" or "--ckpt_path" not in line)
    texts = (HEAD, OF_COMMAND.get(command, ""), options, TAIL)
    does = textwrap.fill(f"pfl {command}: {TRAINER_COMMANDS[command]}.", WIDTH)
    return "".join(texts).format(command=command, does=does)
