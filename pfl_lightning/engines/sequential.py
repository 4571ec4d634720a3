"""The default engine: a tight loop under the outer Trainer's precision and device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.isolation_check import IsolationCheck
from pfl_lightning.engines.lifecycle import check_finite_losses, means_of, trains
from pfl_lightning.engines.schedules import advance, unpack_optimizers
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitEnvironment, PhaseResult
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.seeding import GeneratorStates, derive_seed, torch_seed

HOOKS_TAKEN = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_batch_transfer"),
    *("on_train_end", "on_train_epoch_end", "on_train_batch_end", "on_after_backward", "on_before_optimizer_step"),
)
HOOKS_NOT_TAKEN = (
    *("on_fit_start", "on_fit_end", "on_before_batch_transfer", "transfer_batch_to_device", "on_before_zero_grad"),
    *("on_before_backward", "backward", "configure_gradient_clipping"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
)

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Of a data module."""

TRIED = 16
"""Samples with which an encoder is tried."""


class SequentialEngine(Engine):
    """Engine that trains clients sequentially in a tight loop.

    It honors ``training_step``, ``configure_optimizers`` with schedulers (interval ``"epoch"`` or ``"step"``), the
    declared phases, gradient clipping, ``on_after_batch_transfer``, ``on_train_start``, ``on_train_epoch_start``,
    ``on_train_batch_start``, ``on_after_backward``, ``on_before_optimizer_step``, ``on_train_batch_end``,
    ``on_train_epoch_end``, ``on_train_end``, and the outer Trainer's precision and device. Manual optimization, several
    optimizers and the other hooks need :class:`~pfl_lightning.engines.TrainerEngine`.

    A phase in which the encoder neither trains nor is random, on data that are not augmented, under the base's own
    ``training_step``, runs on features that are computed once; the result is the same.

    Args:
        gradient_clip_val: See :class:`~pfl_lightning.engines.Engine`.
        gradient_clip_algorithm: See :class:`~pfl_lightning.engines.Engine`.
        cache_features: Whether such phases use features that are computed once.
        threads: See :class:`~pfl_lightning.engines.Engine`.
    """

    def __init__(
        self,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        cache_features: bool = True,
        threads: int | None = None,
    ) -> None:
        super().__init__(gradient_clip_val, gradient_clip_algorithm, threads)
        self.cache_features = cache_features

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train through one phase; see :meth:`Engine.run_phase`."""
        module, isolation = client.step_module, client.isolation or IsolationCheck.of(client)
        owner = context.data.part.datamodule
        if ("hooks", id(owner)) not in isolation.matched:
            _check_hooks(module, owner)
            isolation.matched["hooks", id(owner)] = ()
        configured = client.configure_optimizers()
        plain = isinstance(configured, Optimizer)
        optimizer, schedulers = (configured, []) if plain else unpack_optimizers(configured)
        scaler, taken = new_scaler(environment, client.loss_scale), list[Any]()  # of each step
        if scaler is not None:  # it leaves steps out; a fused optimizer is called in any case and skips in its kernel
            optimizer.register_step_post_hook(lambda own, *_: taken.append(getattr(own, "found_inf", None)))
        generator = torch.Generator().manual_seed(derive_seed(environment.seed, purpose, context.round, context.client))
        loader = context.data.loader(generator)
        length = sized_len(loader)
        most = math.inf if length is None else context.data.num_samples
        is_cut = False  # by the fit's max_steps
        for entry in schedulers:
            often = phase.epochs * ((length or 0) if entry.interval == "step" else 1)
            advance(entry.scheduler, client, phase, context, often)
        batches = getattr(loader, "batches", None)  # of several loaders, as a project's Trainer combines them
        steps, means = dict[str, list[Tensor]](), dict[str, float]()
        features = frozen_features(client, context) if self.cache_features and not trains(client.encoder) else None
        if features is not None and not loader.augmented:
            loader = loader.with_inputs(features)
        with client.recorded_logs() as logged, nullcontext() if features is None else passed_through(client):
            module.on_train_start()
            for _ in range(phase.epochs):
                module.on_train_epoch_start()
                for index, batch in enumerate(loader if batches is None else batches()):
                    if is_cut := len(taken) >= context.max_steps:
                        break
                    if index >= most:  # every batch holds a sample
                        raise ConfigurationError(
                            f"{context.who}: its loader gives more batches in an epoch than it has samples, "
                            f"{most}; a loader that restarts itself never ends: let it stop after one pass"
                        )
                    batch = environment.precision.convert_input(batch)
                    batch = module.on_after_batch_transfer(batch, 0)
                    module.on_train_batch_start(batch, index)
                    with environment.precision.forward_context():
                        output = client.training_step(batch, index)
                    if output is None:
                        raise ConfigurationError(
                            f"{type(client).__name__}.training_step returned None to skip a batch, which "
                            "SequentialEngine does not support; use TrainerEngine"
                        )
                    terms = output if isinstance(output, dict) else {"loss": output}
                    if not isinstance(terms.get("loss"), Tensor):
                        raise ConfigurationError(
                            f"{type(client).__name__}.training_step returned {output!r:.200}: expected the loss, a "
                            "tensor without .item(), or a dictionary with it as 'loss'"
                        )
                    for name, value in terms.items():  # before the step, which changes a term that is a parameter
                        if isinstance(value, Tensor) and value.numel() == 1:
                            steps.setdefault(name, []).append(value.detach().clone())
                    self._step(module, optimizer, scaler, terms["loss"])
                    taken += [None] if scaler is None else []
                    for entry in schedulers:
                        if entry.interval == "step":
                            entry.scheduler.step()
                    module.on_train_batch_end(output, batch, index)
                module.on_train_epoch_end()
                means = means_of(steps)
                if not math.isfinite(means.get("loss", 0.0)):  # of finite losses, too, where their sum is not
                    check_finite_losses(steps["loss"], context, phase)
                if is_cut:
                    break
                for entry in schedulers:
                    if entry.interval == "epoch":
                        entry.scheduler.step()
            module.on_train_end()
        if scaler is not None:
            client.loss_scale = json.dumps(scaler.state_dict()).encode()
        found = [one for one in taken if one is not None]  # read once: a step would wait for the device
        num_steps = len(taken) - (int(torch.stack(found).sum()) if found else 0)
        return PhaseResult(means | means_of(logged), num_steps, is_cut)

    def _step(
        self, module: L.LightningModule, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, loss: Tensor
    ) -> None:
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        module.on_after_backward()
        if scaler is not None:  # the hook and the clipping see gradients as they are; the step does it otherwise
            scaler.unscale_(optimizer)
        module.on_before_optimizer_step(optimizer)
        if self.gradient_clip_val is not None:
            clip = nn.utils.clip_grad_norm_ if self.gradient_clip_algorithm == "norm" else nn.utils.clip_grad_value_
            clip([p for group in optimizer.param_groups for p in group["params"]], self.gradient_clip_val)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def _check_hooks(module: L.LightningModule, datamodule: L.LightningDataModule | None) -> None:
    """Refuse what a client's module, or the data module of its data, needs and this engine does not do.

    Raises:
        ConfigurationError: Names it.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"SequentialEngine does not support manual optimization ({type(module).__name__}); use TrainerEngine"
        )
    for owner, not_taken in ((module, HOOKS_NOT_TAKEN), (datamodule, BATCH_HOOKS)):
        for hook in not_taken if owner is not None else ():
            if is_overridden(hook, owner):
                raise ConfigurationError(
                    f"{type(owner).__name__} overrides {hook}, which SequentialEngine does not call; use TrainerEngine"
                )


