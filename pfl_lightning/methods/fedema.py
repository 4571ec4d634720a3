"""FedEMA: divergence-aware federated self-supervised learning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.client import Citation, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.numerics import in_double
from pfl_lightning.messages import ClientUpdate, State
from pfl_lightning.methods._self_supervised import SelfSupervisedClient
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.self_supervised import BYOL, ObjectiveFactory, TargetNetwork
from pfl_lightning.state.tensors import TensorDict

EncoderUpdate = Literal["dynamic", "global", "own", "fixed"]
PredictorUpdate = Literal["dynamic", "global", "own", "fixed", "threshold"]


class FedEMA(SelfSupervisedClient):
    """BYOL on the clients; a client goes on from a mixture of its own and the global networks, by how far these are.

    At the start of a fit the online encoder, projector and predictor become mu own + (1 - mu) global, with
    mu = min(lambda_k ||global - own||, 1). A client's first fit starts from the global ones. The autoscaler sets
    lambda_k once, to tau / ||global - own||, when the client first has networks of its own to compare.

    Evaluated, and fitted with a head, is the global encoder.

    The other updates of the published implementation are arguments: with ``update_encoder="global"``,
    ``update_predictor="threshold"`` and ``divergence="published"`` it is FedU (Zhuang et al., ICCV 2021).

    Decided here: the norm is that of all parameters of the encoder together (``divergence="published"`` is the other);
    lambda_k is set at the start of the client's second fit (in the paper right after the aggregation of its first one;
    both are the same where everybody takes part in every round); parameters are mixed, running statistics of batch
    normalization are the global ones, as in the published implementation (there a network that is kept, or a predictor
    of which more than half is kept, has its own); a target network that is kept takes the step after a fit's last
    batch at the start of the next fit, towards the mixture; the server averages by samples.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        objective: Makes the objective from the encoder; ``None`` is BYOL by squared distances, to which ``lr``
            belongs, with a target network that is the client's own from fit to fit, and with the widths of
            :class:`~pfl_lightning.self_supervised.BYOL` (in the published implementation hidden 4096, out 2048).
        tau: The autoscaler's, the mu of the client's second fit, in [0, 1].
        scaler: lambda_k, the same for all clients, in place of the autoscaler.
        update_encoder: What the online encoder and projector of a fit start from: ``"dynamic"`` is the mixture,
            ``"global"`` the received ones, ``"own"`` the client's own, ``"fixed"`` a mixture with mu =
            ``encoder_weight``.
        update_predictor: The same of the predictor, with ``predictor_weight``; ``"threshold"`` takes the client's own
            where the divergence is at least ``threshold``, and else the received one.
        update_target: What the target network of a fit starts from: the client's ``"own"`` of its last fit (if the
            objective keeps it), or the received, ``"global"`` online networks.
        aggregate_encoder: Which of a client's networks the server averages, and is evaluated: ``"online"``, or
            ``"target"``: then the received encoder and projector are means of targets.
        divergence: ``"parameters"`` is ||global - own||; ``"published"`` the mean, over the encoder's convolutions, of
            how far their weights went in the client's last fit.
        encoder_weight: Weight of the client's own networks under ``"fixed"``, in [0, 1].
        predictor_weight: Weight of its own predictor under ``"fixed"``, in [0, 1].
        threshold: Of ``update_predictor="threshold"``.
        consecutive: Whether only clients that took part in the round before mix, and others start from the global
            networks, with a new target network (the published implementation's choice for random cohorts).
        lr_schedule: ``"constant"``, or ``"cosine"``: in round r of T, from 0, the rate is (1 + cos(pi r / T)) / 2 times
            that of the optimizer, which is ``lr`` unless another is given (published implementation).
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Divergence-aware Federated Self-Supervised Learning", "Zhuang et al.", "ICLR", 2022)

    place: Tensor
    last_round: Tensor
    first_divergence: Tensor
    last_movement: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        objective: ObjectiveFactory | None = None,
        tau: float = 0.7,
        scaler: float | None = None,
        update_encoder: EncoderUpdate = "dynamic",
        update_predictor: PredictorUpdate = "dynamic",
        update_target: Literal["own", "global"] = "own",
        aggregate_encoder: Literal["online", "target"] = "online",
        divergence: Literal["parameters", "published"] = "parameters",
        encoder_weight: float = 0.0,
        predictor_weight: float = 0.0,
        threshold: float = 0.4,
        consecutive: bool = False,
        lr_schedule: Literal["constant", "cosine"] = "constant",
        lr: float = 0.032,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(
            encoder,
            num_classes,
            objective=objective or partial(BYOL, keep_target=True, squared_distances=True),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            **options,
        )
        check_between("tau", tau, 0, 1)
        check_between("encoder_weight", encoder_weight, 0, 1)
        check_between("predictor_weight", predictor_weight, 0, 1)
        check_number("threshold", threshold)
        check_choice("update_encoder", update_encoder, get_args(EncoderUpdate))
        check_choice("update_predictor", update_predictor, get_args(PredictorUpdate))
        check_choice("update_target", update_target, ("own", "global"))
        check_choice("aggregate_encoder", aggregate_encoder, ("online", "target"))
        check_choice("divergence", divergence, ("parameters", "published"))
        check_choice("lr_schedule", lr_schedule, ("constant", "cosine"))
        check_number("scaler (lambda)", scaler, optional=True)
        self.tau, self.scaler, self.consecutive = tau, scaler, consecutive
        self.update_encoder, self.update_predictor, self.update_target = update_encoder, update_predictor, update_target
        self.encoder_weight, self.predictor_weight, self.threshold = encoder_weight, predictor_weight, threshold
        self.aggregate_encoder, self.divergence = aggregate_encoder, divergence
        self.lr_schedule = lr_schedule
        self.register_buffer("place", torch.tensor([0, 1]), persistent=False)  # the round, and how many there are
        self._check_target()
        self.own = TensorDict({name: parameter.detach().clone() for name, parameter in self._online().items()})
        self.match(self.own.as_state(), ("encoder.*",))  # refuses an encoder of which nothing trains
        self.register_buffer("last_round", torch.full((), -1, dtype=torch.int64))  # of the client's fits
        self.register_buffer("first_divergence", torch.zeros(()))  # lambda_k is tau divided by it; 0 before it is known
        self._convolutions = self._find_convolutions() if divergence == "published" else []
        if divergence == "published":
            self.register_buffer("last_movement", torch.zeros(()))  # of the client's last fit

    def _online(self) -> dict[str, nn.Parameter]:
        """The parameters that train: of the online encoder, the projector and the predictor."""
        named = dict(self.named_parameters())
        return {
            name: named[name] for name in self.match(named, ("encoder.*", "objective.*")) if name not in self.frozen
        }

    def _check_target(self) -> None:
        """Refuse what needs a target network that the objective does not have, or does not keep."""
        target = getattr(self.objective, "target", None)
        if self.aggregate_encoder == "target" and not isinstance(target, TargetNetwork):
            raise ConfigurationError(
                f"aggregate_encoder='target': {type(self.objective).__name__} has no target network; use 'online'"
            )
        if self.update_target == "global" and not (isinstance(target, TargetNetwork) and target.keep):
            raise ConfigurationError(
                "update_target='global' needs a target network that stays on the client, and "
                f"{type(self.objective).__name__} keeps none: use BYOL(keep_target=True), or leave update_target out"
            )

    def _find_convolutions(self) -> list[str]:
        """Names of the weights of the encoder's convolutions."""
        found = [
            name
            for name in self.match(self.own.as_state(), ("encoder.*",))
            if name.endswith(".weight") and isinstance(self.get_submodule(name[:-7]), nn.modules.conv._ConvNd)
        ]
        if not found:
            raise ConfigurationError(
                "divergence='published' is measured on convolutions, and the encoder has none that trains: use "
                "'parameters'"
            )
        return found

    def before_fit(self, context: FitContext) -> list[Tensor]:
        """Mix the client's own networks into the received global ones; start the target network.

        Returns:
            The weights that the published divergence is measured from.
        """
        self._set_place(context)
        before = int(self.last_round)
        if before >= 0 and (not self.consecutive or before == context.round - 1):
            if self.update_target == "global":
                self._target().forget()
                self._target().start(self.encoder, self.objective.projector)
            self._mix()
        elif before >= 0:
            self.objective.forget()
        self.last_round.fill_(context.round)
        super().before_fit(context)
        online = self._online() if self._convolutions else {}
        return [online[name].detach().clone() for name in self._convolutions]

    def _set_place(self, context: FitContext) -> None:
        """Note the round, on which the learning rate depends."""
        if self.lr_schedule == "constant":
            return
        if context.facts.num_rounds is None:
            raise ConfigurationError(
                "lr_schedule='cosine' needs the number of rounds, and the Trainer has none: set max_epochs"
            )
        self.place = torch.tensor([context.round, context.facts.num_rounds], device=self.place.device)

    def phases(self) -> tuple[Phase, ...]:
        """E epochs of encoder and objective, at the round's rate."""
        phases = super().phases()
        if self.lr_schedule == "constant":
            return phases
        round, rounds = self.place.tolist()
        share = (1 + math.cos(math.pi * min(round / rounds, 1.0))) / 2
        return tuple(replace(phase, lr_share=share) for phase in phases)

    @torch.no_grad()
    def _mix(self) -> None:
        own, online = self.own.as_state(), self._online()
        divergence = self._divergence(own, online)
        mu = self._mu(divergence) if "dynamic" in (self.update_encoder, self.update_predictor) else 0.0
        shares = {"dynamic": mu, "global": 0.0, "own": 1.0, "threshold": float(divergence >= self.threshold)}
        encoder = {**shares, "fixed": self.encoder_weight}[self.update_encoder]
        predictor = {**shares, "fixed": self.predictor_weight}[self.update_predictor]
        for name, parameter in online.items():
            share = predictor if name.startswith("objective.predictor.") else encoder
            parameter.mul_(1.0 - share).add_(own[name], alpha=share)

    def _divergence(self, own: dict[str, Tensor], online: dict[str, nn.Parameter]) -> float:
        """||global - own|| of the encoder, or how far its convolutions went in the client's last fit."""
        if self.divergence == "published":
            return float(self.last_movement)
        distance = torch.stack(
            [in_double(online[name] - own[name]).square().sum() for name in self.match(own, ("encoder.*",))]
        )
        return float(distance.sum().sqrt())

    def _mu(self, divergence: float) -> float:
        """min(lambda_k ||global - own||, 1), which also sets lambda_k where it is not known yet."""
        if self.scaler is not None:
            return min(self.scaler * divergence, 1.0)
        if float(self.first_divergence) == 0:
            self.first_divergence.fill_(divergence)
        first = float(self.first_divergence)
        return min(self.tau * divergence / first, 1.0) if first > 0 else 0.0

    def make_update(self, context: FitContext, before: list[Tensor]) -> ClientUpdate:
        """The shared state, or that of the target network in its place; the client keeps its trained networks."""
        own = self.own.as_state()
        with torch.no_grad():
            for name, parameter in self._online().items():
                own[name].copy_(parameter)
            if before:
                moved = [(own[name] - first).norm() for name, first in zip(self._convolutions, before, strict=True)]
                self.last_movement.copy_(torch.stack(moved).mean())
        update = super().make_update(context, before)
        if self.aggregate_encoder == "target":
            return replace(update, weights={**update.weights, **self._target_state(update.weights)})
        return update

    def _target_state(self, sent: State) -> dict[str, Tensor]:
        """The target network under the names of encoder and projector, as far as these are sent."""
        names = {id(tensor): name for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        found = {}
        for network, target in zip((self.encoder, self.objective.projector), self._target().copies, strict=True):
            values = dict(target.named_buffers())
            for place, tensor in (*network.named_parameters(), *network.named_buffers()):
                found[names[id(tensor)]] = values[place].clone()
        return {name: value for name, value in found.items() if name in sent}

    def _target(self) -> TargetNetwork:
        target = self.objective.target
        assert isinstance(target, TargetNetwork)
        return target
