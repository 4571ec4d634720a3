"""Fixtures of the tests of vectorized evaluations."""

import logging

import pytest

from pfl_lightning.engines import VectorizedEngine


@pytest.fixture
def said(caplog):
    """The lines that the engine logged."""
    caplog.set_level(logging.WARNING, logger=VectorizedEngine.__module__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == VectorizedEngine.__module__]


@pytest.fixture
def tuned(monkeypatch):
    """Numbers of clients that were trained, or fine-tuned, together, each time."""
    sizes = []

    def counted(self, *args, start=VectorizedEngine.train_stack):
        sizes.append(len(args[1].members))
        return start(self, *args)

    monkeypatch.setattr(VectorizedEngine, "train_stack", counted)
    return sizes
