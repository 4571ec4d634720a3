"""In how many rounds each client has trained: counted, kept by checkpoints, written, and told apart in tables."""

import csv
import io
import json
from collections import Counter
from functools import partial

import pytest
from _helpers import resume
from _helpers.project import run_project
from _helpers.results import valid
from _helpers.toy import CLIENTS, GivenCohorts, Toy, quiet_trainer, run, tiny_encoder
from rich.console import Console

from pfl_lightning import Federation
from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.callbacks.run_facts import client_rows
from pfl_lightning.callbacks.tables import fit_table
from pfl_lightning.cli.tables import personalization_table, write_personalization
from pfl_lightning.methods import SCAFFOLD, FedAvg, FedPer, FedRep
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.reading import read_run

COHORTS = [[0, 2], [2, 3], [0, 2]]
EXPECTED = [2, 0, 3, 1, 0]
QUICK = partial(FedAvg, lr=0.1, epochs=1)


def column(path, name="rounds_trained"):
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


@pytest.mark.parametrize("method", [FedAvg, FedRep, SCAFFOLD])
def test_every_update_that_the_server_took_counts(tmp_path, method):
    writer = ResultsWriter(str(tmp_path))
    federation = run(partial(method, lr=0.1, epochs=1), 3, cohorts=COHORTS, callbacks=[writer])
    assert federation.rounds_trained == EXPECTED
    assert federation.never_trained == [1, 4]
    assert valid(tmp_path / "results.json")["rounds_trained"] == EXPECTED
    assert column(tmp_path / "clients.csv") == [str(number) for number in EXPECTED]


class _Silent(FedAvg):
    """Client 3 sends no update that the server could take."""

    def make_update(self, context, before):
        return None if context.client == 3 else super().make_update(context, before)


@pytest.mark.filterwarnings("ignore:left out of the aggregation")
def test_an_update_that_was_left_out_does_not_count(tmp_path):
    federation = run(partial(_Silent, lr=0.1, epochs=1), 3, cohorts=COHORTS)
    assert federation.rounds_trained == [2, 0, 3, 0, 0]
    assert federation.never_trained == [1, 3, 4]


@pytest.mark.filterwarnings("ignore:.*is undone")
def test_a_round_that_is_undone_does_not_count():
    class Loses(FedAvg):
        def configure_aggregator(self, num_clients):
            server = super().configure_aggregator(num_clients)
            aggregate, rounds = server.aggregate, Counter()

            def fails_in_the_second():
                rounds["played"] += 1
                if rounds["played"] == 2:
                    raise ArithmeticError("nothing to divide by")
                aggregate()

            object.__setattr__(server, "aggregate", fails_in_the_second)
            return server

    assert run(partial(Loses, lr=0.1, epochs=1), 3, cohorts=COHORTS).rounds_trained == [2, 0, 2, 0, 0]


def test_a_resumed_run_has_the_counts_of_an_uninterrupted_one(tmp_path):
    method = partial(FedPer, lr=0.1, epochs=1)
    whole = resume.play(tmp_path / "whole", 4, method, cohort=2)
    resume.play(tmp_path / "parts", 2, method, cohort=2)
    again = resume.play(tmp_path / "parts", 4, method, cohort=2, ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert sum(whole.rounds_trained) == 8
    assert again.rounds_trained == whole.rounds_trained
    for name in ("results.json", "clients.csv"):
        one, another = ((tmp_path / folder / name).read_text() for folder in ("whole", "parts"))
        if name.endswith("json"):
            one, another = json.loads(one)["rounds_trained"], json.loads(another)["rounds_trained"]
        assert one == another


def text_of(table):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(table)
    return " ".join(console.file.getvalue().split())


def test_clients_that_never_trained_are_told_apart(tmp_path):
    writer, loop = ResultsWriter(str(tmp_path)), GivenCohorts(*COHORTS)
    trainer = quiet_trainer(3, loop, writer)
    federation, data = Federation(partial(FedPer, lr=0.1, epochs=1), tiny_encoder, seed=1), Toy()
    trainer.fit(federation, datamodule=data)
    assert "2 clients never trained (1, 4; mean" in text_of(fit_table(federation, writer))
    read = read_run(tmp_path)
    assert read.never_trained == (1, 4)

    trainer.test(federation, datamodule=data, verbose=False)
    tested = valid(tmp_path / "test.json")
    assert tested["rounds_trained"] == EXPECTED
    assert column(tmp_path / "test_clients.csv") == [str(number) for number in EXPECTED]

    settings = Personalization(train="head", epochs=1)
    with federation.personalized(settings):
        trainer.test(federation, datamodule=data, verbose=False)
    write_personalization(federation, settings, tmp_path, 3)
    found = valid(tmp_path / "personalized.json")
    assert (found["participating"]["num_clients"], found["never_trained"]["num_clients"]) == (3, 2)
    scores = [float(value) for value in column(tmp_path / "personalized.csv", "test_accuracy")]
    assert found["participating"]["mean"] == pytest.approx((scores[0] + scores[2] + scores[3]) / 3)
    assert found["never_trained"]["mean"] == pytest.approx((scores[1] + scores[4]) / 2)
    table = text_of(personalization_table(federation, settings))
    assert "3 participating" in table
    assert "2 never trained" in table
    assert sorted(read_run(tmp_path).personalized.clients) == [0, 2, 3]


def test_where_every_client_has_trained_nothing_is_said(tmp_path):
    writer = ResultsWriter(str(tmp_path))
    federation = run(QUICK, 1, loop=FederatedLoop(), callbacks=[writer])
    assert "never" not in text_of(fit_table(federation, writer))


def test_before_any_training_all_are_participating(tmp_path):
    federation, trainer = Federation(QUICK, tiny_encoder, seed=1), quiet_trainer(0, ResultsWriter(str(tmp_path)))
    trainer.test(federation, datamodule=Toy(), verbose=False)
    assert federation.rounds_trained == [0] * CLIENTS
    assert federation.never_trained == []


def test_a_column_that_the_module_logs_too_is_there_once_with_its_value():
    federation, _ = run_project(FedAvg)
    logged = [score.logged["test_loss"] for score in federation.test_scores.values()]
    head, *rows = csv.reader(io.StringIO(client_rows(federation, "test")))
    assert len(head) == len(set(head))
    assert [float(row[head.index("test_loss")]) for row in rows] == pytest.approx(logged)
