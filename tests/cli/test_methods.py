"""`pfl methods`: the table of methods says what the docs and the instances say."""

from _helpers.toy import tiny_encoder

from pfl_lightning.cli.tables import methods_table
from pfl_lightning.methods import ADAPTER_METHODS, METHODS, PFLSSL, Calibre, FedEMA

SELF_SUPERVISED = (PFLSSL, Calibre, FedEMA)


def shown():
    """The cells of the column of weights that travel, by method."""
    columns = {str(column.header): list(column.cells) for column in methods_table().columns}
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
