"""Division of a data set: its samples with every client's training, validation and test indices."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.batches import BatchTransform
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.splits import NO_LABEL, ClientData, ClientSplit, PublicSplit
from pfl_lightning.datamodules.clients.views import ClientView, check_views, describe_views, views_to_bytes
from pfl_lightning.datamodules.counting import Ints, Parts, apportion, class_counts
from pfl_lightning.datamodules.draws import draw_of_classes
from pfl_lightning.datamodules.partition.base import AS_STORED, Partitioner, PartitionError, check_parts
from pfl_lightning.notices import Names, named_clients
from pfl_lightning.seeding import DataStream


@dataclass(frozen=True)
class Division:
    """Samples of a data set with every client's indices, in the data set's own order, and view.

    Attributes:
        samples: The whole data set.
        train: Training indices of each client.
        validation: Validation indices of each client, into the same samples.
        test: Test indices of each client, into the test set; into the same samples if there is no test set.
        unlabeled: Indices of each client into the unlabeled samples; empty lists if there are none.
        views: View of each client; empty if every client sees the samples as stored.
    """

    samples: Samples
    train: Parts
    validation: Parts
    test: Sequence[Ints]
    unlabeled: Parts
    views: tuple[ClientView, ...]

    @property
    def held(self) -> Ints | None:
        """Training and validation samples of all clients, sorted, each once: those that channel statistics may use.

        None if the data set has a test set, so that statistics may use every training sample. Without one they are of
        the clients, not of the pool that the rule chose from, which a file of the same samples cannot tell.
        """
        if self.samples.test_targets is not None:
            return None
        return np.flatnonzero(_mask(len(self.samples.train_targets), self.train, self.validation))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every client's indices, their order, and its view, 16 hexadecimal digits."""
        samples, counts = self.samples, [len(self.samples.train_targets), 0, len(self.train)]
        counts[1] = 0 if samples.test_targets is None else len(samples.test_targets)
        digest = hashlib.sha256(np.array(counts, dtype="<i8").tobytes())
        for lists in (self.train, self.validation, self.test):
            digest.update(_to_bytes(lists))
        digest.update(views_to_bytes(self.views))
        if samples.num_unlabeled:
            digest.update(np.array(samples.num_unlabeled, dtype="<i8").tobytes() + _to_bytes(self.unlabeled))
        return digest.hexdigest()[:16]

    def public(self, transform: BatchTransform) -> ClientSplit | None:
        """Public samples; None if there are none."""
        inputs = self.samples.public_inputs
        if inputs is None:
            return None
        targets = torch.tensor(NO_LABEL).expand(len(inputs))
        return PublicSplit(inputs, targets, torch.arange(len(inputs)), transform, self.samples.public_targets)

    def client_data(self, client: int, transform: BatchTransform) -> ClientData:
        """Splits of one client, through its view."""
        samples, view = self.samples, self.views[client] if self.views else AS_STORED
        inputs, targets = samples.train_inputs, samples.train_targets
        test_inputs = inputs if samples.test_inputs is None else samples.test_inputs
        test_targets = targets if samples.test_targets is None else samples.test_targets
        nothing = torch.empty((0, *inputs.shape[1:]), dtype=inputs.dtype)
        unlabeled = nothing if samples.unlabeled_inputs is None else samples.unlabeled_inputs
        no_labels = torch.tensor(NO_LABEL).expand(len(unlabeled))
        own = (torch.from_numpy(lists[client]) for lists in (self.train, self.validation, self.test, self.unlabeled))
        seen = None if view.is_identity else view
        turned = ClientView(view.rotation) if view.rotation else None
        return ClientData(
            train=ClientSplit(inputs, targets, next(own), transform, seen),
            validation=ClientSplit(inputs, targets, next(own), transform, seen),
            test=ClientSplit(test_inputs, test_targets, next(own), transform, seen),
            unlabeled=ClientSplit(unlabeled, no_labels, next(own), transform, turned),
        )

    def class_counts(self) -> Ints:
        """Training samples of each class at each client, as the client sees them, shape (m, C)."""
        stored = class_counts(self.samples.train_targets.numpy(), self.train, len(self.samples.class_names))
        for row, view in zip(stored, self.views, strict=False):
            row[:] = view.counts(row)
        return stored

    def client_groups(self) -> list[str] | None:
        """Domain and view of each client in words; None if the clients have neither.

        Clients have domains where the training samples of each are of a single one.
        """
        found, domains = describe_views(self.views), self.samples.train_domains
        if domains is not None:
            held = domains.numpy()[self.train.values]
            first = held[self.train.ends - self.train.sizes]
            if np.array_equal(held, first[self.train.owners]):
                names = [self.samples.domain_names[own] for own in first]
                found = [", ".join(filter(None, both)) for both in zip_longest(names, found)]
        return found if any(found) else None


