"""Plain attributes that local fits change: each client's own over its rounds, and in its evaluations."""

from collections import Counter, OrderedDict, deque
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from _helpers.plain import RoundsAsEpochs, named
from _helpers.project import Data, Net, run_project
from _helpers.toy import SEED, Toy, assert_same, quiet_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pfl_lightning import FederatedLoop, RayEngine, SequentialEngine, TrainerEngine
from pfl_lightning.drop_in.client.remembered import LOST, MISSING, changes, packed, unpacked
from pfl_lightning.drop_in.client.transient import Transient
from pfl_lightning.methods import FD, Ditto, FedAMP, FedAvg, FedProto, LocalOnly

ROUNDS = 3
ONE = ([0] * 6 + [1] * 5 + [2] * 8,)
NOT_KEPT = "are not kept for the client's next"


class Schedule:
    """A helper that is no layer."""

    def __init__(self) -> None:
        self.weight, self.inner = 0.1, {"steps": 0, "levels": [1.0]}

    def step(self) -> None:
        self.weight *= 1.1
        self.inner["steps"] += 1
        self.inner["levels"].append(self.weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Annealed(Net):
    """Anneals numbers in every place that plain Python has, and lets its loss depend on them."""

    def __init__(self, kl: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.temperature, self.stage, self.schedule, self.layer = 2.0, "warm", Schedule(), Layer()
        self.recent, self.seen, self.center = deque(maxlen=3), set(), torch.zeros(2)
        self.gain, self.counts = np.float32(1), np.zeros(3, dtype=np.int64)

    def training_step(self, batch, batch_idx):
        self.schedule.step()
        self.layer.calls += 1
        self.late = getattr(self, "late", 0) + 1
        self.recent.append(float(batch[0].sum()))
        self.seen.add(int(batch[1][0]))
        self.center += batch[0].mean(0)[:2]
        self.gain = np.float32(self.gain * 1.01)
        self.counts[batch_idx % 3] += 1
        self.hparams.kl *= 0.9
        known = self.schedule.weight + sum(self.recent) + len(self.seen) + self.center.sum() + float(self.gain)
        known = known + self.counts.std() + self.hparams.kl + self.late + self.layer.calls + len(self.stage)
        return super().training_step(batch, batch_idx) / self.temperature * (1 + 0.1 * torch.tanh(known))

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.9
        self.stage = "main"

    def validation_step(self, batch, batch_idx):
        self.log("temperature", self.temperature)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_rounds_of_one_client_are_epochs_of_a_plain_run(engine, epochs, caplog):
    data = Data(Toy(ONE, validation=3, test=3))
    options = {"cohorts": [[0]], "optimizer_state": "keep", "epochs": epochs, "engine": engine()}
    federation, _ = run_project(FedAvg, ROUNDS, module=Annealed(), data=data, **options)
    plain = Annealed()
    loader = RoundsAsEpochs(Toy(ONE, validation=3, test=3), 0, ROUNDS, epochs)
    quiet_trainer(ROUNDS * epochs).fit(plain, train_dataloaders=loader)
    assert_same(named(federation.global_model()), named(plain))
    own = federation.client_model(0)
    for name in ("temperature", "stage", "recent", "seen", "late", "gain"):
        assert getattr(own, name) == getattr(plain, name)
    assert vars(own.schedule) == vars(plain.schedule)
    assert own.hparams.kl == plain.hparams.kl
    assert own.layer.calls == plain.layer.calls
    assert not [message for message in caplog.messages if NOT_KEPT in message]


COHORTS = ([0, 1, 3], [1, 2], [1, 3])
FITS = [1, 3, 1, 2, 0]


def models(method=FedAvg, **options):
    options = {"module": Annealed(), "cohorts": COHORTS, "monitor": "temperature", **options}
    return run_project(method, ROUNDS, **options)


@pytest.mark.parametrize("method", [FedAvg, Ditto, LocalOnly])
def test_each_client_has_its_own_also_in_evaluations(method):
    federation, trainer = models(method)
    expected = [2 * 0.9**fits for fits in FITS]
    assert [federation.client_model(k).temperature for k in range(5)] == pytest.approx(expected)
    assert float(trainer.callback_metrics["temperature/min"]) == pytest.approx(min(expected))
    assert float(trainer.callback_metrics["temperature/max"]) == 2.0  # of the client that never trained
    assert federation.global_model().temperature == 2.0


def test_restart_lets_them_start_again():
    federation, _ = models(schedule="restart", optimizer_state="keep")
    assert [federation.client_model(k).temperature for k in range(5)] == [2.0] * 5


@pytest.mark.slow
def test_they_travel_to_workers():
    here, trainer = models(engine=TrainerEngine())
    there, other = models(engine=RayEngine(workers=1, start_timeout=400.0, engine=TrainerEngine()))
    assert_same(named(there.global_model()), named(here.global_model()))
    assert trainer.callback_metrics["temperature/mean"] == other.callback_metrics["temperature/mean"]


@pytest.mark.parametrize("spilled", [False, True])
def test_a_resumed_run_has_them(tmp_path, spilled):
    def fit(rounds, **call):
        loop = FederatedLoop(0.5, method=FedAvg, num_clients=4, seed=SEED)
        trainer = quiet_trainer(rounds, loop)
        trainer.fit(Annealed(), Data(), **call)
        return trainer, loop.federation

    trainer, first = fit(1)
    if spilled:
        first.clients.resume_states.rows.move_to_disk(str(tmp_path))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, whole = fit(ROUNDS)
    _, resumed = fit(ROUNDS, ckpt_path=tmp_path / "last.ckpt")
    assert_same(named(resumed.global_model()), named(whole.global_model()))
    for client in range(4):
        assert resumed.client_model(client).temperature == whole.client_model(client).temperature
        assert resumed.clients.attributes(client) == whole.clients.attributes(client)


def test_a_client_that_is_left_out_keeps_what_it_had():
    class Failing(Annealed):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (torch.nan if self.late > 6 else 1)  # in the second round of the larger clients

    federation, _ = run_project(FedAvg, 2, module=Failing(), cohorts=[range(5)] * 2)
    temperatures = [federation.client_model(k).temperature for k in range(5)]
    assert temperatures == pytest.approx([2 * 0.9**fits for fits in (2, 1, 1, 1, 2)])


class Counting(Net):
    """Notes outside of itself what it begins its fits with."""

    begun: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_start(self) -> None:
        self.begun.append(self.steps)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", [FedAvg, FedAMP, FedProto, FD])
def test_a_fit_begins_with_the_client_s_own(method):
    Counting.begun.clear()
    run_project(method, 2, module=Counting(), head="fc", cohorts=[range(5)] * 2)
    assert Counting.begun == [0] * 5 + [3, 5, 4, 4, 2]  # batches of each client


class Holding(Net):
    history: ClassVar[list[float]] = []
    fits = 0

    def __init__(self) -> None:
        super().__init__()
        self.long, self.helpers, self.rng = [], [], torch.Generator()
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.long.extend([0.0] * 6000)
        self.helpers.append(Schedule())
        self.steps += 1
        Holding.history.append(1.0)
        return super().training_step(batch, batch_idx)


def test_what_is_not_kept_and_what_the_class_shares_is_named_once(caplog):
    run_project(FedAvg, 2, module=Holding(), cohorts=[range(5)] * 2)
    (message,) = [message for message in caplog.messages if NOT_KEPT in message]
    assert "attributes of Holding that" in message
    assert "next fit: long, helpers. Each local fit" in message
    assert "steps" not in message.partition("Each local fit")[0]
    (message,) = [message for message in caplog.messages if "a class attribute" in message]
    assert "has changed Holding.history, a class attribute that all clients share" in message
    assert "in __init__ (self.history = ...)" in message


def test_a_module_that_changes_nothing_hands_on_nothing():
    federation, _ = run_project(FedAvg, 1, module=Net(), cohorts=[range(5)])
    assert [federation.clients.attributes(k) for k in range(5)] == [b""] * 5


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary()
KEYS = st.integers() | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES | KEYS.map(lambda key: frozenset([key])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=6,
)


def shown(value):
    """As ``repr``, which tells 1 from True, but with the elements of sets in order."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(repr, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(repr(key), shown(each)) for key, each in value.items()]}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value).__name__}{[shown(each) for each in value]}{getattr(value, 'maxlen', '')}"
    return repr(value)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value):
    changed = dict(changes(value, MISSING, ("name",)))
    ((network,),) = [[one] for one in unpacked(packed([{"layer": changed}]))]
    found = network["layer"]["name",]
    assert shown(found) == shown(value)
    assert not list(changes(found, value, ("name",)))


def test_tensors_and_arrays_come_back():
    module = Net()
    inner = module.inner = Layer()
    inner.values = {"t": torch.zeros(2, dtype=torch.float64), "a": np.zeros((2, 2), dtype=np.float32), "s": np.int8(1)}
    transient = Transient(module)
    inner.values["t"] = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    inner.values["a"][0, 1] = 3
    inner.values["s"] = np.int8(7)
    content = packed([transient.changes(module)])
    transient.restore(module)
    assert inner.values["a"][0, 1] == 0
    transient.recall(module, unpacked(content)[0])
    assert inner.values["t"].dtype == torch.float64
    assert inner.values["t"][0] == 1
    assert inner.values["a"].dtype == np.float32
    assert inner.values["a"].tolist() == [[0, 3], [0, 0]]
    assert isinstance(inner.values["s"], np.int8)


def test_objects_that_several_layers_have_stay_one():
    module = Net()
    module.schedule, module.layer = Schedule(), Layer()
    module.layer.schedule = module.schedule
    transient = Transient(module)
    module.schedule.step()
    content = packed([transient.changes(module)])
    transient.restore(module)
    transient.recall(module, unpacked(content)[0])
    assert module.layer.schedule is module.schedule
    assert module.schedule.inner == {"steps": 1, "levels": [1.0, 0.1 * 1.1]}


def test_objects_whose_comparison_is_a_table_are_compared_whole():
    texts = [np.array(["a", word], dtype=object) for word in ("b", "b", "c")]
    pandas = pytest.importorskip("pandas")
    tables = [pandas.DataFrame({"x": [1.0, value]}) for value in (np.nan, np.nan, 2.0)]
    for first, same, other in (texts, tables):
        assert not list(changes(same, first, ("name",)))
        ((path, value),) = changes(other, first, ("name",))
        assert (path[0], value) == ("name", LOST)


@pytest.mark.parametrize("form", [torch.Tensor.to_sparse, nn.Parameter], ids=["sparse", "parameter of no layer"])
def test_tensors_that_are_not_kept_are_named(form):
    first, same, other = (form(torch.tensor([0.0, value])) for value in (1.0, 1.0, 2.0))
    assert not list(changes(same, first, ("name",)))
    assert list(changes(other, first, ("name",))) == [(("name",), LOST)]


class Elementwise:
    """An object without attributes whose comparison is an array."""

    __slots__ = ("values",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: float) -> None:
        self.values = np.array([1.0, value])

    def __eq__(self, other: Any) -> Any:
        return self.values == other.values

    def __ne__(self, other: Any) -> Any:
        return self.values != other.values


class Tolerant:
    """An object whose ``equals`` takes something else than a table's does."""

    def __init__(self, value: float) -> None:
        self.value = value

    def equals(self, other: Any, tolerance: float) -> bool:
        return abs(self.value - other.value) < tolerance


def nested(value: float) -> Any:
    array = np.empty(2, dtype=object)
    array[:] = [np.array([1.0, value]), np.array([1.0, 2.0, 3.0])]
    return array


@pytest.mark.parametrize("make", [Elementwise, Tolerant, nested])
def test_objects_whose_comparison_has_no_truth_value_end_no_fit(make):
    assert list(changes(make(3.0), make(2.0), ("name",))) == [(("name",), LOST)]


class Mode(Enum):
    WARM = 1
    COLD = 2


def test_the_member_of_an_enumeration_is_named_and_no_member_is_changed():
    module = Net()
    module.mode = Mode.WARM
    assert list(changes(Mode.COLD, module.mode, ("mode",))) == [(("mode",), LOST)]
    transient = Transient(module)
    module.mode = Mode.COLD
    found = transient.changes(module)
    transient.restore(module)
    transient.recall(module, found)
    assert module.mode is Mode.WARM
    assert [mode.value for mode in Mode] == [1, 2]
