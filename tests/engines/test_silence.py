"""Inner Trainers are silent, and what they are silent by is undone."""

import logging
import warnings

import pytest

from pfl_lightning.engines.trainer import LOGGERS, silence


@pytest.fixture
def levels():
    """Levels of Lightning's loggers, which are put back."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]
    yield lambda: [logger.level for logger in loggers]
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_notices_are_kept_back_and_errors_come_through(levels, caplog, monkeypatch):
    child = logging.getLogger(f"{LOGGERS[0]}.utilities.rank_zero")
    monkeypatch.setattr(logging.getLogger(LOGGERS[0]), "propagate", True)
    logging.getLogger(LOGGERS[0]).setLevel(logging.INFO)
    logging.getLogger(LOGGERS[3]).setLevel(logging.DEBUG)
    before = levels()
    child.info("before")  # what is enabled is remembered by loggers
    with silence():
        child.info("inside")
        child.error("wrong")
        with silence():
            child.warning("deep inside")
        child.warning("inside")
        warnings.warn("not seen", stacklevel=1)
    child.info("after")
    assert [record.message for record in caplog.records] == ["before", "wrong", "after"]
    assert levels() == before
