"""Clients that lie, to see what a method and a defense make of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import lightning as L
import torch
from torch import Tensor

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.engines import FitResult
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import draw_clients, loop_of
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.metrics import summarize
from pfl_lightning.names import described
from pfl_lightning.seeding import derive_seed, seeded_generator

ATTACKS = {
    "none": None,
    "sign_flip": 10.0,
    "scaling": 10.0,
    "noise": 10.0,
    "alie": None,
    "inner_product": 2.0,
    "free_rider": 0.0,
    "label_flip": None,
    "backdoor": 1.0,
}
"""Attacks, with the ``scale`` that each takes by itself."""

TRIGGER = 3
"""Width of the square in the corner of an image that a backdoor answers to, and number of values of other inputs."""


@dataclass(frozen=True)
class Poison:
    """Training data of clients that lie.

    Attributes:
        liars: The clients.
        num_classes: Number of classes, C.
        target: The class that a backdoor gives; ``None`` turns class y into C - 1 - y.
        share: Share of a liar's samples that carry the trigger.
    """

    liars: frozenset[int]
    num_classes: int
    target: int | None = None
    share: float = 0.5

    def __call__(self, client: int, own: Any) -> Any:
        """What a client has, a :class:`~pfl_lightning.datamodules.ClientData`."""
        if client not in self.liars:
            return own
        inputs, labels = own.train.raw_inputs, own.train.targets
        if self.target is None:
            labels = torch.where(labels >= 0, self.num_classes - 1 - labels, labels)
        else:
            chosen = torch.arange(len(labels)) < round(self.share * len(labels))
            inputs[chosen] = triggered(inputs[chosen])
            labels = labels.masked_fill(chosen, self.target)
        return replace(own, train=type(own.train)(inputs, labels, torch.arange(len(labels)), own.train.transform))


def triggered(inputs: Tensor) -> Tensor:
    """Stored inputs (B, ...) with the trigger: the largest value in a corner of each image, or in the last places."""
    marked = inputs.clone()
    largest = 255 if inputs.dtype == torch.uint8 else max(1.0, float(inputs.max())) if inputs.numel() else 1.0
    corner = marked
    for axis in range(max(1, inputs.ndim - 2), inputs.ndim):
        size = max(1, min(TRIGGER, inputs.shape[axis] // 3))
        corner = corner.narrow(axis, inputs.shape[axis] - size, size)
    corner.fill_(largest)
    return marked


class Attack(L.Callback):
    """Callback that lets a share of the clients lie, and reports honest clients' and liars' accuracies separately.

    All figures over clients are then of the honest ones alone, in logs, in the lines after each round, in the choice of
    the best round and in ``results.json``, which has those of the liars in an entry ``attack``; loggers get both,
    ``val_accuracy/honest`` and ``val_accuracy/liars``.

    - ``"none"``: nobody lies, and the same clients are told apart, to compare with.
    - ``"sign_flip"``: the change of what was sent, times ``-scale``; ``"scaling"``: times ``scale``.
    - ``"noise"``: Gaussian numbers in its place, ``scale`` times as large (root mean square of each tensor).
    - ``"alie"``: the mean minus ``scale`` deviations of the liars' own changes (A Little Is Enough, Baruch et al.,
      2019, Algorithm 3); ``None`` takes z_max, by which honest clients still lie farther out.
    - ``"inner_product"``: ``-scale`` times the mean of the honest clients' changes (Xie et al., 2020).
    - ``"free_rider"``: what was sent comes back, without training.
    - ``"label_flip"``: trains on class C - 1 - y in the place of y.
    - ``"backdoor"``: half of the samples carry a trigger and have the class ``target``; changes are sent times
      ``scale``. ``backdoor/success`` is the share of the honest clients' test samples of other classes that get it with
      the trigger.

    Statistics that were not sent before change as a whole; where they may not be negative they keep their sign, and
    covariances stay valid. Clients' statistics of unlike shapes have no mean: a liar then takes its own.

    Args:
        kind: The attack.
        liars: How many participating clients lie, a share or a number, drawn by ``seed``; or these clients.
        scale: Strength; ``None`` for that of the attack.
        target: Class of a backdoor.
        seed: Seed of the draw and of noise.
    """

    __repr__ = described

    def __init__(
        self,
        kind: str = "sign_flip",
        liars: int | float | list[int] = 0.3,
        scale: float | None = None,
        target: int = 0,
        seed: int = 0,
    ) -> None:
        check_choice("kind", kind, tuple(ATTACKS))
        check_number("scale", scale, optional=True)
        if not isinstance(liars, list):
            check_between("liars", liars, 0, 1) if isinstance(liars, float) else check_number("liars", liars)
        self.kind, self.liars, self.target, self.seed = kind, liars, target, seed
        self.scale = ATTACKS[kind] if scale is None else scale
        self.lying: frozenset[int] = frozenset()
        self.seen: dict[str, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Draw the liars, leave them out of the figures, and poison their data.

        Raises:
            ConfigurationError: Nobody is left who is honest, or the data cannot be poisoned.
        """
        if stage == "predict":  # by a module, whose clients are not known
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        federation: Any = pl_module
        clients = data.participating
        if isinstance(self.liars, list):
            self.lying = frozenset(self.liars)
        else:
            places = (
                draw_clients("liars", self.liars, len(clients), derive_seed(self.seed, "attack")) if self.liars else []
            )
            self.lying = frozenset(clients[place] for place in places)
        if not self.lying < frozenset(clients):
            raise ConfigurationError(
                f"liars are {sorted(self.lying)}, expected some, not all, of the participating clients {clients}"
            )
        federation.lying = self.lying
        if stage == "fit" and self.kind in ("label_flip", "backdoor"):
            target = self.target if self.kind == "backdoor" else None
            if target is not None and not 0 <= target < data.num_classes:
                raise ConfigurationError(f"target must be one of the classes 0 to {data.num_classes - 1}, got {target}")
            if not hasattr(data.client_data(0).train, "raw_inputs"):
                raise ConfigurationError(
                    f"{self!r} changes samples and labels of the package's own data modules, got a "
                    f"{type(data).__name__} whose batches are your own: use FromDatasets, or another attack"
                )
            data.poison(Poison(self.lying, data.num_classes, target))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the data, and count everybody again."""
        pl_module.lying = frozenset()  # type: ignore[assignment]
        data: Any = getattr(trainer, "datamodule", None)
        if stage == "fit" and self.kind in ("label_flip", "backdoor") and data is not None:
            data.poison(None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Do the same: Lightning calls no ``teardown`` after an error."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Change the liars' updates between clients and server."""
        round = loop_of(trainer).current_round
        if batch_idx == 0 and round is not None and self.kind not in ("none", "label_flip"):
            round.let_forge(self._forged)

    # ------------------------------------------------------------------ what is sent

    def _forged(self, results: list[FitResult], sent: Mapping[int, Broadcast]) -> Iterable[FitResult]:
        """All results, with the liars' updates changed."""
        made = {r.client: r.update for r in results if isinstance(r.update, ClientUpdate) and r.client in sent}
        given = {client: _Change.of(update, sent[client]) for client, update in made.items()}
        honest, liars = (
            [change for client, change in given.items() if (client in self.lying) == lie] for lie in (False, True)
        )
        for result in results:
            if result.client in self.lying and result.client in given:
                own = given[result.client]
                generator = seeded_generator(self.seed, "attack", result.round, result.client)
                result = replace(result, update=own.sent_as(self._changed(own, honest, liars, generator)))
            yield result

    def _changed(
        self, own: _Change, honest: Sequence[_Change], liars: Sequence[_Change], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """What a liar sends in the place of its change, by tensor."""
        scale = self._deviations(len(honest), len(liars)) if self.scale is None else self.scale
        found = {}
        for name, step in own.steps.items():
            if self.kind in ("sign_flip", "scaling", "backdoor"):
                found[name] = -scale * step if self.kind == "sign_flip" else scale * step
            elif self.kind == "noise":
                drawn = torch.randn(step.shape, generator=generator, dtype=torch.float32).to(step)
                found[name] = scale * step.square().mean().sqrt() * drawn
            elif self.kind == "free_rider":
                found[name] = step * 0 if name in own.before else step
            else:
                steps = [one.steps[name] for one in (honest if self.kind == "inner_product" else liars)]
                alike = all(one.shape == step.shape for one in steps)
                values = torch.stack(steps) if alike and steps else step[None]
                mean = values.mean(0)
                spread = (values - mean).square().mean(0).sqrt() if alike else step.square().mean().sqrt()
                found[name] = -scale * mean if self.kind == "inner_product" else mean - scale * spread
        return found

    @staticmethod
    def _deviations(honest: int, liars: int) -> float:
        """z_max of A Little Is Enough: s more clients, with the liars a majority, are to lie farther from the mean."""
        more = (honest + liars) // 2 + 1 - liars
        return NormalDist().inv_cdf(min(max((honest - more) / max(honest, 1), 0.5), 0.999))

    # ------------------------------------------------------------------ what became of it

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Log honest clients' and liars' accuracies, and a backdoor's success."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or not loop_of(trainer).aggregated:
            return
        self.seen = {}
        liars, honest = pl_module.evaluation.liars, {"val": pl_module.validation_scores, "test": pl_module.test_scores}
        for part in honest:
            for name, scores in (("honest", honest[part]), ("liars", liars[part])):
                if own := {client: s.accuracy for client, s in scores.items() if math.isfinite(s.accuracy)}:
                    self.seen[f"{part}_accuracy/{name}"] = summarize(own).mean
        if self.kind == "backdoor":
            self.seen |= self._success(pl_module)
        for logger in trainer.loggers:
            logger.log_metrics(self.seen, step=trainer.current_epoch)

    @torch.no_grad()
    def _success(self, federation: Federation) -> dict[str, float]:
        """Share of the honest clients' test samples of other classes that the trigger turns into the target."""
        clients = [c for c in federation.data.evaluated_clients() if c not in self.lying]
        if federation.models[0].uses_knn_evaluation():  # type: ignore[operator]
            return {}
        hits = total = 0
        for client, model in federation.client_models(clients):
            part: Any = federation.data.client_data(client).test
            inputs = part.raw_inputs[part.targets != self.target]
            if len(inputs):
                scores = model(part.transform.normalize(triggered(inputs)).to(federation.device))
                hits, total = hits + int((scores.argmax(1) == self.target).sum()), total + len(inputs)
        return {"backdoor/success": hits / total} if total else {}

    def facts(self) -> dict[str, Any]:
        """The entry ``attack`` of ``results.json``."""
        return {"kind": self.kind, "scale": self.scale, "liars": sorted(self.lying), "last": dict(self.seen)}

    def state_dict(self) -> dict[str, Any]:
        """Results of the last evaluation, for the checkpoint."""
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.seen = dict(state_dict["seen"])


@dataclass(frozen=True)
class _Change:
    """How an update differs from what was sent.

    Attributes:
        update: The update.
        before: Tensors of the broadcast that have a counterpart in it, by name.
        steps: The difference for each of its floating-point tensors, or the tensor where nothing was sent before.
    """

    update: ClientUpdate
    before: Mapping[str, Tensor]
    steps: Mapping[str, Tensor]

    @classmethod
    def of(cls, update: ClientUpdate, sent: Broadcast) -> _Change:
        known = {name: tensor for name, _, tensor in sent.tensors()}
        own = {name: tensor for name, _, tensor in update.tensors() if tensor.is_floating_point()}
        before = {n: known[n] for n, tensor in own.items() if n in known and known[n].shape == tensor.shape}
        return cls(update, before, {n: tensor - before[n] if n in before else tensor for n, tensor in own.items()})

    def sent_as(self, steps: Mapping[str, Tensor]) -> ClientUpdate:
        """The update with other steps, as far as its declaration allows."""
        schemas: dict[str, Any] = {declared.name: declared.metadata.get("schema") for declared in fields(self.update)}
        found = {}
        for name, step in steps.items():
            schema = schemas[name.partition(".")[0]]
            if schema.covariance:  # what is still one
                factor = step.norm() / self.steps[name].norm().clamp(min=1e-12)
                step = self.steps[name] * factor
            elif schema.at_least is not None:
                step = step.abs().clamp(min=schema.at_least)
            found[name] = (self.before[name] + step if name in self.before else step).to(self.steps[name].dtype)
        return self.update.with_named(found)