def _mask(num_samples: int, *lists: Parts) -> npt.NDArray[np.bool_]:
    """Where samples are in one of the lists."""
    found = np.zeros(num_samples, dtype=np.bool_)
    for parts in lists:
        found[parts.values] = True
    return found


def _to_bytes(lists: Sequence[Ints]) -> bytes:
    """Bytes of the sizes of all lists, then of their indices; the same on every machine."""
    lists = Parts.of(lists)
    return lists.sizes.astype("<i8").tobytes() + lists.values.astype("<i8").tobytes()


def divide(
    rule: Partitioner,
    samples: Samples,
    *,
    validation_share: float,
    test_share: float,
    test_samples_per_client: int | None,
    seed: int,
    novel: Sequence[int] = (),
) -> Division:
    """Every client's training, validation and test samples.

    With a test set, the rule divides the training set, and test splits come from the test set. Without one, a
    stratified share of the whole set becomes the test set first. A rule that lists samples explicitly (a file, domains)
    is the exception: its indices count the whole set, and samples that no client trains on are test samples. Where the
    data say whose a sample is, each client's own samples are split, and no rule is asked.

    Args:
        rule: The partition rule.
        samples: The data set.
        validation_share: Share of each client's own samples that is held out for validation.
        test_share: Share of the whole set that is held out for tests if there is no test set.
        test_samples_per_client: Greatest size of a client's test split; None for the size of its training split.
        seed: Seed of the validation and test splits.
        novel: Ids of the clients that never train.

    Returns:
        The division.

    Raises:
        PartitionError: If the rule cannot be met, returns invalid indices, or a client gets no samples.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> samples = Samples(torch.rand(80, 4), torch.arange(80) // 40, ("cat", "dog"))
        >>> shares = dict(validation_share=0.1, test_share=0.25, test_samples_per_client=None)
        >>> division = divide(IID(num_clients=3), samples, **shares, seed=0)
        >>> [lists.sizes.tolist() for lists in (division.train, division.validation, division.test)]
        [[18, 18, 18], [2, 2, 2], [18, 18, 16]]
    """
    labels = samples.train_targets.numpy()
    if samples.train_clients is not None:
        own, validation, test = _as_given(rule, samples, test_share, test_samples_per_client, seed)
    else:
        own, validation, test = _by_rule(rule, samples, test_share, test_samples_per_client, seed)
    if validation is None:
        own, validation = split_validation(labels, own, validation_share, seed)
    unlabeled = assign_unlabeled(rule, samples.num_unlabeled, novel, seed)
    views = rule.client_views(len(samples.class_names))
    check_views(views, samples.train_inputs.shape[1:])
    return Division(samples, own, validation, Parts.of(test), unlabeled, views)


Splits = tuple[Parts, Parts | None, Sequence[Ints]]
"""Training, validation (where they are given) and test samples of each client."""


def _as_given(rule: Partitioner, samples: Samples, test_share: float, most: int | None, seed: int) -> Splits:
    """Samples of the clients that the data name; without a test set, a share of each client's own is held out."""
    assert samples.train_clients is not None
    labels, own = samples.train_targets.numpy(), _owned(samples.train_clients, rule.num_clients)
    if empty := np.flatnonzero(own.sizes == 0).tolist():
        raise PartitionError(
            f"client(s) {rule.named(empty)} have no training samples ({len(empty)} of {len(own)}): leave them out, or "
            "give them some"
        )
    if samples.test_targets is None:
        own, test = split_validation(labels, own, test_share, seed, DataStream.POOL)
    elif samples.test_clients is not None:
        test = _owned(samples.test_clients, rule.num_clients)
    else:
        return own, None, rule.partition_test(samples.test_targets.numpy(), Parts(labels[own.values], own.sizes), most)
    if most is not None and most < test.sizes.max():
        drawn = list(test)
        for client in np.flatnonzero(test.sizes > most).tolist():
            rng = np.random.default_rng([seed, DataStream.TEST, client])
            drawn[client] = np.sort(rng.choice(test[client], most, replace=False))
        test = Parts.of(drawn)
    if empty := np.flatnonzero(test.sizes == 0).tolist():
        warnings.warn(
            f"client(s) {rule.named(empty)} have no test samples ({len(empty)} of {len(own)}), and so no test scores: "
            "their samples are too few for test_share, or all in the training set",
            stacklevel=2,
        )
    return own, None, test


