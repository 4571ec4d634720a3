"""Modules that nobody of this project wrote: federated by one line, and one client with all data as the plain run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _helpers.foreign import PROJECTS
from _helpers.foreign.project import Project, Reseeded, differing, federated_run, one_client_run, plain_run, quiet

from pfl_lightning.methods import FedAvg, FedPer

each = pytest.mark.parametrize(
    "project", [pytest.param(p, id=p.id, marks=[pytest.mark.slow] if p.slow else []) for p in PROJECTS]
)


@pytest.fixture(autouse=True)
def _silent():
    with quiet():
        yield


@contextmanager
def expected_to_fail(reason: str) -> Iterator[None]:
    """What fails today is to be seen when it works: then its reason is to be taken out of the project."""
    try:
        yield
    except Exception:
        if reason:
            pytest.xfail(reason)
        raise
    if reason:
        pytest.fail(f"this works now: remove it from the project and the table in docs/drop_in_projects.md ({reason})")


@each
def test_federated_by_one_line(project: Project, tmp_path):
    project.skip_without()
    with expected_to_fail(project.fails):
        for method in [FedAvg, FedPer] if project.head else [FedAvg]:
            federation, trainer = federated_run(project, tmp_path / method.__name__, method)
            assert trainer.current_epoch == 2
            if project.monitor is not None:
                assert trainer.checkpoint_callback.best_model_score is not None
            trained = differing(project.made()[0], federation.global_model())
            of_head = [name for name in trained if name.startswith(f"{project.head}.")]
            assert len(trained) > len(of_head), "nothing was trained"
            assert bool(of_head) == (bool(project.head) and method is FedAvg), "another layer was taken for the head"


@pytest.mark.repeated
@each
def test_one_client_with_all_data_is_the_plain_run(project: Project):
    project.skip_without()
    expected = plain_run(project, 2, Reseeded())
    assert differing(project.made()[0], expected), "nothing was trained"
    with expected_to_fail(project.fails or project.differs):
        for found in one_client_run(project, epochs=2):
            assert differing(expected, found) == []
