"""A small federation whose every sample is known: unequal clients, absent classes, a class that only one client has."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from pfl_lightning import Engine, Federation
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules import BatchTransform, FederatedDataModule, Partitioner, Samples
from pfl_lightning.datamodules.clients.splits import PublicSplit
from pfl_lightning.engines.lifecycle import load_own_state
from pfl_lightning.methods import (
    PFLSSL,
    Calibre,
    DualFed,
    FedEMA,
    FedETF,
    FedMD,
    FedProto,
    FedTGP,
    KNNPer,
    KTpFL,
    PFedFDA,
    SphereFed,
)
from pfl_lightning.self_supervised import BYOL, SimCLR

CLASSES, INPUTS, FEATURES, BATCH, PUBLIC = 5, 6, 4, 4, 12
SEED = 11
# Training labels of each client: client 3 alone holds class 4; clients 0 to 2 miss two or three classes each.
LABELS = (
    [0] * 6 + [1] * 5,
    [1] * 7 + [2] * 6 + [3] * 4,
    [0] * 4 + [2] * 5 + [3] * 5,
    [3] * 6 + [4] * 9,
    [0] * 3 + [1] * 4,
)
CLIENTS = len(LABELS)
WEIGHTS_ONLY: Any = {"weights_only": True} if "weights_only" in inspect.signature(L.Trainer.test).parameters else {}
"""Option of a Trainer's calls that makes a checkpoint safe to load; Lightning has it from 2.6."""


class GivenParts(Partitioner):
    """Client k holds the k-th run of samples; likewise for validation and test."""

    def __init__(self, train: Sequence[int], validation: Sequence[int], test: Sequence[int]) -> None:
        super().__init__(len(train))
        held = [_runs(train), [run + sum(train) for run in _runs(validation)], _runs(test)]
        self.lists = held

    def partition(self, labels: Any) -> list[Any]:
        return self.lists[0]

    def fixed_validation(self) -> list[Any]:
        return self.lists[1]

    def partition_test(self, test_labels: Any, train_labels_per_client: Any, samples_per_client: Any = None) -> Any:
        return self.lists[2]


def _runs(sizes: Sequence[int]) -> list[Any]:
    ends = np.cumsum([0, *sizes])
    return [np.arange(start, end, dtype=np.int64) for start, end in itertools.pairwise(ends)]


def _each(sizes: int | Sequence[int], clients: Sequence[Any]) -> Sequence[int]:
    return [sizes] * len(clients) if isinstance(sizes, int) else sizes


