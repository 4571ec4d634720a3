"""Several encoders in one federation: their assignment, refused combinations, and stored states."""

from functools import partial

import pytest
import torch
from _helpers.plain import first_net
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    assert_same,
    dropout_encoder,
    normed_encoder,
    run,
    tiny_encoder,
)
from torch import nn

from pfl_lightning.encoders import ByClient, ByShare, RoundRobin
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import (
    APFL,
    DCPFL,
    FML,
    Ditto,
    FedAvg,
    FedClassAvg,
    FedGH,
    FedKD,
    FedPer,
    FedProto,
    LGFedAvg,
    LocalOnly,
)
from pfl_lightning.seeding import derive_seed
from pfl_lightning.state.architectures import ArchitectureSummary, check_features
from pfl_lightning.state.clients import GroupedStates


def other_encoder(input_shape):
    """Another architecture, features of the same width."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 7), nn.ReLU(), nn.Linear(7, FEATURES))
    encoder.out_features = FEATURES
    return encoder


def wide_encoder(input_shape):
    """Features of another width."""
    encoder = nn.Sequential(nn.Linear(input_shape[0], 9), nn.Tanh())
    encoder.out_features = 9
    return encoder


BOTH = [tiny_encoder, other_encoder]


def set_up(method, encoder, **options):
    """A federation of which client 0 has trained."""
    return run(method, cohorts=[[0]], encoder=encoder, **options)


# ---------------------------------------------------------------------- who has which


DEALS = {
    "one": (tiny_encoder, [0, 0, 0, 0, 0]),
    "list": (BOTH, [0, 1, 0, 1, 0]),
    "tuple": (tuple(BOTH), [0, 1, 0, 1, 0]),
    "round-robin": (RoundRobin([*BOTH, normed_encoder]), [0, 1, 2, 0, 1]),
    "shares": (ByShare(BOTH, [0.2, 0.8]), [1, 1, 0, 1, 1]),
    "clients": (ByClient(BOTH, [1, 1, 0, 0, 1]), [1, 1, 0, 0, 1]),
    "names": (ByClient(BOTH, ["other_encoder", *["tiny_encoder"] * 4]), [1, 0, 0, 0, 0]),
}


@pytest.mark.parametrize(("encoder", "expected"), DEALS.values(), ids=DEALS)
def test_dealing(encoder, expected):
    federation = set_up(partial(LocalOnly, epochs=1), encoder)
    assert federation.clients.architecture_of == expected
    widths = {0: 5, 1: 7, 2: FEATURES}  # of the first layer
    for client, architecture in enumerate(expected):
        assert federation.client_model(client).encoder[0].out_features == widths[architecture]
        assert federation.clients.model_of(client) is federation.models[architecture]


def test_the_summary_of_architectures():
    federation = set_up(LGFedAvg, ByClient(BOTH, [1, 0, 0, 0, 1]))
    tiny = INPUTS * 5 + 5 + 5 * FEATURES + FEATURES
    other = INPUTS * 7 + 7 + 7 * FEATURES + FEATURES
    head = FEATURES * CLASSES + CLASSES
    assert federation.architectures == [
        ArchitectureSummary("tiny_encoder", FEATURES, tiny + head, head, 3),
        ArchitectureSummary("other_encoder", FEATURES, other + head, head, 2),
    ]


def test_widths_may_differ_where_nothing_is_shared():
    federation = set_up(LocalOnly, [tiny_encoder, wide_encoder])
    assert [(row.features, row.shared) for row in federation.architectures] == [(FEATURES, 0), (9, 0)]


def test_an_architecture_without_clients():
    federation = set_up(LGFedAvg, ByClient(BOTH, [0] * CLIENTS))
    assert [row.clients for row in federation.architectures] == [5, 0]
    assert federation.personal.num_clients == CLIENTS


def test_a_deal_for_another_number_of_clients_is_refused():
    with pytest.raises(ValueError, match="ByClient lists encoders for 2 clients, the federation has 5"):
        set_up(LocalOnly, ByClient(BOTH, [0, 1]))


# ---------------------------------------------------------------------- first weights


def test_the_first_architecture_starts_as_if_it_were_the_only_one():
    alone, among = set_up(LocalOnly, tiny_encoder), set_up(LocalOnly, BOTH)
    assert_same(among.client_model(2).state_dict(), alone.client_model(2).state_dict())
    assert_same(among.client_model(2).state_dict(), first_net().state_dict())
    assert_same(among.client_model(0).state_dict(), alone.client_model(0).state_dict())  # trained


def test_the_second_architecture_does_not_depend_on_the_first():
    torch.manual_seed(derive_seed(SEED, "initial weights", 1))
    expected = other_encoder((INPUTS,)).state_dict()
    for first in (tiny_encoder, normed_encoder):
        assert_same(set_up(LocalOnly, [first, other_encoder]).client_model(1).encoder.state_dict(), dict(expected))


def test_one_encoder_twice_is_two_architectures():
    federation = set_up(LocalOnly, [tiny_encoder, tiny_encoder])
    assert not torch.equal(federation.client_model(1).encoder[0].weight, federation.client_model(2).encoder[0].weight)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("method", [LGFedAvg, FedProto, FedGH, FedClassAvg, DCPFL], ids=lambda m: m.__name__)
def test_features_of_different_widths_are_refused(method):
    expected = rf"{method.__name__} needs .* is \(?.*4.* in tiny_encoder and \(?.*9.* in wide_encoder"
    with pytest.raises(ConfigurationError, match=expected):
        set_up(method, [tiny_encoder, wide_encoder])


@pytest.mark.parametrize("method", [FedAvg, FedPer], ids=lambda m: m.__name__)
def test_different_encoders_cannot_be_shared(method):
    differs = r"encoder\.0\.weight is \(5, 6\) in tiny_encoder and .* in other_encoder"
    with pytest.raises(ConfigurationError, match=rf"{method.__name__} needs .*{differs}"):
        set_up(method, BOTH)


@pytest.mark.parametrize("method", [APFL, Ditto], ids=lambda m: m.__name__)
@pytest.mark.parametrize("other", [other_encoder, wide_encoder])
def test_a_second_network_that_is_shared_is_named(method, other):
    message = rf"{method.__name__} needs .* global_model\.\S+ is .* use one encoder for all clients"
    with pytest.raises(ConfigurationError, match=message):
        set_up(method, [tiny_encoder, other])


@pytest.mark.parametrize("method", [FML, FedKD], ids=lambda m: m.__name__)
def test_a_partner_is_advised_whatever_the_widths(method):
    with pytest.raises(ConfigurationError, match=f"{method.__name__} .*one partner= for all"):
        set_up(method, [tiny_encoder, wide_encoder])
    set_up(partial(method, partner=tiny_encoder), [tiny_encoder, wide_encoder])


def make(forward, out_features=FEATURES):
    class Wrong(nn.Module):
        def __init__(self, input_shape):
            super().__init__()
            self.layer = nn.Linear(input_shape[0], FEATURES)
            if out_features is not None:
                self.out_features = out_features

        def forward(self, inputs):
            return forward(self.layer(inputs))

    return Wrong


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (make(lambda f: f[:, :3]), r"Wrong must map inputs of shape \(2, 6\) to features of shape \(2, 4\).*\(2, 3\)"),
        (make(lambda f: f[0]), r"features of shape \(2, 4\) \(out_features is 4\), it gives \(4,\)"),
        (make(lambda f: (f, f)), "it gives tuple"),
        (make(lambda f: f, 5), r"features of shape \(2, 5\) \(out_features is 5\), it gives \(2, 4\)"),
        (make(lambda f: f, None), "the encoder Wrong has no integer attribute out_features"),
        (make(lambda f: f, "4"), "the encoder Wrong has no integer attribute out_features"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_encoder_that_does_not_do_is_refused(encoder, message, place):
    encoders = [tiny_encoder]
    encoders.insert(place, encoder)
    with pytest.raises(ConfigurationError, match=message):
        set_up(LocalOnly, encoders)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda shape: tiny_encoder(shape).double(), r"type torch.float32: .*must be of one type, float32"),
        (
            lambda shape: tiny_encoder((9,)),
            r"fails on inputs of shape \(2, 6\) .*cannot be multiplied \(2x6",
        ),
        (make(lambda f: f.reshape(7, 7)), r"Wrong fails on inputs of shape \(2, 6\) and .*: shape '\[7, 7\]'"),
    ],
    ids=["other precision", "other width", "error in forward"],
)
def test_an_encoder_that_fails_on_samples_is_refused(encoder, message):
    with pytest.raises(ConfigurationError, match=message):
        set_up(LocalOnly, encoder)


def test_the_check_leaves_an_encoder_as_it_was():
    for make_encoder in (normed_encoder, dropout_encoder):
        encoder = make_encoder((INPUTS,))
        encoder[1].eval()
        before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        random = torch.get_rng_state()
        check_features("it", encoder, torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1)))
        assert_same(dict(encoder.state_dict()), before)
        assert [module.training for module in encoder] == [True, False, True]
        assert torch.equal(torch.get_rng_state(), random)


# ---------------------------------------------------------------------- stored states


class TestGroupedStates:
    initials = ({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0]), "n": torch.tensor(4)})
    groups = (1, 0, 1, 1)

    def states(self):
        return GroupedStates(self.initials, self.groups)

    def test_each_client_has_the_state_of_its_group(self):
        states = self.states()
        states.set(2, {"w": torch.tensor([7.0]), "n": torch.tensor(8)})
        assert [states.get(k)["w"].tolist() for k in range(4)] == [[3.0], [1.0, 2.0], [7.0], [3.0]]
        assert [sorted(states.get(k)) for k in range(4)] == [["n", "w"], ["w"], ["n", "w"], ["n", "w"]]
        assert [states.written(k) for k in range(4)] == [False, False, True, False]
        assert states.num_clients == 4
        assert states.num_bytes == 4 + 8

    @pytest.mark.parametrize("written", [[], [1], [0, 3], [0, 1, 2, 3]])
    def test_round_trip(self, written):
        states = self.states()
        for client in written:
            states.set(client, {name: t + 10 * (client + 1) for name, t in states.get(client).items()})
        other = self.states()
        other.set(2, {"w": torch.tensor([-1.0]), "n": torch.tensor(-1)})
        other.load_state_dict(states.state_dict())
        for client in range(4):
            assert_same(other.get(client), states.get(client))
            assert other.written(client) == (client in written)

    @pytest.mark.parametrize(
        ("initials", "groups", "message"),
        [
            (initials, (1, 0, 1), "assigns its architectures to"),
            (initials, (1, 0, 1, 0), r"assigns its architectures to \[1, 3\] clients, this federation to \[2, 2\]"),
            (initials, (1, 1, 0, 1), r"to \[1, 3\] clients, this federation to \[1, 3\], and not to the same ones"),
            ((*initials, {}), groups, "assigns its architectures"),
            (initials[::-1], groups, "personal state has shapes"),
        ],
    )
    def test_another_federation_is_refused(self, initials, groups, message):
        with pytest.raises(CheckpointError, match=message):
            GroupedStates(initials, groups).load_state_dict(self.states().state_dict())

    def test_a_group_without_clients(self):
        states = GroupedStates(self.initials, [0, 0])
        states.load_state_dict(GroupedStates(self.initials, [0, 0]).state_dict())
        assert [states.get(k)["w"].tolist() for k in range(2)] == [[1.0, 2.0]] * 2
