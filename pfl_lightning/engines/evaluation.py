"""A module brought to the model that a client is evaluated with, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.engines.isolation_check import IsolationCheck
from pfl_lightning.engines.lifecycle import local_fit
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import EvaluationTask, FitEnvironment
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.tensors import load_state

__all__ = ["SplitMetrics", "forget_preparation", "load_own_state"]

SplitMetrics = tuple[EvalMetrics | None, EvalMetrics | None]
"""Metrics of the validation and the test part; ``None`` where there is none."""


def load_own_state(client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> None:
    """Put the model that a client is evaluated with into the module of its architecture, before any fine-tuning.

    It is the client's personal state under what the server would send now; or, for a method that evaluates the trained
    models, the client's model after its last local fit. Then comes the method's own ``before_evaluation``.
    """
    prepares = type(client).before_evaluation is not FederatedClient.before_evaluation
    if prepares:  # nothing of a broadcast, such as a bank of models, is to outlast the evaluation
        forget_preparation(client)  # of the client before
        IsolationCheck.of(client).buffers = _buffers(client)
    if client.buffers_change:
        client.restore_buffers()
    if not task.trained:
        load_state(client, task.stored)
    client.receive(task.broadcast if client.device.type == "cpu" else task.broadcast.to(client.device))
    client.recall(task.attributes)
    if task.trained:
        load_state(client, task.stored)  # over the received weights; what else was received stays
    if prepares:
        _prepare(client, task.context, environment)


def _prepare(client: FederatedClient, context: FitContext, environment: FitEnvironment) -> None:
    """Call the client's ``before_evaluation`` on the model that the module holds, in evaluation mode.

    Draws of torch's, Python's and NumPy's own generators derive from (seed, round, client), and are the same in every
    evaluation of a round.

    Raises:
        ConfigurationError: It wrote into a non-persistent buffer, which may be a broadcast's tensor.
    """
    versions = [(name, tensor, tensor._version) for name, tensor in _buffers(client).items() if tensor is not None]
    client.eval()
    seed = derive_seed(environment.seed, Purpose.EVALUATION_MODEL, context.round, context.client)
    try:
        with torch.no_grad(), local_fit(environment), torch_seed(seed, python=True):
            client.before_evaluation(context)
    except Exception as error:
        error.add_note(f"before the evaluation of client {context.client}, round {context.round + 1}")
        raise
    client.eval()
    for name, tensor, version in versions:
        if tensor._version != version:
            raise ConfigurationError(
                f"{type(client).__name__}.before_evaluation writes into the buffer {name!r}, which would outlast the "
                "evaluation: replace it by assign of a TensorDict, or by setting the attribute to a new tensor"
            )


def forget_preparation(client: FederatedClient) -> None:
    """Give the module back the buffers that it had; parameters and values are loaded before they are next used."""
    if client.buffers_change:
        client.restore_buffers()
    isolation = IsolationCheck.of(client)
    before, isolation.buffers = isolation.buffers, None
    if before is None:
        return
    for module in client.modules():
        for key in list(module._non_persistent_buffers_set):
            delattr(module, key)
    for place, tensor in before.items():
        prefix, _, key = place.rpartition(".")
        client.get_submodule(prefix).register_buffer(key, tensor, persistent=False)


def _buffers(client: FederatedClient) -> dict[str, Tensor | None]:
    """The non-persistent buffers."""
    return {
        f"{prefix}.{key}" if prefix else key: tensor
        for prefix, module in client.named_modules()
        for key, tensor in module._buffers.items()
        if key in module._non_persistent_buffers_set
    }
