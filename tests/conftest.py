"""What all tests share."""

import gc
import signal
import zlib
from collections import Counter

import pytest
import torch

# Lightning's remarks on ordinary training, and on folders that a resumed run finds in use.
NOISE = (
    "ignore:.*treespec, LeafSpec.*",
    "ignore:.*exists and is not empty",
    "ignore:.*callbacks used to create the checkpoint need to be provided",
    "ignore:.*but have no logger configured",
    "ignore:.*no pre-optimization state was saved",
    "ignore:.*resuming from a checkpoint that ended before the epoch ended",
)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    gc.disable()  # until all modules are imported
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; tests interrupt what they start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in NOISE:
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave two thirds of the cases of a test marked ``repeated`` to ``-m slow``, unless ``-k`` asks for some."""
    if config.option.keyword:
        return
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("repeated"):
            name = item.nodeid.partition("[")[0]
            if (seen[name] + zlib.crc32(name.encode())) % 3:  # the thirds of two tests differ
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def pytest_collection_finish() -> None:
    """Leave what is there for good, millions of objects of modules and items, out of further garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the seed, the global random state or the demand for determinism that another one left behind."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)  # which a Trainer sets for good
