"""Tutorial: a method of your own, from FedAvg to a server with state."""

# %% Imports
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning import Aggregator, Broadcast, ClientUpdate, FederatedClient, Federation, FitContext
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import Digits, DominantClasses
from pfl_lightning.functional import RunningAverage
from pfl_lightning.messages import statistics_field
from pfl_lightning.state.tensors import TensorDict, select_state


# %% 1. FedAvg: the base class does all of it
class Plain(FederatedClient):
    """One global model: the mean of the clients' models, weighted by samples."""

    batch_norm = "shared"  # running statistics are averaged as the weights are


# %% 2. Personal heads: one line says what is shared
class PersonalHead(Plain):
    """The encoder is shared; the head never leaves the client."""

    shared = ("encoder.*",)


# %% 3. Another loss: a named term in addition to the cross entropy
class ConfidencePenalty(PersonalHead):
    """Adds a penalty on confident predictions, minus beta times the entropy of the class probabilities.

    Args:
        encoder: See :class:`~pfl_lightning.FederatedClient`.
        num_classes: Number of classes, C.
        beta: Weight of the penalty.
        options: Further arguments of :class:`~pfl_lightning.FederatedClient`.
    """

    loss_names = ("cross_entropy", "confidence")

    def __init__(self, encoder: nn.Module, num_classes: int, *, beta: float = 0.1, **options: Any) -> None:
        super().__init__(encoder, num_classes, **options)
        self.beta = beta

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy, and the penalty."""
        logs = self.classify(features).log_softmax(dim=1)
        entropy = -(logs.exp() * logs).sum(dim=1).mean()
        return {**super().loss_terms(features, labels), "confidence": -self.beta * entropy}


# %% 4. Another message: clients also send the loss of the model that they received
@dataclass(frozen=True, kw_only=True)
class LossUpdate(ClientUpdate):
    """An update with the client's loss before the local fit.

    Attributes:
        loss: Mean cross entropy on the client's training samples, a scalar.
    """

    loss: Tensor = statistics_field(shape="", at_least=0)


class LossSender(ConfidencePenalty):
    """Sends its loss to a server that listens to clients with a large one."""

    def before_fit(self, context: FitContext) -> Tensor:
        """The loss of the received model; what is returned here reaches ``make_update``."""
        features, labels = self.features_of(context.data)
        with torch.no_grad():
            return F.cross_entropy(self.head(features), labels)

    def make_update(self, context: FitContext, before: Tensor) -> LossUpdate:
        """The shared weights after the local fit, and the loss before it."""
        return LossUpdate(**vars(super().make_update(context, before)), loss=before)


# %% 5. A server with state: the velocity
class MomentumServer(Aggregator, of=LossSender):
    """Averages with weights n_k F_k, and moves with momentum: v <- beta v + (w - mean), w <- w - v.

    The velocity v is what the server must remember. It is in a buffer: checkpoints have it.

    Args:
        client: The client as it is before the first round.
        num_clients: Number of clients m.
        momentum: Weight of the old velocity, beta.
    """

    update_class = LossUpdate

    def __init__(self, client: FederatedClient, num_clients: int, momentum: float = 0.5) -> None:
        super().__init__(client, num_clients)
        self.momentum = momentum
        initial = select_state(client, client.shared_names())
        self.weights = TensorDict(initial)  # w, a module of buffers
        self.velocity = TensorDict({name: torch.zeros_like(value) for name, value in initial.items()})  # v
        self._average = RunningAverage()  # of the current round; a new one begins with every round

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The global weights, the same for every client."""
        return Broadcast(client=client, round=round, weights=self.weights.as_state())

    def receive(self, update: LossUpdate) -> None:
        """Add one client's weights to the sums; nothing else of an update is kept."""
        self._average.update(update.weights, update.num_samples * float(update.loss))

    def aggregate(self) -> None:
        """The step of the server, after the last update of a round."""
        average, self._average = self._average, RunningAverage()
        if average.total_weight == 0:
            return
        weights, velocity, mean = self.weights.as_state(), self.velocity.as_state(), average.result()
        velocity = {name: self.momentum * velocity[name] + (weights[name] - mean[name]) for name in weights}
        self.weights.assign({name: weights[name] - velocity[name] for name in weights})
        self.velocity.assign(velocity)


# %% Training it
def fit(method: type[FederatedClient], rounds: int, folder: str, ckpt_path: str | None = None) -> Federation:
    """Train a method on the digits, from the start or from a checkpoint; a checkpoint is written every round."""
    data = Digits(partition=DominantClasses(num_clients=6, samples_per_client=60), batch_size=10)
    federation = Federation(partial(method, lr=0.02, epochs=1), encoder="small_cnn", seed=0)
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[FederatedLoop(cohort=3)],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
    print(
        f"{method.__name__}, {rounds} rounds: mean test accuracy {trainer.callback_metrics['test_accuracy/mean']:.3f}"
    )
    return federation


for method in (Plain, PersonalHead, ConfidencePenalty):
    fit(method, 2, f"runs/{method.__name__}")
whole = fit(LossSender, 4, "runs/whole")

# %% A resumed run restores the server's state
fit(LossSender, 2, "runs/interrupted")
checkpoint = next(Path("runs/interrupted/checkpoints").glob("*.ckpt"))
resumed = fit(LossSender, 4, "runs/resumed", ckpt_path=str(checkpoint))

same = all(torch.equal(tensor, resumed.server.state_dict()[name]) for name, tensor in whole.server.state_dict().items())
print("tensors of the server:", len(whole.server.state_dict()))
print("the resumed server equals the uninterrupted one, bit for bit:", same)
