"""Fixtures of the tests of vectorized evaluations."""

import logging

import pytest

from pfl_lightning.engines import VectorizedEngine
from pfl_lightning.engines.vectorized import evaluation


@pytest.fixture
def said(caplog):
    """The lines that the engine logged."""
    caplog.set_level(logging.WARNING, logger=VectorizedEngine.__module__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == VectorizedEngine.__module__]


@pytest.fixture
def stacked(monkeypatch):
    """Numbers of clients that were scored together, each time."""
    sizes = []

    def counted(client, members, environment, start=evaluation.score_stack):
        sizes.append(len(members))
        return start(client, members, environment)

    monkeypatch.setattr(evaluation, "score_stack", counted)
    return sizes
