"""Tutorial: ten thousand clients, and engines that train several clients at once."""

# %% Imports
import time
from functools import partial

import lightning as L
import torch
from torch.utils.data import TensorDataset

from pfl_lightning import Engine, Federation, SequentialEngine, VectorizedEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.methods import FedPer

# %% Data: ten thousand clients with ten samples each
CLIENTS, SAMPLES, CLASSES = 10_000, 10, 4
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(CLIENTS * SAMPLES, 8, generator=generator)
targets = inputs[:, :CLASSES].argmax(dim=1)  # the largest of the first four numbers
data = FromDatasets(IID(CLIENTS), batch_size=4, train=TensorDataset(inputs, targets), validation_share=0.2)


# %% 50 clients take part in a round, another 100 are evaluated after it
def fit(engine: Engine, folder: str) -> tuple[Federation, float]:
    """Train two rounds of FedPer; the federation, and the mean test accuracy of the evaluated clients."""
    federation = Federation(
        partial(FedPer, lr=0.1, epochs=1),
        encoder="mlp",
        engine=engine,
        seed=0,
        client_state_memory_gb=0.0,  # 0: heads are kept in a memory-mapped file at once; 4 GB unless given
    )
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[FederatedLoop(cohort=50, eval_cohort=100)],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    return federation, float(trainer.callback_metrics["test_accuracy/mean"])


start = time.perf_counter()
federation, accuracy = fit(SequentialEngine(), "runs/sequential")
print(f"{federation.num_clients} clients, mean test accuracy of 100 of them: {accuracy:.3f}")
print(f"{time.perf_counter() - start:.1f} seconds, the division of the data included")

# %% Where the clients' heads are
stored = [client for client in range(CLIENTS) if federation.personal.written(client)]
print(f"{len(stored)} clients have stored a head; in a file: {federation.personal.stores[0].on_disk}")

# %% The same clients, trained together by torch.func
_, vectorized = fit(VectorizedEngine(), "runs/vectorized")
print(f"difference of the mean accuracies between the two engines: {abs(vectorized - accuracy):.3f}")
