"""A Dataset that changes while it trains is each client's own, although clients share it."""

import lightning as L
import pytest
from _helpers.curriculum import ByAttribute, ByDataModule, ByHand, Curriculum, Items, Taught, Wrapped
from _helpers.toy import GivenCohorts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfl_lightning import ProcessEngine, SequentialEngine, TrainerEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.datamodules.adapters.workers import nested_datasets, plain_values, set_values
from pfl_lightning.methods import FedAvg, FedRep

pytestmark = pytest.mark.filterwarnings("ignore")


class Seen(L.Callback):
    """The mean level and number of names in each epoch of the outer Trainer."""

    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.values.append(tuple(float(trainer.callback_metrics[name]) for name in ("level", "names")))


def fit(module, data, loop=(), epochs=3, ckpt_path=None, save=None):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, callbacks=[*loop, seen := Seen()], **quiet)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return seen.values


def loop(clients=3, method=FedAvg, **options):
    return [FederatedLoop(method=method, num_clients=clients, **options)]


PLAIN = [(1, 2), (2, 3), (3, 4)]


def test_a_plain_run_advances_once_an_epoch():
    assert fit(Taught(), Items(Curriculum())) == PLAIN


@pytest.mark.parametrize("module", [Taught, ByAttribute, ByDataModule])
@pytest.mark.parametrize("clients", [1, 3])
def test_each_client_advances_its_own(module, clients):
    items = Curriculum()
    assert fit(module(), Items(items), loop(clients)) == PLAIN
    assert clients == 1 or (items.level, items.names) == (0, ["easy"])  # as before the fit


def test_a_dataset_inside_of_another():
    assert fit(Taught(), Items(Wrapped(Curriculum())), loop()) == PLAIN


def test_without_a_trainer():
    items = Curriculum()
    assert fit(ByHand(items), Items(items), loop(engine=SequentialEngine())) == PLAIN


def test_workers_of_the_loader_are_told():
    assert fit(Taught(), Items(Curriculum(), workers=1), loop()) == PLAIN


def test_worker_processes_of_an_engine():
    assert fit(Taught(), Items(Curriculum()), loop(engine=ProcessEngine(2, engine=TrainerEngine()))) == PLAIN


def test_clients_come_as_far_as_their_own_rounds():
    made = GivenCohorts([0, 1], [1], [0, 1, 2], method=FedAvg, num_clients=3)
    assert fit(Taught(), Items(Curriculum()), [made]) == [(1, 2), (2, 3), (2, 3)]  # then 2, 3 and 1 of equal parts


def test_a_resumed_run_goes_on(tmp_path):
    path = tmp_path / "last.ckpt"
    fit(Taught(), Items(Curriculum()), loop(), epochs=2, save=path)
    assert fit(Taught(), Items(Curriculum()), loop(), ckpt_path=path) == PLAIN[2:]


def test_what_starts_again_starts_with_the_first():
    assert fit(Taught(), Items(Curriculum()), loop(schedule="restart", epochs=2)) == [(2, 3)] * 3


def test_phases_advance_each_by_itself():
    assert fit(Taught(), Items(Curriculum()), loop(method=FedRep, head="head", head_epochs=1)) == PLAIN


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)
attributes = st.dictionaries(st.sampled_from(["level", "names", "seen", "files"]), plain)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(attributes, attributes)
def test_values_come_back_whatever_has_changed(first, changed):
    items = Wrapped(Curriculum())
    vars(items.inside).update(first)
    every, opened = list(nested_datasets(items)), object()
    before = plain_values(every)
    vars(items.inside).clear()
    vars(items.inside).update(changed, handle=opened, content=["a.png"] * 1000)
    set_values(every, before)
    assert plain_values(every) == before
    assert items.inside.handle is opened
    assert len(items.inside.content) == 1000