class Toy(FederatedDataModule):
    """Noisy class means. Every client has validation and test samples of its own classes, as many as given."""

    def __init__(
        self,
        labels: Sequence[Sequence[int]] = LABELS,
        batch_size: int = BATCH,
        *,
        validation: int | Sequence[int] = 5,
        test: int | Sequence[int] = 8,
        change: Callable[[Tensor, Tensor], None] | None = None,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        self.labels = [list(own) for own in labels]
        self.validation_labels, self.test_labels = (
            [rng.choice(own, size).tolist() for own, size in zip(self.labels, _each(sizes, labels), strict=True)]
            for sizes in (validation, test)
        )
        sizes = [[len(own) for own in part] for part in (self.labels, self.validation_labels, self.test_labels)]
        super().__init__(GivenParts(*sizes), batch_size, eval_batch_size=7, **options)
        self.change = change

    def load(self) -> Samples:
        generator = torch.Generator().manual_seed(5)
        centers = 2 * torch.randn(CLASSES, INPUTS, generator=generator)
        parts = []
        for lists in ((*self.labels, *self.validation_labels), self.test_labels):
            targets = torch.tensor([label for own in lists for label in own])
            parts.append((centers[targets] + torch.randn(len(targets), INPUTS, generator=generator), targets))
        (inputs, targets), test = parts
        if self.change is not None:
            self.change(inputs, targets)
        return Samples(inputs, targets, tuple("abcde"), *test)

    @cached_property
    def public_split(self) -> PublicSplit:
        """Samples that all clients have beside their own, without labels; classes are there for those who ask."""
        inputs = torch.randn(PUBLIC, *self.input_shape, generator=torch.Generator().manual_seed(6))
        classes = torch.arange(PUBLIC) % CLASSES
        return PublicSplit(inputs, torch.full((PUBLIC,), -1), torch.arange(PUBLIC), BatchTransform(), classes)

    def tensors(self, client: int, part: str = "train") -> tuple[Tensor, Tensor]:
        """A client's samples in their own order, read without the data module's loaders."""
        samples = self.load()
        which = {"train": 0, "validation": 1, "test": 2}[part]
        index = torch.from_numpy(self.partition.lists[which][client])
        if part == "test":
            return samples.test_inputs[index], samples.test_targets[index]
        return samples.train_inputs[index], samples.train_targets[index]


def tiny_encoder(input_shape: Sequence[int]) -> nn.Module:
    """Two layers to four features."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Linear(5, FEATURES), nn.Tanh())
    encoder.out_features = FEATURES
    return encoder


def linear_encoder(input_shape: Sequence[int]) -> nn.Module:
    """One layer to four features: another architecture, with features of the same width."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], FEATURES), nn.Tanh())
    encoder.out_features = FEATURES
    return encoder


def wide_encoder(input_shape: Sequence[int]) -> nn.Module:
    """One layer to seven features: for methods that share nothing behind the encoder."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 7), nn.Tanh())
    encoder.out_features = 7
    return encoder


def normed_encoder(input_shape: Sequence[int]) -> nn.Module:
    """With batch normalization."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU())
    encoder.out_features = FEATURES
    return encoder


def dropout_encoder(input_shape: Sequence[int]) -> nn.Module:
    """With dropout."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], FEATURES), nn.Tanh(), nn.Dropout(0.4))
    encoder.out_features = FEATURES
    return encoder


# Without batch normalization: the toy data leave batches of one sample. With hidden layers as small as the encoders.
SMALL_SIMCLR = partial(SimCLR, hidden=6, out=5, batch_norm=False)
SMALL_BYOL = partial(BYOL, hidden=6, out=5, batch_norm=False, keep_target=True)
FOR_TOY: dict[type, dict[str, Any]] = {
    DualFed: {"projector_batch_norm": False},
    Calibre: {"objective": SMALL_SIMCLR, "clusters": 3},
    PFLSSL: {"objective": SMALL_SIMCLR},
    FedTGP: {"server_epochs": 3},
    FedEMA: {"objective": SMALL_BYOL},
    FedETF: {"alternations": 1, "alternation_epochs": 1},
    PFedFDA: {"eps": 0.3, "betas": "one"},  # inverses of covariances, which multiply rounding otherwise
    SphereFed: {"projection": CLASSES},  # the encoders have fewer features than classes
    FedMD: {"public_samples": 8, "public_batch_size": 5},
    KTpFL: {"public_samples": 8, "public_batch_size": 5},
}


def for_toy(method: type, **options: Any) -> Any:
    """The method such that it trains on the toy data: in batches of four samples, the last one of one to three."""
    fitting = next((found for known, found in FOR_TOY.items() if issubclass(method, known)), {})
    if options.get("fine_tune") and issubclass(method, FedETF):
        fitting = {**fitting, "alternations": 0}  # one or the other
    if options.get("fine_tune") == "all" and issubclass(method, KNNPer):
        options = {**options, "fine_tune": "head"}  # its neighbors are those of the received encoder
    if options.get("fine_tune") == "head" and issubclass(method, FedProto | FedTGP):
        fitting = {**fitting, "prediction": "classifier"}  # a head does not change the nearest prototype
    return partial(method, **{**fitting, **options})


class GivenCohorts(FederatedLoop):
    """The cohorts of the first rounds as given; later ones are repeated from the start."""

    def __init__(self, *cohorts: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.given = cohorts

    def sample_cohort(self, round: int, num_clients: int, seed: int, max_rounds: int | None) -> list[int]:
        return list(self.given[round % len(self.given)])


def quiet_trainer(rounds: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A CPU Trainer without logger, bar, summary, checkpoints and sanity check, unless the options say otherwise."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **{**defaults, **options})


def run(
    method: Any,
    rounds: int = 1,
    *,
    cohorts: Sequence[Sequence[int]] = (range(CLIENTS),),
    data: FederatedDataModule | None = None,
    encoder: Any = tiny_encoder,
    engine: Engine | None = None,
    loop: FederatedLoop | None = None,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    seed: int = SEED,
    store: Mapping[str, Any] | None = None,
    **options: Any,
) -> Federation:
    """Fit a federation on the toy data; ``store`` says where clients' states are stored."""
    federation = Federation(method, encoder, engine=engine, seed=seed, **(store or {}))
    trainer = quiet_trainer(rounds, loop or GivenCohorts(*cohorts), *callbacks, **options)
    trainer.fit(federation, datamodule=data or Toy(), ckpt_path=ckpt_path)
    return federation


def own_model(federation: Federation, client: int) -> Any:
    """The model that a client is evaluated with, before any fine-tuning."""
    [(_, model)] = federation.client_models([client])
    return model


def whole_state(federation: Federation) -> dict[str, Tensor]:
    """Every tensor of the server and of every client, by name."""
    found: dict[str, Tensor] = {}
    for client in range(federation.num_clients):
        model = federation.clients.model_of(client)  # not a copy: some tests leave in modules what cannot be copied
        load_own_state(model, federation.evaluation_task(client), federation.environment)
        found |= {f"client {client} {name}": tensor.clone() for name, tensor in model.state_dict().items()}
        stored = federation.personal.get(client)
        found |= {f"personal {client} {name}": tensor.clone() for name, tensor in stored.items()}
    found |= {f"server {n}": b.clone() for n, b in federation.server.named_buffers()}
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    """Compare two states tensor by tensor; with ``atol=0`` bit by bit."""
    assert got.keys() == expected.keys()
    assert got
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
