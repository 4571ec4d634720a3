"""The tables of docs/drop_in.md and docs/drop_in_options.md, compared with what the package does.

Methods are compared with their flags, options of the Trainer and callbacks with what is done with them.
"""

import inspect
import re
from pathlib import Path

import lightning as L
import pytest
from _helpers.toy import quiet_trainer
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import timer
from lightning.pytorch.profilers import SimpleProfiler

from pfl_lightning import TrainerEngine
from pfl_lightning.drop_in.outer.handed_in import HANDED, HandedOptions, sort_callbacks
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import check_options, refuse_callback
from pfl_lightning.methods import ADAPTER_METHODS
from pfl_lightning.methods import METHODS as PLAIN_METHODS

DOCS = Path(__file__).parents[2] / "docs"
METHODS = (*PLAIN_METHODS, *ADAPTER_METHODS)
NAME = re.compile(r"`(\w+)`")


def rows(page, first):
    """The rows of the table whose first column is called so: the texts of the first column and of the rest."""
    table = rf"^\| {re.escape(first)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)"
    [block] = re.findall(table, (DOCS / page).read_text(), re.MULTILINE)
    return [tuple(line.strip("| ").split(" | ", 1)) for line in block.splitlines()]


def named_in(first):
    """Of a table of options: names in the first column, with the text of the second."""
    return {name: text for names, text in rows("drop_in_options.md", first) for name in NAME.findall(names)}


def named(chosen):
    return {method.__name__ for method in METHODS if chosen(method)}


def test_every_method_is_in_the_row_of_its_flags():
    plain, on_features, self_supervised, refused = (set(NAME.findall(text)) for _, text in rows("drop_in.md", "kind"))
    assert plain == named(lambda method: method.model_agnostic)
    assert on_features == named(lambda method: method.feature_based and method.steps_on_modules)
    assert self_supervised == named(lambda method: method.feature_based and not method.steps_on_modules)
    assert refused == named(lambda m: not (m.model_agnostic or m.feature_based))
    assert not named(lambda method: method.model_agnostic and method.feature_based)


# A value of each option that says something.
VALUES = {
    "max_epochs": 3,
    "min_epochs": 1,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 2,
    "limit_train_batches": 2,
    "limit_val_batches": 3,
    "limit_test_batches": 0.5,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
    "fast_dev_run": 2,
    "max_time": "00:00:10:00",
    "overfit_batches": 2,
    "max_steps": 7,
    "min_steps": 7,
    "reload_dataloaders_every_n_epochs": 2,
    "val_check_interval": 0.5,
    "detect_anomaly": True,
    "deterministic": "warn",
    "benchmark": False,
    "precision": "bf16-mixed",
    "profiler": SimpleProfiler(),
}
OPTIONS = named_in("`Trainer(...)`")


def test_the_table_has_every_option_that_is_handed_on():
    assert OPTIONS.keys() == VALUES.keys()
    assert OPTIONS.keys() <= inspect.signature(L.Trainer).parameters.keys()
    assert HANDED.keys() <= OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_an_option_is_refused_or_handed_on_as_the_table_says(name):
    options = {name: VALUES[name]} | ({"gradient_clip_val": 0.5} if name == "gradient_clip_algorithm" else {})
    trainer = quiet_trainer(options.pop("max_epochs", 1), **options)
    engine, handed = TrainerEngine(), HandedOptions()
    before = dict(vars(engine))
    handed.hand_in(trainer, engine)
    changed = {option for option, value in vars(engine).items() if value != before[option]}
    says = OPTIONS[name]
    if says.startswith("refused"):
        [instead] = set(NAME.findall(says)) & {"min_epochs", "check_val_every_n_epoch", "current_epoch"} or [
            re.search(r"TrainerEngine\((\w+)=", says)[1]
        ]
        with pytest.raises(ConfigurationError, match=instead):
            check_options(trainer, "federate")
        return
    check_options(trainer, "federate")
    handed.give_back()
    expected = {name} if name in HANDED else set()
    if name == "fast_dev_run":
        expected = {option for option in HANDED if option.startswith("limit_")}
    assert changed == expected | (options.keys() & HANDED.keys())
    assert vars(engine) == before


CALLBACKS = named_in("callback")


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.filterwarnings("ignore")
def test_a_callback_is_where_the_table_says(name):
    kind = getattr(of_lightning, name, None) or getattr(timer, name, None)
    if kind is None:
        pytest.skip(f"this version of Lightning has no {name}")
    callback = kind.__new__(kind)  # what is done with it depends on its class
    callback._make_pruning_permanent = True
    says = CALLBACKS[name]
    if says.startswith("refused"):
        with pytest.raises(ConfigurationError, match=name):
            sort_callbacks([callback], True) if "local_callbacks" in says else refuse_callback(callback, "Federation")
        return
    inside = sort_callbacks([callback], gives_trainer=True)
    assert inside == ([callback] if says.startswith("inside") else [])
    assert says.startswith(("inside", "outside"))
