"""Warnings of local fits and evaluations are shown once, with their client; Lightning's notices of Trainers are not."""

import logging
import os
import types
import warnings
from functools import partial

import lightning as L
import pytest
from _helpers.process_helpers import forked_process_engine
from _helpers.project import Net, run_project
from _helpers.toy import run
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.client import FitContext
from pfl_lightning.engines.base import naming_clients
from pfl_lightning.methods import FedAvg
from pfl_lightning.notices import forget_shown, named_clients, silence

ENGINES = {
    "sequential": lambda patch: SequentialEngine(),
    "trainer": lambda patch: TrainerEngine(),
    "vectorized": lambda patch: VectorizedEngine(forward="vmap"),
    "processes": lambda patch: forked_process_engine(patch),
}


class OddWarning(UserWarning):
    def __init__(self, number, unit):
        super().__init__(f"{number} {unit}")


class Warns(FedAvg):
    def make_update(self, context, before):
        warnings.warn("a client's own", stacklevel=2)  # as if it were of the caller's line
        warnings.warn(f"of round {context.round}", RuntimeWarning, stacklevel=1)
        return super().make_update(context, before)


class Talks(Net):
    def training_step(self, batch, batch_idx):
        warnings.warn("in a step", stacklevel=1)
        warnings.warn("as if Lightning had said it", stacklevel=2)
        rank_zero_info("told by a step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        warnings.warn("in a validation", FutureWarning, stacklevel=1)
        super().validation_step(batch, batch_idx)


def said(action, go):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        go()
    return [str(warning.message) for warning in caught]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux or macOS")
@pytest.mark.parametrize("action", ["default", "always"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_warning_is_shown_once_with_its_client(name, action, monkeypatch):
    engine = ENGINES[name](monkeypatch)
    texts = said(action, lambda: run(partial(Warns, lr=0.05, epochs=1), 2, engine=engine))
    first = [text for text in texts if text.endswith("a client's own")]
    assert len(first) == 1
    assert first[0].startswith("client ")
    assert first[0].endswith(", round 1: a client's own")
    others = [text for text in texts if "of round" in text]
    assert [text[-len("of round 0") :] for text in others] == ["of round 0", "of round 1"]


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_module_s_warnings_come_through_and_those_of_lightning_do_not(engine):
    texts = said("default", lambda: run_project(FedAvg, 2, module=Talks(), engine=engine()))
    for text in ("in a step", "in a validation", "as if Lightning had said it"):
        assert [each for each in texts if each.endswith(text)] == [f"client 0, round 1: {text}"]
    others = [text for text in texts if "client" in text and "in a" not in text and "as if" not in text]
    assert not others


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_filters_of_the_user_apply(engine):
    def ignored():
        warnings.filterwarnings("ignore", "in a step")
        run_project(FedAvg, 1, module=Talks(), engine=engine())

    texts = said("default", ignored)
    assert not [text for text in texts if "in a step" in text]
    assert [text for text in texts if "in a validation" in text]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "in a step")
        with pytest.raises(UserWarning, match=r"^in a step\n"):
            run_project(FedAvg, 1, module=Talks(), engine=engine())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux or macOS")
def test_filters_of_the_user_apply_in_workers(monkeypatch):
    engine = forked_process_engine(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "of round 0")
        with pytest.raises(RuntimeWarning, match=r"^of round 0\n") as caught:
            run(partial(Warns, lr=0.05, epochs=1), 1, engine=engine)
    assert any("in the local fit of client" in note for note in caught.value.__notes__)


def test_the_traceback_of_an_anomaly_is_shown():
    class Anomaly(Net):
        def training_step(self, batch, batch_idx):
            distance = (self(batch[0]) * 0).sum()
            return F.cross_entropy(self(batch[0]), batch[1]) + distance.sqrt() * 0  # a gradient of 0 * inf

    def go():
        with pytest.raises(RuntimeError, match="returned nan values"):
            run_project(FedAvg, 1, module=Anomaly(), engine=TrainerEngine(), trainer={"detect_anomaly": True})

    texts = [text for text in said("default", go) if "Traceback of forward call" in text]
    assert texts
    assert "distance.sqrt()" in texts[0]
    assert texts[0].startswith("client 0, round 1: ")


def test_another_fit_shows_them_again():
    def go():
        for _ in range(2):
            run(partial(Warns, lr=0.05, epochs=1), 1, engine=SequentialEngine())

    assert len([text for text in said("always", go) if "a client's own" in text]) == 2


def test_categories_are_kept_and_a_category_with_arguments_of_its_own_is_shown():
    forget_shown()
    with warnings.catch_warnings(record=True) as caught, naming_clients(FitContext(3, 1, None), FitContext(5, 1, None)):
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            warnings.warn(OddWarning(3, "m"), stacklevel=1)
    found = {(warning.category, str(warning.message)) for warning in caught}
    assert found == {(DeprecationWarning, "clients 3, 5, round 2: old"), (OddWarning, "3 m")}
    assert len(caught) == 2
    assert named_clients(range(8)) == "clients 0, 1, 2, 3, 4 and 3 more"


def test_what_a_step_changes_in_showing_warnings_stays():
    before = warnings.showwarning
    try:
        with naming_clients(FitContext(0, 0, None)):
            warnings.showwarning = other = lambda *args: None
        assert warnings.showwarning is other
    finally:
        warnings.showwarning = before


def messages(caplog):
    """What was logged, once also where pytest listens at a logger and at the root."""
    return [record.getMessage() for record in dict.fromkeys(caplog.records)]


def test_notices_of_trainers_are_kept_back(caplog, monkeypatch):
    lightning = types.ModuleType("lightning.pytorch.trainer.made_up")
    code = "def warn(warnings, text): warnings.warn(text, stacklevel=1)"
    exec(compile(code, os.path.join(os.path.dirname(L.__file__), "made_up.py"), "exec"), vars(lightning))
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)

    def go():
        with silence():
            L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)  # logs what it has found
            rank_zero_info("the user's own")
            lightning.warn(warnings, "The 'train_dataloader' does not have many workers which may be a bottleneck.")
            lightning.warn(warnings, "Trying to infer the `batch_size` from an ambiguous collection.")
            warnings.warn("This queue does not have many workers", stacklevel=1)

    with caplog.at_level(logging.INFO):
        texts = said("default", go)
        assert messages(caplog) == ["the user's own"]
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert any("GPU available" in message for message in caplog.messages)
    assert texts == [
        "Trying to infer the `batch_size` from an ambiguous collection.",
        "This queue does not have many workers",
    ]


def test_levels_of_loggers_are_the_user_s(caplog, monkeypatch):
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    seen = []

    class Notes(Net):
        def on_train_start(self):
            seen.append((logger.level, logging.getLogger("lightning.pytorch.trainer").isEnabledFor(logging.DEBUG)))

    with caplog.at_level(logging.DEBUG, "lightning.pytorch"):
        run_project(FedAvg, 1, module=Notes(), engine=TrainerEngine())
    assert set(seen) == {(logging.DEBUG, True)}
    assert any("fit loop" in message or "Trainer" in message for message in caplog.messages)
    assert sum("stopped" in message for message in messages(caplog)) == 1  # of the outer Trainer


def test_a_plain_trainer_afterwards_says_what_it_says():
    before = list(warnings.filters)
    run_project(FedAvg, 1)
    assert list(warnings.filters) == before
