import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from pfl_lightning.encoders import (
    DCPFLCNN,
    MLP,
    ByClient,
    ByShare,
    EncoderAssignment,
    RoundRobin,
    encoder_label,
)

NAMES = ["resnet18", "shufflenet_v2", "googlenet", "small_alexnet"]


def thin(input_shape):
    return MLP(input_shape, hidden=())


def test_round_robin():
    assert RoundRobin(NAMES).assign(6) == [0, 1, 2, 3, 0, 1]
    assert RoundRobin(NAMES).assign(2) == [0, 1]
    assert RoundRobin(["mlp"]).assign(3) == [0, 0, 0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 60))
def test_shares(weights, clients):
    shares = [weight / sum(weights) for weight in weights]
    assigned = ByShare(["mlp"] * len(weights), shares).assign(clients)
    assert len(assigned) == clients
    assert set(assigned) <= set(range(len(weights)))
    for index, weight in enumerate(weights):
        number = assigned.count(index)
        assert abs(number - clients * weight / sum(weights)) < 1
        for few in range(clients):  # spread evenly: the first clients are a fair sample
            assert abs(assigned[:few].count(index) - number * few / clients) <= max(1, len(weights) - 1)


@given(st.integers(1, 6), st.integers(1, 40))
def test_equal_shares_are_assigned_in_turn(encoders, rounds):
    clients = encoders * rounds
    equal = ByShare(["mlp"] * encoders, [1 / encoders] * encoders)
    assert equal.assign(clients) == RoundRobin(["mlp"] * encoders).assign(clients)


def test_numbers_of_shares():
    assert ByShare(["mlp", "small_cnn"], [0.75, 0.25]).assign(4) == [0, 0, 1, 0]
    assert sorted(ByShare(["mlp"] * 3, [0.7, 0.1, 0.2]).assign(10)) == [0] * 7 + [1] + [2] * 2
    assert ByShare(["mlp"] * 2, [0.29, 0.71]).assign(100).count(0) == 29
    assert ByShare(["mlp"] * 2, [0.5, 0.5]).assign(3).count(0) == 2  # a tie goes to the first


def test_by_client():
    assignment = ByClient(["mlp", "small_cnn", DCPFLCNN], [0, "small_cnn", "DCPFLCNN", 0])
    assert assignment.assign(4) == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: RoundRobin([]), ValueError, r"RoundRobin needs a list of encoders.* got \[\]"),
        (lambda: RoundRobin("mlp"), ValueError, "needs a list of encoders.* got 'mlp'"),
        (lambda: RoundRobin(["mpl"]), ValueError, "unknown encoder 'mpl'; did you mean 'mlp'"),
        (lambda: RoundRobin(["mlp", 3]), ValueError, "RoundRobin needs a list of encoders, each a registered name"),
        (lambda: ByShare(["mlp"], [0.5, 0.5]), ValueError, "a share above 0 for each of 1 encoders"),
        (lambda: ByShare(["mlp", "small_cnn"], [1.0, 0.0]), ValueError, r"a share above 0 .*got \[1.0, 0.0\]"),
        (lambda: ByShare(["mlp", "mlp"], [1.5, -0.5]), ValueError, "a share above 0"),
        (lambda: ByShare(["mlp", "mlp"], [float("nan"), 1]), ValueError, "a share above 0"),
        (
            lambda: ByShare(["mlp", "mlp"], [0.5, 0.4]),
            ValueError,
            r"with the sum 1, got \[0.5, 0.4\]; RoundRobin",
        ),
        (
            lambda: ByClient(["mlp"], [0, 0]).assign(3),
            ValueError,
            "for 2 clients, the federation has 3; give one entry",
        ),
        (
            lambda: ByClient(["mlp"], [0, 1]),
            ValueError,
            "client 1 of ByClient: 1 is neither an index nor a unique name of",
        ),
        (lambda: ByClient(["mlp"], [-1]), ValueError, "-1 is neither an index"),
        (lambda: ByClient(["mlp"], [True]), ValueError, "True is neither an index"),
        (
            lambda: ByClient(["mlp"], ["small_cnn"]),
            ValueError,
            "'small_cnn' is neither an index nor a unique name .* 0: mlp",
        ),
        (lambda: ByClient(["mlp", "mlp"], ["mlp"]), ValueError, "'mlp' is neither an index nor a unique name"),
    ],
)
def test_errors(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_labels():
    assert encoder_label("mlp") == "mlp"
    assert encoder_label(MLP) == "MLP"
    assert encoder_label(functools.partial(functools.partial(MLP, hidden=()), out_features=3)) == "MLP"
    assert encoder_label(thin) == "thin"
    assert encoder_label(functools.partial(thin)) == "thin"

    class Factory:
        def __call__(self, input_shape):
            return MLP(input_shape)

    assert encoder_label(Factory()).endswith("Factory")
    assert RoundRobin(["mlp", thin]).labels == ["mlp", "thin"]


MIXED = ["resnet18", {"class_path": "pfl_lightning.encoders.DCPFLCNN", "init_args": {"hidden": 800}}]


@pytest.mark.parametrize(
    ("name", "options", "assigned"),
    [
        ("RoundRobin", {}, [0, 1, 0]),
        ("ByShare", {"shares": [0.25, 0.75]}, [1, 0, 1]),
        ("ByClient", {"clients": [1, "resnet18", "DCPFLCNN"]}, [1, 0, 1]),
    ],
)
def test_from_a_config(name, options, assigned):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--assignment", type=EncoderAssignment)
    value = {"class_path": f"pfl_lightning.encoders.{name}", "init_args": {"encoders": MIXED, **options}}
    parsed = parser.parse_object({"assignment": value})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assignment = instantiate(parsed).assignment
    assert assignment.assign(3) == assigned
    assert assignment.labels == ["resnet18", "DCPFLCNN"]
    encoder = assignment.encoders[1]((1, 28, 28))
    assert isinstance(encoder, DCPFLCNN)
    assert encoder.features[1].out_features == 800