def _owned(clients: Tensor, num_clients: int) -> Parts:
    """Positions of each client's samples, ascending."""
    return Parts.sorted(np.arange(len(clients)), clients.numpy(), num_clients)


def _by_rule(rule: Partitioner, samples: Samples, test_share: float, most: int | None, seed: int) -> Splits:
    """Samples of the clients by a partition rule."""
    labels = samples.train_targets.numpy()
    test_labels = None if samples.test_targets is None else samples.test_targets.numpy()
    if samples.train_domains is not None and test_labels is None:
        rule = rule.with_domains(samples.train_domains.numpy(), samples.domain_names)
    if test_labels is None and not rule.fixed_train:
        whole = Parts.of([np.arange(len(labels))])
        chosen = draw_of_classes(labels, whole, lambda held, _: _share(held, test_share), [seed], DataStream.POOL)
        pool, rest = np.flatnonzero(~chosen), np.flatnonzero(chosen)
        if not len(rest):
            raise PartitionError(f"test_share {test_share} of {len(labels)} samples leaves no test sample: raise it")
        parts = check_parts(rule, rule.partition(labels[pool]), len(pool))
        own = Parts(pool[parts.values], parts.sizes)
    else:
        own = check_parts(rule, rule.partition(labels), len(labels))
        rest = np.arange(len(labels), dtype=np.int64)
    if empty := np.flatnonzero(own.sizes == 0).tolist():
        raise PartitionError(
            f"client(s) {empty[:10]} have no training samples ({len(empty)} of {len(own)}): "
            "lower num_clients, or choose a rule with a minimum size"
        )
    given = rule.fixed_validation()
    held, validation = own, None if given is None else Parts.of(given)
    if validation is not None:
        held = Parts.of([np.concatenate(both) for both in zip(own, validation, strict=True)])
    if test_labels is None and rule.fixed_train and not rule.fixed_test:
        rest = np.flatnonzero(~_mask(len(labels), held))
        if len(rest) == 0:
            raise PartitionError(
                "the file's training indices cover the whole data set and it has no test indices: add lists 'test'"
            )
    held_labels = Parts(labels[held.values], held.sizes)
    test = Parts.of(rule.partition_test(labels[rest] if test_labels is None else test_labels, held_labels, most))
    if test_labels is None:
        test = Parts(rest[test.values], test.sizes)
        if len(shared := np.flatnonzero(_mask(len(labels), held) & _mask(len(labels), test))):
            raise PartitionError(
                f"{len(shared)} samples are both in a training and in a test split (the first: {shared[0]}): "
                "without a separate test set, test indices must be of samples that no client trains on"
            )
    return own, validation, test


def split_validation(
    labels: Ints, parts: Parts, share: float, seed: int, stream: DataStream = DataStream.VALIDATION
) -> tuple[Parts, Parts]:
    """Training and validation samples of each client, by a stratified split of its own samples.

    Classes are rounded by largest remainders. Every class keeps a training sample, so that a client with few samples
    may get a smaller validation split, or none.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Samples of each client.
        share: Share for validation, from 0 to below 1.
        seed: Seed of the choice; each client has its own stream.
        stream: Purpose of the choice.

    Returns:
        Training and validation samples of each client.

    Example:
        >>> labels = np.repeat([0, 1], 10)
        >>> train, validation = split_validation(labels, Parts.of([np.arange(20)]), share=0.2, seed=0)
        >>> labels[validation[0]].tolist(), len(train[0])
        ([0, 0, 1, 1], 16)
    """
    chosen = draw_of_classes(labels, parts, lambda held, _: _share(held, share), [seed, stream])
    return parts.where(~chosen), parts.where(chosen)


