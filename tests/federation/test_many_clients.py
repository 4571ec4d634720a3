"""A round and its evaluation cost what their cohorts cost, however many clients there are."""

import sys
import tracemalloc
from functools import partial

import lightning as L
import torch
from _helpers.toy import quiet_trainer
from torch.utils.data import TensorDataset

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.methods import FedAvg

CLIENTS, MEASURED = 100_000, 2


class Counter(L.Callback):
    """Calls and the most bytes of a round and its evaluation."""

    calls = peak = 0

    def count(self, frame, event, argument):
        self.calls += event in ("call", "c_call")

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == MEASURED:
            tracemalloc.start()
            sys.setprofile(self.count)

    def on_validation_end(self, trainer, pl_module):
        if trainer.current_epoch == MEASURED:
            sys.setprofile(None)
            self.peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()


def test_a_round_does_nothing_for_each_of_many_clients():
    def drawn(number):
        return TensorDataset(torch.randn(number, 3), torch.arange(number) % 2)

    data = FromDatasets(IID(CLIENTS), train=drawn(4 * CLIENTS), test=drawn(1000), batch_size=2)
    counter = Counter()
    trainer = quiet_trainer(MEASURED + 1, FederatedLoop(3, eval_cohort=5), counter)
    trainer.fit(Federation(partial(FedAvg, epochs=1, lr=0.1), "mlp"), datamodule=data)
    assert 0 < counter.calls < CLIENTS
    assert 0 < counter.peak < 5 * CLIENTS, "a list of the clients has eight bytes for each"
