"""The steps of a user's LightningModule: its loss and optimizers with a method's parts, and its logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.fits.logs import LogRecord, undefined_as_nan
from pfl_lightning.drop_in.fits.module_calls import (
    at_learning_rate,
    call_step,
    held_schedulers,
    patched,
    share_of_learning_rates,
    warn_of_counters,
)
from pfl_lightning.drop_in.fits.over_rounds import Continuity, FitProgress
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.clients import split_attributes


class ModuleSteps:
    """Steps of a user's module, to whose loss the terms of its client's method are added."""

    client: FederatedClient
    """The client that has the module."""
    module: L.LightningModule
    continuity = Continuity("restart", "reset")
    """What goes on from a client's local fit to its next. A federation sets it; a copy with a new head keeps this."""
    progress: FitProgress | None = None
    """Of the fit under way; ``None`` where nothing goes on, as in a fine-tuning before an evaluation."""
    own_loss: Tensor | None = None
    """What the step under way returned."""
    scores: Tensor | None = None
    """Of the head, while the method's own are computed."""
    _record: LogRecord | None = None
    """Of the fit under way, where there is no Trainer."""

    @property
    def step_module(self) -> L.LightningModule:
        """The module, or what a method trains beside it in the current phase."""
        active = self.client.active_network()
        return self.module if active is None else cast(L.LightningModule, active)

    def steps_on_features(self) -> bool:
        """No: the step is the module's."""
        return False

    def loss_terms(self) -> dict[str, Tensor]:
        """The module's own loss, as its step returned it."""
        return {} if self.own_loss is None else {"module_loss": self.own_loss}

    def method_terms(self, own_loss: Tensor | None = None) -> dict[str, Tensor]:
        """The parts of the loss by name: the module's own, where given, and what the method adds."""
        self.own_loss = own_loss
        try:
            return self.client.loss_terms(torch.empty(0), torch.empty(0))
        finally:
            self.own_loss = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.module(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The module's own step, and the method's terms."""
        if self._record is not None:
            if batch_idx == 0:
                self._record.start_epoch()
            self._record.start_batch(batch)
        return self.with_method_terms(call_step(self.step_module.training_step, batch, batch_idx))

    def with_method_terms(self, output: Any) -> Any:
        """What the module's step returned, with the method's terms added to the loss."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            return output
        summed = self.sum_of_terms(self.method_terms(loss))
        return {**(output if isinstance(output, dict) else {}), **summed} if summed else output

    def sum_of_terms(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum of the terms as ``"loss"``, and each of them detached; nothing where the module's own is alone."""
        loss = cast(Tensor, sum(terms.values()))
        return {"loss": loss} | {name: term.detach() for name, term in terms.items()} if len(terms) > 1 else {}

    # ------------------------------------------------------------------ optimizers

    def configure_optimizers(self) -> Any:
        """The module's own, at the phase's rate; or the phase's optimizer."""
        return self.optimizers_from(self.step_module.configure_optimizers)

    def optimizers_from(self, configure: Callable[[], Any]) -> Any:
        """As :meth:`configure_optimizers`, from the module's own function; they continue from what was carried over."""
        with nullcontext() if self.progress is None else self.progress.as_last_made(self.step_module):
            configured = self.new_optimizers(configure)
        share = self.client.phase.lr_share
        if share is not None:
            if self.progress is not None and self.progress.settings.continues:
                raise ConfigurationError(
                    f"{type(self.client).__name__} sets the learning rate of each round, and here rates continue from "
                    "a client's last fit: use federate(..., schedule='restart'), or leave its lr_schedule out"
                )
            configured = share_of_learning_rates(configured, share)
        if self.progress is not None:
            self.progress.take_over([configured, *held_schedulers(self.step_module, configured)], self.step_module)
        return configured

    def new_optimizers(self, configure: Callable[[], Any]) -> Any:
        """Optimizers and schedulers of the current phase, as at the start of a run."""
        phase = self.client.phase
        if phase.optimizer is not None:
            return phase.optimizer([p for p in self.step_module.parameters() if p.requires_grad])
        configured = configure()
        return configured if phase.lr is None else at_learning_rate(configured, phase.lr)

    # ------------------------------------------------------------------ from fit to fit

    @property
    def hands_on(self) -> bool:
        """Whether anything goes on."""
        return self.continuity.continues or self.continuity.keeps

    def begin_progress(self, content: bytes | None) -> None:
        """Continue from what the client's last fit has left; ``None`` continues from nothing and leaves nothing."""
        name = type(self.step_module).__name__
        self.progress = None if content is None else FitProgress(self.continuity, split_attributes(content)[0], name)

    # ------------------------------------------------------------------ what is logged

    def reset_metrics(self) -> None:
        """Reset all metric objects."""
        for layer in self.client.modules():
            if isinstance(layer, Metric):
                layer.reset()

    @contextmanager
    def recorded_logs(self) -> Iterator[None]:
        """Let the module log without a Trainer; it is not part of the loss terms."""
        client, self._record = self.client, LogRecord(in_training=True)
        warn_of_counters(self.step_module)
        try:
            with patched(self.step_module, log=self._record.log), undefined_as_nan(self.step_module):
                yield
                client.logged_metrics |= self._record.values()
                client.progress_bar_names |= self._record.progress_bar_names
                client.logged_reductions = {**client.logged_reductions, **self._record.reductions}
                if self.progress is not None:
                    self.progress.finish_phase_without_trainer(client.phase.epochs)
        finally:
            self._record = None