def check_batches(division: Division, batch_size: int | Ints, names: Names = None) -> None:
    """Check that every client has at least one full batch, as ``drop_last`` needs.

    With unlabeled samples, a client that has some counts them too, and a client that has none is not checked: this
    function does not know whether the method uses them.

    Args:
        division: Indices of every client's splits.
        batch_size: Samples in a batch, or those of each client.
        names: Names of the clients.

    Raises:
        PartitionError: If a client has fewer samples.
    """
    further = division.unlabeled.sizes
    sizes = division.train.sizes + further
    training = further > 0 if further.any() else np.ones(len(sizes), dtype=bool)
    least = np.broadcast_to(batch_size, sizes.shape)
    if len(short := np.flatnonzero(training & (sizes < least))):
        raise PartitionError(
            f"drop_last leaves {named_clients(short[:1].tolist(), names)} no batch ({len(short)} such clients): it has "
            f"{sizes[short[0]]} training samples, batch_size is {least[short[0]]}; lower batch_size to at most "
            f"{sizes[short].min()}"
        )


def _share(held: Ints, share: float) -> Ints:
    """Share of the samples of each client and class, rounded by largest remainders; of each, one at least is left."""
    total = np.floor(held.sum(axis=1) * share + 0.5).astype(np.int64)
    return apportion(held * share, total, np.zeros_like(held), np.maximum(held - 1, 0))


def assign_unlabeled(rule: Partitioner, num_samples: int, novel: Sequence[int], seed: int) -> Parts:
    """Indices of the unlabeled samples of each client: equal shares at random for the clients that train.

    A rule has no labels to use here, and clients that never train do not need the samples. A rule that lists unlabeled
    samples explicitly (a file) decides instead, except for the clients that never train.

    Args:
        rule: The partition rule.
        num_samples: Number of unlabeled samples.
        novel: Ids of the clients that never train.
        seed: Seed of the random order.

    Returns:
        One array of indices per client. Arrays are disjoint, cover all samples, and differ in size by one at most;
        empty for a novel client.

    Raises:
        PartitionError: If the rule lists an index outside the unlabeled samples.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> indices = assign_unlabeled(IID(num_clients=3), num_samples=7, novel=[1], seed=0)
        >>> [len(own) for own in indices]
        [4, 0, 3]
    """
    trains = np.ones(rule.num_clients, dtype=np.bool_)
    trains[list(novel)] = False
    given = rule.fixed_unlabeled(num_samples) if num_samples else None
    if given is not None:
        parts = Parts.of(given)
        return parts.where(trains[parts.owners])
    order = np.random.default_rng([seed, DataStream.UNLABELED]).permutation(num_samples)
    sizes = np.zeros(rule.num_clients, dtype=np.int64)
    sizes[trains] = num_samples // trains.sum() + (np.arange(trains.sum()) < num_samples % trains.sum())
    return Parts(order, sizes)


def draw_novel_clients(novel: int | float, num_clients: int, seed: int) -> list[int]:
    """Ids of the novel clients, which never train.

    Args:
        novel: A share of all clients in [0, 1), rounded up, or a number of clients.
        num_clients: Number of clients m.
        seed: Seed of the draw.

    Returns:
        Ascending ids.

    Raises:
        ValueError: If ``novel`` is neither, or no client would be left to train.

    Example:
        >>> draw_novel_clients(0.25, num_clients=10, seed=0)  # 2.5 clients, rounded up
        [3, 5, 8]
        >>> draw_novel_clients(0, num_clients=10, seed=0)
        []
    """
    share = isinstance(novel, float)
    if isinstance(novel, bool) or not isinstance(novel, int | float) or novel < 0 or (share and not novel < 1):
        raise ValueError(f"novel_clients must be a share in [0, 1) or a number of clients, got {novel!r}")
    number = math.ceil(novel * num_clients - 1e-9) if share else int(novel)
    if number >= num_clients > 0:
        raise ValueError(
            f"novel_clients is {novel!r}: all of the {num_clients} clients would be novel and none would be left to "
            f"train; give at most {num_clients - 1}"
        )
    rng = np.random.default_rng([seed, DataStream.NOVEL])
    return sorted(rng.choice(num_clients, number, replace=False).tolist())
