"""Metrics of single clients, and their summary over all clients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from pfl_lightning.notices import Names, labels_of, named_clients, shown_before

if TYPE_CHECKING:
    from pfl_lightning.class_metrics import Confusion


@dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one client's model on its validation or test part.

    Attributes:
        accuracy: Share of correctly classified samples, in [0, 1].
        loss: Mean cross entropy, in nats.
        num_samples: Number of samples.
        logged: Values that a user-defined LightningModule logged, by name.
        progress_bar_names: Names of those that the progress bar shows.
        best: Of those that are the best over epochs, by name: ``"max"`` or ``"min"``.
        loader_sizes: Number of samples of each loader, where the part has several.
        loaders: Numbers of the loaders in whose batches a value was logged, by name, where the part has several.
        reductions: ``"sum"``, ``"min"`` or ``"max"`` by the names of logged values that are no means.
        further: Further metrics that were asked for, by name; NaN where one is not defined.
        confusion: Numbers of samples by class and predicted class, (C, C), where they were asked for.
    """

    accuracy: float
    loss: float
    num_samples: int
    logged: Mapping[str, float] = field(default_factory=dict)
    progress_bar_names: frozenset[str] = frozenset()
    best: Mapping[str, str] = field(default_factory=dict)
    loader_sizes: tuple[int, ...] = ()
    loaders: Mapping[str, frozenset[int]] = field(default_factory=dict)
    reductions: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, float] = field(default_factory=dict)
    confusion: Confusion = ()

    def samples_of(self, name: str) -> int:
        """Number of samples of which a logged value is: those of the loaders in whose batches it was logged.

        Example:
            >>> loaders = {"ood_loss": frozenset({1})}
            >>> values = {"val_loss/dataloader_idx_1": 2.0, "ood_loss": 2.0, "gap": 1.0}
            >>> score = EvalMetrics(0.5, 0.1, 5, values, loader_sizes=(3, 2), loaders=loaders)
            >>> [score.samples_of(name) for name in values]
            [2, 2, 5]
        """
        _, found, number = name.rpartition("/dataloader_idx_")
        if found and number.isdecimal() and int(number) < len(self.loader_sizes):
            return self.loader_sizes[int(number)]
        plain = name if name in self.loaders else name.removesuffix("_epoch").removesuffix("_step")
        own = self.loaders.get(plain, frozenset())
        known = [self.loader_sizes[loader] for loader in own if loader < len(self.loader_sizes)]
        return sum(known) or self.num_samples


@dataclass(frozen=True)
class ClientSummary:
    """Summary of a metric over clients, each client counted once.

    Attributes:
        mean: Mean over clients.
        weighted_mean: Mean weighted by the clients' numbers of samples: that over all samples, for an accuracy.
        std: Standard deviation over clients (of the population, not of a sample).
        worst_decile: Mean of the worst tenth of the clients (at least one client).
        best: Value of the best client.
        worst: Value of the worst client.
        best_client: Number of the best client.
        worst_client: Number of the worst client.
    """

    mean: float
    weighted_mean: float
    std: float
    worst_decile: float
    best: float
    worst: float
    best_client: int
    worst_client: int

    def as_dict(self) -> dict[str, float | int]:
        """Values of the summary by name."""
        return asdict(self)


def summarize(
    values: Mapping[int, float], samples: Mapping[int, int] | None = None, lower_is_better: bool = False
) -> ClientSummary:
    """Summary of a metric over clients.

    Args:
        values: Of each client, by its number.
        samples: Numbers of the clients' samples; ``None`` where they are not known, nor is the weighted mean then.
        lower_is_better: Whether the best client has the lowest value.

    Raises:
        ValueError: There is no client.

    Example:
        >>> from pfl_lightning.metrics import summarize
        >>> summary = summarize({3: 0.25, 5: 0.5, 8: 0.75}, samples={3: 10, 5: 10, 8: 20})
        >>> summary.mean, summary.worst_decile, summary.worst_client  # a tenth of three clients is one client
        (0.5, 0.25, 3)
        >>> summary.weighted_mean
        0.5625
        >>> round(summary.std, 4)  # sqrt(2 * 0.25^2 / 3)
        0.2041
    """
    if not values:
        raise ValueError("there is no client to summarize")
    clients, own, sign = [*values], np.array([*values.values()], dtype=np.float64), -1 if lower_is_better else 1
    best, worst, decile = int((sign * own).argmax()), int((sign * own).argmin()), math.ceil(len(own) / 10)
    weights = [(samples or {}).get(client, 0) for client in clients]
    weighted = float(np.average(own, weights=weights)) if any(weights) else math.nan
    return ClientSummary(
        mean=float(own.mean()),
        weighted_mean=weighted,
        std=float(own.std()),
        worst_decile=sign * float(np.sort(sign * own)[:decile].mean()),
        best=float(own[best]),
        worst=float(own[worst]),
        best_client=int(clients[best]),
        worst_client=int(clients[worst]),
    )


