"""``pfl fit --help`` on two screens: the options that runs are made with, and where the others are described."""

from __future__ import annotations

from pfl_lightning.cli.commands import TRAINER_COMMANDS

__all__ = ["short_help"]

HEAD = """usage: pfl {command} --config FILE [--config FILE ...] [options]

pfl {command}: {line}.
Everything can stand in a config, a YAML file; options on the command line change what it says.
Later configs and options win. The options below are the frequent ones; --help all lists all.
"""

TRAINING = """
A run
  --config FILE                       A config; more than one are merged. Examples are in configs/.
  --seed_everything N                 Seed of the run (default: 0).
  --run_dir DIR                       Folder of the runs; each is a version_N there (default: runs).
  --ckpt_path last|best|FILE          The checkpoint to go on from, or to evaluate.
  --print_config                      Print the config with all its defaults, and do nothing else.

Rounds and clients
  --trainer.max_epochs N              Rounds of communication: an epoch of the Trainer is a round.
  --loop.cohort N|SHARE               Clients that train in a round, by number (5) or share (0.5);
                                      by default all.
  --loop.eval_cohort N|SHARE          Clients that are evaluated in a round.
  --trainer.check_val_every_n_epoch N Rounds from one validation to the next.
  --trainer.accelerator auto|cpu|gpu  Where clients train.
  --trainer.precision 16-mixed|...    Precision of local fits.
  --trainer.gradient_clip_val X       Clip the clients' gradients.

Method: what clients learn, and what they send
  --model.method NAME                 FedAvg, FedPAC, Calibre, ...: `pfl methods` lists them.
  --model.method.lr X                 Options of the method; every method has lr, epochs (local
  --model.method.epochs N             epochs a round), momentum, weight_decay, optimizer, ...
  --model.method.help NAME            The options of a method.

Encoder: the clients' network up to the features
  --model.encoder NAME                small_cnn, resnet18, ... (`pfl methods` lists them), a class
                                      of your own (my_module.MyNet, also in the current folder),
                                      or [NAME, NAME]: clients take them in turn.
  --model.encoder.help NAME           The options of an encoder class, such as FedPACCNN.

Data and their partition over clients
  --data NAME                         Digits, CIFAR10, ImageFolder, ...
  --data.batch_size N                 Options of the data module, as those of a method.
  --data.partition NAME               IID, DominantClasses, DirichletOverClients, ...
  --data.partition.num_clients N      Options of the partition.
  --data.help NAME                    The options of a data module.
  --data NAME --data.partition.help NAME
                                      The options of a partition.

Engine: how local fits run; the results are the same
  --engine sequential                 One client after another (default).
  --engine vectorized                 Many small models at once, best on a GPU.
  --engine processes                  Worker processes of this machine, without Ray.
  --engine ray                        Worker processes of Ray, on this machine or on a cluster.
  --engine trainer                    A Lightning Trainer for each fit, with its hooks.
  --model.engine.help NAME            The options of an engine class, such as RayEngine; they are
                                      written as --engine ray --model.engine.workers 4.

After and during the training
  --personalize.train linear|linear+encoder|head|all|nothing
                                      Let every client adapt the trained model to its own data.
  --personalize.help                  Its options.
  --inspect true                      Pictures and further scalars in TensorBoard.
  --inspect.help                      Which there are.
  --trainer.callbacks+=NAME           A callback of Lightning, such as EarlyStopping.
  --trainer.callbacks.help NAME       Its options.
"""

OF_COMMAND = {
    "export": """
Export
  --output DIR                        Folder of client_<number>.pt and .json (default: in the run).
  --clients [N,N,...]                 Numbers of clients (default: all).
""",
    "partition": """
Partition
  --output DIR                        Folder of partition.png and partition.npz (default: run_dir).
""",
}
"""Options that one subcommand has."""

TAIL = """
More help
  --help all                          All options.
  --help trainer                      Those that begin with --trainer; or model, data, loop, ...
  pfl methods                         Methods, self-supervised objectives and encoders.
"""


def short_help(command: str) -> str:
    """Help on a subcommand that has a Trainer.

    Args:
        command: Its name.
    """
    lines = TRAINING.splitlines(keepends=True)
    options = "".join(line for line in lines if command != "partition" or "--ckpt_path" not in line)
    texts = (HEAD, OF_COMMAND.get(command, ""), options, TAIL)
    return "".join(texts).format(command=command, line=TRAINER_COMMANDS[command])
