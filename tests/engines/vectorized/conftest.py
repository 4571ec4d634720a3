"""Fixtures of the tests of vectorized evaluations."""

import logging

import pytest

from pfl_lightning.engines.vectorized import engine as vectorized
from pfl_lightning.engines.vectorized import evaluation as _vectorized_evaluation


@pytest.fixture
def said(caplog):
    """The lines that the engine logged."""
    caplog.set_level(logging.WARNING, logger=vectorized.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == vectorized.__name__]


@pytest.fixture
def stacked(monkeypatch):
    """Numbers of clients that were scored together, each time."""
    sizes = []

    def counted(client, members, environment, start=_vectorized_evaluation.score_stack):
        sizes.append(len(members))
        return start(client, members, environment)

    monkeypatch.setattr(_vectorized_evaluation, "score_stack", counted)
    return sizes