def reduction_of(name: str, reductions: Mapping[str, str]) -> str:
    """How a value is reduced over clients, as over the steps of an epoch.

    Args:
        name: The value's name, as a Trainer has it.
        reductions: ``"sum"``, ``"min"`` or ``"max"`` by the names given to ``self.log``; others are means.

    Example:
        >>> names = ["hits", "hits_epoch", "hits/dataloader_idx_1", "hits_step", "loss"]
        >>> [reduction_of(name, {"hits": "sum"}) for name in names]
        ['sum', 'sum', 'sum', 'mean', 'mean']
    """
    plain = name.partition("/dataloader_idx_")[0]
    return reductions.get(name) or reductions.get(plain) or reductions.get(plain.removesuffix("_epoch"), "mean")


def over_clients(
    name: str,
    values: Mapping[int, float],
    weights: Mapping[int, float],
    reduction: str = "mean",
    names: Names = None,
) -> dict[str, float]:
    """A logged value over clients, of those for which it is defined (not NaN).

    Where it is undefined for some, a warning names each of them once, and the number of the others is added.

    Args:
        name: Name of the value.
        values: Of each client; at least one.
        weights: Weight of each client in a mean, such as its number of samples.
        reduction: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        names: Names of the clients.

    Returns:
        The value under its name and, where some are left out, the number of clients as ``NAME/clients``.

    Example:
        >>> over_clients("val_f1", {0: 0.5, 1: 0.8}, {0: 10, 1: 20})
        {'val_f1': 0.7}
    """
    known = {client: value for client, value in values.items() if not math.isnan(value)}
    left_out = sorted(values.keys() - known.keys())
    new = [client for client in left_out if not shown_before("undefined", name, client)]
    if not known:
        if new:
            warnings.warn(f"{name} is undefined (NaN) for all clients, and so are its logged values", stacklevel=3)
        return {name: math.nan}
    if new:
        warnings.warn(
            f"{name} is undefined (NaN) for {named_clients(new, names)}: look at their samples, or for weights that "
            f"have become infinite. Logged values are of the other {len(known)} clients ({name}/clients)",
            stacklevel=3,
        )
    own = np.array([*known.values()])
    if reduction == "mean":
        found = float(np.average(own, weights=[weights[client] for client in known]))
    else:
        found = float(getattr(own, reduction)())
    return {name: found} | ({f"{name}/clients": float(len(known))} if left_out else {})


def idle_clients(clients: Sequence[int], accuracies: Mapping[int, float], names: Names = None) -> str:
    """Clients that never trained, and what they do to the mean; empty without clients.

    Args:
        clients: Their numbers.
        accuracies: The accuracies of which the mean is taken, by client.
        names: Names of the clients.

    Example:
        >>> idle_clients([1], {0: 0.75, 1: 0.25, 2: 0.75})
        '1 client never trained (1; mean 25.00 %, of the other 2: 75.00 %)'
    """
    if not clients:
        return ""
    own = [accuracies[client] for client in clients if client in accuracies]
    others = [accuracy for client, accuracy in accuracies.items() if client not in set(clients)]
    means = f"; mean {100 * fmean(own):.2f} %" if own else ""
    means += f", of the other {len(others)}: {100 * fmean(others):.2f} %" if own and others else ""
    means += "; not in the mean" if others and not own else ""
    return f"{len(clients)} client{'s' if len(clients) > 1 else ''} never trained ({labels_of(clients, names)}{means})"
