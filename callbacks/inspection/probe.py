"""Fixed samples of some clients, the same in every round, and their representations by the clients' models."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning as L
import numpy as np
import torch
from torch import Tensor

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.client import FederatedClient
from pfl_lightning.data import SplitSource, label_map_of, names_of
from pfl_lightning.datamodules.adapters.items import ItemSplit
from pfl_lightning.datamodules.adapters.streams import StreamSplit
from pfl_lightning.datamodules.adapters.workers import Fetch
from pfl_lightning.datamodules.clients.splits import ClientSplit
from pfl_lightning.federation import Federation
from pfl_lightning.notices import named_clients
from pfl_lightning.seeding import Purpose, derive_seed, seeded_generator, torch_seed

SplitName = Literal["train", "validation", "test"]
AT_ONCE = 128  # samples in a forward pass


class ProbingCallback(InspectionCallback):
    """Base of the callbacks that inspect samples of some clients.

    Args:
        every_n_rounds: Rounds between two figures.
        clients: Greatest number of inspected clients.
        samples: Greatest number of samples of each client.
        part: Split of the samples: ``"train"``, ``"validation"`` or ``"test"``.
        dirpath: See :class:`InspectionCallback`.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    probe: Probe

    def __init__(
        self,
        every_n_rounds: int = 10,
        clients: int = 10,
        samples: int = 50,
        part: SplitName = "test",
        dirpath: str | None = None,
    ) -> None:
        super().__init__(every_n_rounds, dirpath)
        check_at_least("clients to inspect", clients, 1)
        check_at_least("samples to inspect", samples, 1)
        check_choice("part", part, get_args(SplitName))
        self.clients, self.samples, self.part = clients, samples, part

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Draw clients and samples; the reason if there are none."""
        self.probe = Probe(federation, self.clients, self.samples, self.part)
        return self.probe.lacks


@dataclass(frozen=True)
class Representations:
    """Representations of some samples by one client's model.

    Attributes:
        client: Id of the client.
        by_name: Representations of the samples by name, shape (n, d) each, float32 on the CPU.
        labels: Classes of the samples, shape (n,), on the CPU.
    """

    client: int
    by_name: dict[str, Tensor]
    labels: Tensor


def own_classes(federation: Federation, client: int, labels: Tensor) -> Tensor:
    """What a client calls classes of the data, (n,), which under a concept shift have an order of its own."""
    order = _order_of(federation, client)
    return labels if order is None else order.to(labels.device)[labels]


def _order_of(federation: Federation, client: int) -> Tensor | None:
    """The client's name of each class, (C,); ``None`` for the data's."""
    numbers = label_map_of(federation.data, client)
    return None if numbers is None else torch.tensor(numbers)


class Probe:
    """Samples to inspect.

    The draws depend on the run's seed alone, so that they are the same in every round and after a resume.

    Args:
        federation: The federation, whose data are loaded.
        clients: Greatest number of clients, drawn at random from those that are evaluated during training.
        samples: Greatest number of samples of each client, drawn at random.
        part: Split of the samples.
    """

    def __init__(self, federation: Federation, clients: int = 10, samples: int = 50, part: SplitName = "test") -> None:
        self.max_samples, self.part, self._seed = samples, part, federation.seed
        known = np.array(federation.data.evaluated_clients())
        order = np.random.default_rng(derive_seed(self._seed, Purpose.INSPECTED_CLIENTS)).permutation(known).tolist()
        with_samples = (client for client in order if len(self._split(federation, client)))
        self.clients = sorted(itertools.islice(with_samples, clients))
        self.lacks = self._lacks(federation)
        """Reason why there is nothing to inspect, else None."""

    def _lacks(self, federation: Federation) -> str | None:
        for model, label in zip(federation.clients.models, federation.clients.labels):
            if getattr(getattr(model, "encoder", None), "out_features", None) is None:
                return f"{label} has no encoder with features (out_features)"
        for client in self.clients:
            split = self._split(federation, client)
            if not isinstance(split, ClientSplit) and self._items(federation, client, 1) is None:
                return (
                    "the data module reads a user-defined data set batch by batch, so single items cannot be selected, "
                    "unless they are pairs of a tensor and a class and the method works on features of a user's module"
                )
        return None if self.clients else f"no client has samples in its {self.part} split; choose another one by 'part'"

    def lacks_common(self, federation: Federation) -> str | None:
        """Reason why no sample can be shown to all clients, else None."""
        shapes = {tuple(self.samples(federation, client)[0].shape[1:]): client for client in self.clients}
        if len(shapes) < 2:
            return None
        names = names_of(federation.data)
        named = ", ".join(f"{shape} ({named_clients([client], names)})" for shape, client in shapes.items())
        return f"samples are shown to all clients, and those of clients differ in shape: {named}"

    def _split(self, federation: Federation, client: int) -> SplitSource:
        split: SplitSource = getattr(federation.data.client_data(client), self.part)
        return split

    def samples(self, federation: Federation, client: int) -> tuple[Tensor, Tensor]:
        """Inputs of the client's samples, not augmented, (n, ...), and classes, (n,), on the federation's device."""
        split = self._split(federation, client)
        if not isinstance(split, ClientSplit):
            found = self._items(federation, client, self.max_samples)
            assert found is not None
            return found
        order = torch.randperm(len(split), generator=seeded_generator(self._seed, Purpose.INSPECTED_SAMPLES, client))
        chosen = split.select(order[: self.max_samples].sort().values)
        loader = chosen.loader(max(len(chosen), 1), device=federation.environment.device)
        return loader.tensors()

    def _items(self, federation: Federation, client: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Inputs and classes of some items of a user-defined data set; ``None`` if they are no tensors, or unknown."""
        split, model = self._split(federation, client), federation.clients.model_of(client)
        read = getattr(model.user_module, "classes_of_batch", None)  # of a user's module whose features are known
        if read is None or not isinstance(split, ItemSplit) or isinstance(split, StreamSplit):
            return None
        order = torch.randperm(len(split), generator=seeded_generator(self._seed, Purpose.INSPECTED_SAMPLES, client))
        places = split.indices[order[:count].sort().values].tolist()
        with torch_seed(derive_seed(self._seed, Purpose.INSPECTED_SAMPLES, client)):  # of random transforms
            source = split.source
            batch = Fetch(source.dataset, source.collate, source.by)(places)
        if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
            return None
        device = federation.environment.device
        return batch[0].to(device), read(batch).to(device)

    def common_samples(self, federation: Federation, count: int) -> tuple[Tensor, Tensor]:
        """Inputs of at most ``count`` samples of all clients, in equal shares, with their classes in the data."""
        share = -(-count // len(self.clients))
        inputs, labels = [], []
        for client in self.clients:
            x, y = self.samples(federation, client)
            order = _order_of(federation, client)
            y = y if order is None else order.argsort().to(y.device)[y]
            inputs.append(x[:: max(1, len(x) // share)][:share])
            labels.append(y[:: max(1, len(y) // share)][:share])
        return torch.cat(inputs)[:count], torch.cat(labels)[:count]

    def representations(self, federation: Federation, common: int = 0) -> Iterator[Representations]:
        """Yield each client's representations of its own samples, or of ``common`` samples of all clients.

        A client whose representations are not finite is left out with a warning.
        """
        shared = self.common_samples(federation, common) if common else None
        for client, model in federation.client_models(self.clients):
            inputs, labels = shared or self.samples(federation, client)
            found = represent(federation, client, model, inputs)
            broken = [name for name, values in found.items() if not bool(values.isfinite().all())]
            if broken:
                warnings.warn(
                    f"{named_clients([client], names_of(federation.data))}, round {federation.round + 1}: "
                    f"{', '.join(broken)} not finite, left out of the "
                    "inspection; lower the learning rate, clip the gradient, or look at this client's data",
                    stacklevel=2,
                )
            else:
                yield Representations(client, found, labels.cpu())


def names_of_classes(federation: Federation) -> list[str]:
    """A name for each class of the clients; numbers where the data do not know them."""
    data: Any = federation.data
    known, count = list(data.class_names), federation.clients.models[0].num_classes
    return [str(name) for name in (known if len(known) >= count else range(count))]


@torch.no_grad()
def represent(
    federation: Federation,
    client: int,
    model: FederatedClient,
    inputs: Tensor,
    read: Callable[[Tensor], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Representations of inputs by one client's model.

    Args:
        federation: The federation, for device, precision and seed.
        client: Id of the client.
        model: The client's model, in evaluation mode.
        inputs: Samples on the device, shape (n, ...).
        read: Function from features (B, d) to named outputs; ``None`` for the model's representations.

    Returns:
        Outputs by name, shape (n, d) each, float32 on the CPU.
    """
    read = read or model.representations
    environment = federation.environment
    found: dict[str, list[Tensor]] = {}
    with torch_seed(derive_seed(federation.seed, Purpose.INSPECTION, client)), environment.precision.forward_context():
        for chunk in inputs.split(AT_ONCE):
            features = model.encoder(environment.precision.convert_input(chunk))
            for name, values in read(features).items():
                found.setdefault(name, []).append(values.flatten(start_dim=1).to("cpu", torch.float32))
    return {name: torch.cat(values) for name, values in found.items()}
