"""Nothing of one client reaches another but what the method sends."""

import copy
import threading
from typing import Any

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, LocalOnly


class Remembering(Net):
    """Keeps what it has seen in every place that Python has, and lets its loss depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.by_class = 0, [], {"sums": torch.zeros(1)}
        self.register_buffer("queue", torch.zeros(3), persistent=False)
        self.first_layer = [self.body[0]]
        self.inner = Inner()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.first_layer[0] is self.body[0]
        self.calls += 1
        self.inner.calls += 1
        self.seen.append(float(batch[0].sum()))
        self.by_class["sums"] += batch[0].mean()
        self.queue += batch[0].abs().mean()
        self.late = getattr(self, "late", 0) + 1
        known = self.calls + self.inner.calls + sum(self.seen) + self.by_class["sums"] + self.queue.sum() + self.late
        return super().training_step(batch, batch_idx) * (1 + 0.01 * torch.tanh(known))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("method", [LocalOnly, Ditto])
def test_a_client_does_not_see_who_trained_before_it(engine, method):
    def weights(*cohorts):
        federation, _ = run_project(method, len(cohorts), module=Remembering(), cohorts=cohorts, engine=engine())
        return dict(federation.client_model(3).state_dict())

    alone = weights([3])
    assert_same(weights([0, 1, 3]), alone)
    assert_same(weights([3, 4]), alone)


def test_a_metric_forgets_other_clients():
    class Metered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.meter = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.meter.update(batch[0].mean())  # never logged, never reset
            return super().training_step(batch, batch_idx) * (1 + self.meter.compute().tanh())

    def weights(*cohorts):
        federation, _ = run_project(LocalOnly, module=Metered(), cohorts=cohorts, engine=SequentialEngine())
        return dict(federation.client_model(3).state_dict())

    assert_same(weights([0, 1, 3]), weights([3]))


def test_what_is_restored():
    module = Remembering()
    module.lock, module.data = threading.Lock(), TensorDataset(torch.zeros(3))
    data, lock, layer = module.data, module.lock, module.body[0]
    transient = Transient(module)
    for _ in range(2):
        module.calls, module.added = 5, 1
        module.seen.append(3.0)
        module.queue.add_(1)
        transient.restore(module)
        assert (module.calls, module.seen, module.queue.tolist()) == (0, [], [0.0] * 3)
        assert not hasattr(module, "added")
        assert module.lock is lock  # which cannot be copied
        assert module.data is data
        assert module.first_layer[0] is layer


def test_a_copy_of_a_client_restores_its_own_layers():
    federation, _ = run_project(FedAvg, module=Remembering())
    other = copy.deepcopy(federation.models[0])
    other.module.calls = 7
    other.user_module.recall(b"")
    assert other.module.calls == 0
    assert other.module.first_layer[0] is other.module.body[0] is not federation.models[0].module.body[0]


def test_a_module_that_cannot_be_copied_is_refused():
    module = Remembering()
    module.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"copies of Remembering, but it cannot be copied: .*lock"):
        federate(module, Data(), FedAvg, num_clients=2)


class _Config:
    def __init__(self) -> None:
        self.temperature, self.store = 1.0, {}


class _Head(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config, self.store = config, config.store


class _Sharing(nn.Module):
    """Two layers, and a function that a hook would be, have the same objects."""

    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.head = _Head(self.config)
        self.store, self.seen = self.config.store, []
        store, seen = self.store, self.seen

        def hook() -> None:
            store["features"] = len(store)
            seen.append(1)

        self.hook = [hook]


def test_objects_that_layers_and_functions_share_stay_shared():
    module = _Sharing()
    transient = Transient(module)
    for _ in range(3):
        assert module.config is module.head.config
        assert (module.config.temperature, module.store, module.seen) == (1.0, {}, [])
        module.config.temperature = 2.0
        assert module.head.config.temperature == 2.0
        module.hook[0]()
        assert module.store == {"features": 0}
        assert module.head.store is module.store
        assert module.seen == [1]
        transient.restore(module)


def test_an_attribute_that_was_replaced_is_as_it_was():
    module = _Sharing()
    module.list, module.other = [1, [2]], {"a": 1}
    transient = Transient(module)
    module.list, module.other = [5], [6]
    module.config.temperature = 3.0
    transient.restore(module)
    assert (module.list, module.other, module.config.temperature) == ([1, [2]], {"a": 1}, 1.0)
    module.list[1].append(3)
    transient.restore(module)
    assert module.list == [1, [2]]
