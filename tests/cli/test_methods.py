"""`pfl methods`: the table of methods says what the docs and the instances say."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from _helpers.toy import INPUTS, linear_encoder, tiny_encoder, wide_encoder

from pfl_lightning.cli import main
from pfl_lightning.cli.methods import NEEDS, MethodCosts, method_rows, methods_table, read_catalog, read_costs
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import ADAPTER_METHODS, METHODS, PFLSSL, Calibre, FedEMA
from pfl_lightning.state.architectures import check_shared

SELF_SUPERVISED = (PFLSSL, Calibre, FedEMA)


def shown():
    """The cells of the column of weights that travel, by method."""
    columns = {str(column.header): list(column.cells) for column in methods_table(method_rows()).columns}
    return dict(zip(columns["method"], columns["weights that travel"], strict=True))


def test_every_method_has_a_row():
    assert list(shown()) == [method.__name__ for method in (*METHODS, *ADAPTER_METHODS)]


def test_self_supervised_methods_send_no_head():
    for method in SELF_SUPERVISED:
        assert shown()[method.__name__] == "encoder, objective"
        client = method(tiny_encoder((1, 2, 2)), 3)
        assert {pattern.partition(".")[0] for pattern in client.shared} == {"encoder", "objective"}


def test_other_methods_show_what_their_classes_share():
    assert shown()["FedAvg"] == "encoder, head"
    assert shown()["LocalOnly"] == "none"


def test_the_file_says_what_the_classes_say():
    script = Path(__file__).parents[2] / "benchmarks" / "method_catalog.py"
    assert read_catalog() == runpy.run_path(str(script))["make_catalog"](), f"run python {script}"


def test_objectives_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["methods"])
    said = capsys.readouterr().out
    rows = [row for row in read_catalog()["objectives"] if re.search(rf"│ {row[0]} +│ {row[1]} +│", said)]
    assert [row[0] for row in rows] == ["simclr", "byol", "simsiam", "mocov2", "swav", "smog"]
    assert all(re.search(r" 20\d\d$", source) and text for _, _, text, source in rows)


def test_the_list_needs_no_torch(tmp_path):
    program = "import sys; from pfl_lightning.cli import main; main(['methods']); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.stdout.splitlines()[-1] == "False", found.stderr


COSTS = MethodCosts("FedAvg", ["encoder"], ["encoder"], 4000, 4000, 0, 4000, 0, 1.0, 1.0, 1.05, False, 0.9)


@pytest.fixture
def measured(monkeypatch):
    """Three methods with costs: one like FedAvg, one of unequal encoders, one that serves no novel clients."""
    found = {
        "FedAvg": COSTS,
        "FedPAC": replace(COSTS, method="FedPAC", up_bytes=12000, work=1.4),
        "FedProto": replace(COSTS, method="FedProto", up=["prototypes"], unequal_encoders=True, novel_accuracy=0.1),
    }
    monkeypatch.setattr("pfl_lightning.cli.methods.read_costs", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("words", "among", "others"),
    [
        (["--heterogeneous"], {"FedProto"}, {"FedAvg", "FedPAC", "LocalOnly"}),
        (["--novel"], {"FedAvg", "FedPAC"}, {"FedProto", "LocalOnly"}),
        (["--any-module"], {"FedAvg", "LocalOnly"}, {"FedPAC"}),
        (["--public"], {"FedMD", "KTpFL"}, {"FedAvg", "FML"}),
        (["--classifiers", "--heterogeneous"], {"FedProto"}, {"FedAvg"}),
    ],
)
def test_filters(words, among, others, measured, capsys):
    main(["methods", *words])
    said = set(re.findall(r"^(\w+) +", capsys.readouterr().out, re.MULTILINE))
    assert among <= said
    assert not others & said


def test_bytes_and_work_are_ratios_to_fedavg(measured):
    columns = {str(column.header): list(column.cells) for column in methods_table(method_rows()).columns}
    place = columns["method"].index("FedPAC")
    assert (columns["bytes"][place], columns["work"][place]) == ("2.00", "1.40")


def test_the_table_fits_80_columns_with_its_legend_above(monkeypatch, capsys):
    """No word of it is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    main(["methods", "--heterogeneous", "--novel"])
    legend, _, rows = capsys.readouterr().out.partition("───")
    assert re.findall(r"^(\w+) +", rows, re.MULTILINE) == ["FML", "FedKD"]
    assert "one width: of the features" in " ".join(legend.split())
    main(["methods"])
    said = capsys.readouterr().out
    assert "…" not in said
    words = {word.strip(",") for word in said.split()}
    assert words >= {*KNOWN, *(word for row in KNOWN.values() for need in row.needs for word in need.split())}


