"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage
from pfl_lightning.functional.losses import linear_term
from pfl_lightning.messages import Broadcast, ClientUpdate, State, weight_field
from pfl_lightning.methods._gradients import check_steps_of_sgd, full_gradient, steps_in_gradients
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import TensorDict

PURPOSE = 'control="steps" takes the mean of the gradients'
ALTERNATIVE = 'use control="gradient", which takes one more pass over the data'


@dataclass(frozen=True, kw_only=True)
class ScaffoldBroadcast(Broadcast):
    """The global model x and the server's control variate.

    Attributes:
        control: c, by parameter name.
    """

    control: State = weight_field()


@dataclass(frozen=True, kw_only=True)
class ScaffoldUpdate(ClientUpdate):
    """The trained model y and the change of the client's control variate.

    Attributes:
        control_change: c_i+ - c_i, by parameter name.
    """

    control_change: State = weight_field(tells="weights")


class SCAFFOLD(FederatedClient):
    """FedAvg whose local steps are corrected by what the server knows of the other clients' gradients.

    Every client keeps a control variate c_i, an estimate of its own gradient; the server keeps their mean c. A local
    step goes along g(y) + c - c_i (Algorithm 1). With ``fine_tune="head"`` it is SCAFFOLD-FT.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        server_lr: eta_g, how far the server goes towards the clients' mean.
        control: How a client renews c_i: ``"steps"`` by the mean of the gradients of its steps (option II), which takes
            SGD at a constant rate, unclipped; ``"gradient"`` by the gradient of its training samples, not augmented
            and in evaluation mode, at the received model (option I), which takes one more pass over them.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``lr`` is eta_l; an ``optimizer``
            other than SGD, or an ``lr_scheduler``, goes with ``control="gradient"``.
    """

    citation = Citation(
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", "Karimireddy et al.", "ICML", 2020
    )
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "control")
    personalization_losses = ("cross_entropy",)
    not_exported = ("own_control.*",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        server_lr: float = 1.0,
        control: str = "steps",
        **options: Unpack[ClientOptions],
    ) -> None:
        check_choice("control", control, ("steps", "gradient"))
        check_number("server_lr (eta_g)", server_lr)
        super().__init__(encoder, num_classes, **options)
        self.server_lr, self.control = server_lr, control
        shared, parameters = set(self.shared_names()), self.named_parameters()
        covered = {name: torch.zeros_like(p) for name, p in parameters if name in shared}
        self.own_control = TensorDict(covered)  # c_i; personal
        self.server_control = TensorDict(persistent=False)  # c, for the time of a fit
        self.received = TensorDict(persistent=False)  # x
        self.correction = TensorDict(persistent=False)  # c - c_i

    def check_run(self, facts: RunFacts) -> None:
        """Refuse for ``control="steps"`` clipped gradients, whose mean is not theirs, and steps of another kind."""
        trained, corrected = [self.trained_names(phase) for phase in self.phases()], set(self.own_control.as_state())
        if any(corrected - self.frozen - names for names in trained):
            raise ConfigurationError(
                f"each phase of SCAFFOLD must train all that clients share, but {type(self).__name__} has phases that "
                "train a part of it: return one from phases() that trains everything"
            )
        if self.control != "steps":
            return
        check_steps_of_sgd(self, PURPOSE, ALTERNATIVE)
        if facts.gradient_clip_val is not None:
            raise ConfigurationError(
                f"{PURPOSE} from the steps, and the engine clips gradients "
                f'(gradient_clip_val={facts.gradient_clip_val}): leave clipping out, or use control="gradient"'
            )

    def receive(self, broadcast: ScaffoldBroadcast) -> None:
        """Take over x, and keep it and c."""
        super().receive(broadcast)
        self.server_control.assign(broadcast.control)
        own = dict(self.named_parameters())  # a copy of x in their memory layout, which steps are quicker with
        self.received.assign({name: own[name].detach().clone() for name in broadcast.control})

    def before_fit(self, context: FitContext) -> dict[str, Tensor]:
        """Set c - c_i; the gradient at x is c_i+ with ``control="gradient"`` (line 12, option I)."""
        own = self.own_control.as_state()
        self.correction.assign({name: c - own[name] for name, c in self.server_control.as_state().items()})
        return full_gradient(self, self.received.as_state(), context.data) if self.control == "gradient" else {}

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """F_i(y) + <c - c_i, y - x>, whose gradient is g_i(y) - c_i + c (line 10)."""
        terms = super().loss_terms(features, labels)
        if self.uses("control"):
            correction = self.correction.as_state()
            terms["control"] = linear_term(dict(self.named_parameters()), self.received.as_state(), correction)
        return terms

    @torch.no_grad()
    def make_update(self, context: FitContext, before: dict[str, Tensor]) -> ScaffoldUpdate:
        """The trained y and c_i+ - c_i (line 14); c_i becomes c_i+ (line 13)."""
        new = before or self._mean_gradient_of_steps(context.num_steps)
        change = {}
        for name, own in self.own_control.as_state().items():
            change[name] = new[name] - own
            own.copy_(new[name])
        return ScaffoldUpdate(**vars(super().make_update(context, None)), control_change=change)

    def _mean_gradient_of_steps(self, num_steps: int) -> dict[str, Tensor]:
        """c_i+ = c_i - c + (x - y) / (a_K eta_l), the mean of the K gradients (line 12, option II)."""
        if num_steps == 0:  # float16 has skipped them all
            return self.own_control.as_state()
        scale = self.lr * steps_in_gradients(num_steps, self.momentum)
        trained, received = dict(self.named_parameters()), self.received.as_state()
        correction = self.correction.as_state()
        return {name: (received[name] - trained[name]) / scale - c for name, c in correction.items()}


class ScaffoldAggregator(AveragingAggregator, of=SCAFFOLD):
    """x + eta_g (mean of y_i - x) and c + (1/N) sum of c_i+ - c_i; every client of the cohort counts the same.

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`.
        num_clients: Number of clients, novel ones included; N is the number of those that take part.
    """

    update_class = ScaffoldUpdate
    averages = True
    rolls_back_client_states = True  # c stays the mean of all c_i

    def __init__(self, client: SCAFFOLD, num_clients: int) -> None:
        super().__init__(client, num_clients, by_samples=False, step=client.server_lr)
        own = client.own_control.as_state()
        self.control = TensorDict({name: torch.zeros_like(tensor) for name, tensor in own.items()})  # c
        self._changes = RunningAverage()  # of this round

    def broadcast(self, client: int, round: int) -> ScaffoldBroadcast:
        """The model x and c, the same for every client (line 4)."""
        return ScaffoldBroadcast(**vars(super().broadcast(client, round)), control=self.control.as_state())

    def receive(self, update: ScaffoldUpdate) -> None:
        """Add one client's model and change of control variate to the means."""
        expected = {name: tensor.shape for name, tensor in self.control.as_state().items()}
        got = {name: tensor.shape for name, tensor in update.control_change.items()}
        if got != expected:
            wrong = sorted(n for n in got.keys() | expected.keys() if got.get(n) != expected.get(n))
            update.refuse(f"ScaffoldUpdate.control_change differs from the control variate in {wrong}")
        self._changes.update(update.control_change, 1)
        super().receive(update)

    def aggregate(self) -> None:
        """The server's steps of model and control variate (lines 16 and 17)."""
        changes, self._changes = self._changes, RunningAverage()
        if changes.total_weight > 0:
            share = changes.total_weight / self.facts.num_participating  # |S| / N
            mean = changes.result()
            self.control.assign({name: c + share * mean[name] for name, c in self.control.as_state().items()})
        super().aggregate()
