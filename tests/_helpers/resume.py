"""A run that leaves everything behind that another one can resume from."""

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from _helpers.toy import Toy, run
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter


def play(folder, rounds, method, *, ckpt_path=None, cohort=3, data=None, checkpoint=None, more=(), **options):
    """A run with results, a CSV log and a checkpoint after every round."""
    saver = checkpoint or ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    callbacks = [saver, ResultsWriter(str(folder)), *more]
    return run(
        method,
        rounds,
        data=data or Toy(),
        loop=FederatedLoop(cohort),
        callbacks=callbacks,
        ckpt_path=ckpt_path,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="log", version=f"to-{rounds}"),
        **options,
    )