def frozen_features(client: FederatedClient, context: FitContext) -> Tensor | None:
    """The features of the client's samples, if the current phase may run on them in place of the inputs."""
    data = context.data.for_phase(client.phase.batch_size, client.phase.plain)
    usable = (
        not data.augment
        and data.views == 1
        and client.phase.source == "own"
        and not trains(client.encoder)
        and client.steps_on_features()
        and not is_overridden("on_after_batch_transfer", client)
        and _is_known_to_be_steady(client, context)
    )
    return data.features(client.encoder)[0] if usable else None


def _is_known_to_be_steady(client: FederatedClient, context: FitContext) -> bool:
    """Whether the encoder was found to give what it gives in evaluation, in this phase and these modes; else try it."""
    sample, known = context.data.tensors()[0][:TRIED], IsolationCheck.of(client).steady
    modes = (module.training for module in client.encoder.modules())
    key = (client.phase.name, id(client.encoder), sample.shape, sample.dtype, *modes)
    if key not in known and _is_as_in_evaluation(client.encoder, context):
        known.add(key)
    return key in known


@torch.no_grad()
def _is_as_in_evaluation(encoder: nn.Module, context: FitContext) -> bool:
    """Whether the encoder gives now what it gives in evaluation mode, for each sample by itself.

    No dropout, no batch statistics, no noise, nothing random, and no buffer that a pass changes. The encoder and all
    random generators are left as they were.

    Args:
        encoder: The encoder, in the modes of the fit.
        context: Client and data of the fit.
    """
    buffers = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    sample = context.data.convert_input(context.data.tensors()[0][:TRIED])
    with torch_seed(0, python=True), context.data.forward_context():
        drawn = GeneratorStates.read(sample.device)
        now = encoder(sample)
        steady = GeneratorStates.read(sample.device).is_as(drawn)
        for name, buffer in encoder.named_buffers():
            steady = steady and name in buffers and torch.equal(buffer, buffers[name])
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
        with evaluating(encoder):
            return steady and torch.equal(now, encoder(sample)) and _is_by_sample(encoder, sample, now)


def _is_by_sample(encoder: nn.Module, sample: Tensor, features: Tensor) -> bool:
    """Whether the features of the others stay as they are when one sample becomes another."""
    if len(sample) == 1:
        return True
    changed = sample.clone()
    changed[-1] = 1 - sample[0] if sample.is_floating_point() else sample[0]
    return torch.equal(encoder(changed)[:-1], features[:-1])


@contextmanager
def passed_through(client: FederatedClient) -> Iterator[None]:
    """Let the encoder pass its inputs through, so that ``training_step`` runs on features."""
    encoder, client.encoder = client.encoder, nn.Identity()
    client.encoder.out_features = encoder.out_features
    try:
        yield
    finally:
        client.encoder = encoder


def new_scaler(environment: FitEnvironment, state: bytes = b"") -> torch.amp.GradScaler | None:
    """A scaler for float16 with the client's own state, at first the Trainer's: other clients do not matter."""
    plugin = environment.precision
    if plugin.precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(environment.device.type)
    if found := json.loads(state) if state else cast(Any, plugin).scaler.state_dict():
        scaler.load_state_dict(found)
    return scaler