def test_a_named_method_is_told_whole(measured, capsys):
    main(["methods", "fedproto"])
    said = capsys.readouterr().out
    assert "prototypes: 4.0 kB" in said
    assert "may differ" in said
    assert "FedProto: Federated Prototype Learning" in said


def test_an_unknown_word_is_refused(measured, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["methods", "FedPAK"])
    assert (
        "there is no method FedPAK; did you mean 'FedPAC'? (pfl methods lists those of the package)"
        in capsys.readouterr().err
    )


def test_what_was_measured_of_every_method_ships():
    """``python benchmarks/method_costs.py --repetitions 0 --write`` measures it."""
    known = read_costs()
    assert [method.__name__ for method in METHODS if method.__name__ not in known] == []
    assert (known["FedAvg"].work, known["FedAvg"].unequal_encoders, known["LocalOnly"].up_bytes) == (1.0, False, 0)
    assert known["FedAvg"].up_bytes == known["FedAvg"].down_bytes == 430_760


def test_nothing_that_fits_is_said(measured, capsys):
    main(["methods", "FedPAC", "--heterogeneous"])
    assert "no method fits: FedPAC --heterogeneous" in capsys.readouterr().out


def test_methods_of_adapters_are_none_of_any_module(measured, capsys):
    main(["methods", "--any-module"])
    assert "LoRA" not in capsys.readouterr().out


# ---------------------------------------------------------------------- what methods need


KNOWN = {row.name: row for row in method_rows()}


def fits_together(method, encoders):
    """Whether clients of two encoders have the same shared part."""
    clients = [method(make((INPUTS,)), 2) for make in encoders]
    for client in clients:
        if "partner" in KNOWN[method.__name__].needs:
            client.attach_partner(tiny_encoder((INPUTS,)))
    try:
        check_shared(clients, ["first", "second"])
    except ConfigurationError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:.*has no batch normalization")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_needs_of_encoders_are_what_a_federation_refuses(method):
    needs = set(KNOWN[method.__name__].needs)
    assert ("equal encoders" in needs) != fits_together(method, [tiny_encoder, linear_encoder])  # of one width
    alike = fits_together(method, [tiny_encoder, wide_encoder])
    assert ("one width" in needs or "equal encoders" in needs) != alike


def test_needs_of_data_and_models():
    of = {need: {name for name, row in KNOWN.items() if need in row.needs} for need in NEEDS}
    assert of["public data"] == {"FedMD", "KTpFL"}
    assert of["validation"] == {"FedFomo"}
    assert of["partner"] == {"FML", "FedKD"}
    assert of["adapters"] == {method.__name__ for method in ADAPTER_METHODS}
    assert of["features"] == {name for name, row in KNOWN.items() if row.modules == "classifiers"}


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("FedMD", {"public data"}),
        ("FedFomo", {"validation", "equal encoders"}),
        ("FedProto", {"features", "one width"}),
    ],
)
def test_cards_say_what_a_method_needs(name, needs, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main(["methods", name])
    said = capsys.readouterr().out
    assert {need for need in NEEDS if NEEDS[need] in said} == needs
    assert "times FedAvg's, both ways" in said
