"""Parts of a module that its user keeps on the clients, or shares, against what the method says."""

from functools import partial

import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import SEED, assert_same, quiet_trainer
from torch import nn

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine, export_clients, federate
from pfl_lightning.datamodules import IID
from pfl_lightning.drop_in.client.roles import chosen_parts
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.methods import (
    Ditto,
    DualFed,
    FedAMP,
    FedAvg,
    FedBABU,
    FedPAC,
    FedPer,
    FedProto,
    FedRep,
    LGFedAvg,
    LocalOnly,
)

COHORTS = ([0, 2, 3], [1, 2], [0, 2, 4])


class Ring(Net):
    """A ring of unit vectors, the place of the newest, and a table that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", nn.functional.normalize(torch.arange(1.0, 13).reshape(6, 2), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def training_step(self, batch, batch_idx):
        angle = batch[0].sum()
        self.ring[self.place % 6] = torch.stack([angle.cos(), angle.sin()])
        self.place += 1
        self.table[0] += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.tanh(self.ring.sum()))


def models(method, module=None, clients=range(5), **options):
    module = Ring() if module is None else module
    federation, _ = run_project(method, 3, module=module, cohorts=COHORTS, **options)
    return {f"{k}.{n}": v for k in clients for n, v in federation.client_model(k).state_dict().items()}, federation


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_parts_that_are_chosen_make_another_method_of_it(engine):
    """What FedPer shares and keeps, chosen under FedAvg, is FedPer; and so on."""
    fedper, _ = models(FedPer, head="fc", engine=engine())
    assert_same(models(FedAvg, personal=("fc",), engine=engine())[0], fedper)
    fedavg, _ = models(FedAvg, engine=engine())
    assert_same(models(FedPer, head="fc", shared="fc.*", engine=engine())[0], fedavg)
    lg, _ = models(LGFedAvg, head="fc", personal=["ring", "table"], engine=engine())
    assert_same(models(FedAvg, personal=("body.*", "ring", "table"), engine=engine())[0], lg)


@pytest.mark.parametrize("method", [FedAvg, Ditto, FedPAC, FedAMP, FedProto, FedBABU])
def test_a_ring_stays_with_its_client(method):
    found, federation = models(method, head="fc", personal=("rin*", "table"))
    for client, fits in enumerate([2, 1, 3, 1, 1]):
        norms = found[f"{client}.ring"].norm(dim=1)
        assert torch.allclose(norms, torch.ones(6), atol=1e-6)
        if method is FedAvg:  # the others step, and read their items, more often
            steps = fits * len(list(federation.data.client_data(client).train.split(4)))
            assert found[f"{client}.place"] == found[f"{client}.table"][0] == steps
    assert not any(name.endswith(("ring", "place", "table")) for name in federation.server.expected_weights)
    assert federation.global_model().place == 0


def test_whole_numbers_travel_when_asked_for():
    options = {"module": Ring(), "shared": ("place", "table"), "cohorts": ([0, 2],)}
    federation, _ = run_project(FedAvg, 1, **options)
    model = federation.global_model()
    steps = (11 * 3 + 14 * 4) / 25  # clients of 11 and 14 items, in batches of 4
    assert model.place == round(steps)
    assert model.table[0] == pytest.approx(steps)


def test_a_fixed_part_trains_when_it_is_chosen():
    first = Net().fc.weight
    for option in ({"personal": "fc"}, {"shared": "fc"}):
        _, federation = models(FedBABU, head="fc", fine_tune=None, **option)
        client = federation.clients.models[0]
        assert not client.fixed_names()
        assert torch.equal(federation.client_model(0).fc.weight, first)  # no phase of the method trains it


def test_a_resumed_run_has_each_client_s_own(tmp_path):
    def fit(rounds, **call):
        loop = FederatedLoop(0.5, method=FedAvg, num_clients=4, personal="ring", seed=SEED)
        trainer = quiet_trainer(rounds, loop)
        trainer.fit(Ring(), Data(), **call)
        return trainer, loop.federation

    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, whole = fit(3)
    _, resumed = fit(3, ckpt_path=tmp_path / "last.ckpt")
    for client in range(4):
        assert_same(resumed.client_model(client).state_dict(), whole.client_model(client).state_dict())
    export_clients(whole, tmp_path / "models")
    exported = torch.load(tmp_path / "models" / "client_1.pt", weights_only=True)
    assert_same(exported, whole.client_model(1).state_dict())
    other = quiet_trainer(3, FederatedLoop(0.5, method=FedAvg, num_clients=4, seed=SEED))
    with pytest.raises(CheckpointError, match="personal state has shapes"):
        other.fit(Ring(), Data(), ckpt_path=tmp_path / "last.ckpt")


def test_a_novel_client_begins_with_the_first_values():
    federation, _ = run_project(LocalOnly, 1, module=Ring(), personal="ring", partition=IID(3), cohorts=([0, 1],))
    assert torch.equal(federation.client_model(2).ring, Ring().ring)
    assert not torch.equal(federation.client_model(1).ring, Ring().ring)


WRONG = [
    ({"personal": ("quee*",)}, r"personal='quee\*' matches no parameter or persistent buffer; there are \['ring'"),
    ({"personal": "rings"}, "personal='rings' matches no parameter or persistent buffer; did you mean 'ring'?"),
    ({"shared": ["ring", "bodi.*"]}, "did you mean 'body'?"),
    ({"personal": ("scratch",)}, "personal='scratch' matches no parameter or persistent buffer"),
    ({"personal": ("fc*",), "shared": ("*.bias",)}, "both name fc.bias of Ring"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_patterns_that_say_nothing_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        federate(Ring(), Data(), FedAvg, num_clients=2, **options)


def test_what_no_server_averages_is_refused():
    with pytest.raises(ConfigurationError, match=r"shared= names fc.bias, and the server of FedProto averages no such"):
        models(FedProto, head="fc", shared="fc")


def test_a_head_that_is_shared_without_combination_is_averaged():
    """Both parts of FedPAC left out, what remains is FedRep's alternation."""
    options = {"head": "fc", "shared": "fc", "epochs": 1, "head_lr": 0.1}
    found, federation = models(FedPAC, Net(), alignment=0, combination=False, **options)
    assert_same(found, models(FedRep, Net(), **options)[0])
    assert not torch.equal(federation.global_model().fc.weight, Net().fc.weight)


def test_tied_weights_stay_together_and_buffers_to_be_set_are_not_shared():
    module = nn.Module()
    module.a, module.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    module.b.weight = module.a.weight
    module.register_buffer("threshold", torch.tensor(torch.inf))
    assert chosen_parts(module, ("a", "b"), ())[0] == {"a.weight", "b.weight"}
    with pytest.raises(ConfigurationError, match=r"one parameter of Module \(tied weights\), and personal='a' names"):
        chosen_parts(module, "a", ())
    with pytest.raises(ConfigurationError, match="names threshold of Module, whose initial values are not finite"):
        chosen_parts(module, (), ("thres*",))


@pytest.mark.parametrize("given", [{"personal": ("head",)}, {}])
def test_a_method_with_an_option_of_that_name_gets_it(given):
    method = DualFed if given else partial(DualFed, personal=("head",))
    federation, _ = federate(Net(), Data(), method, num_clients=2, head="fc", **given)
    assert federation._parts.settings["personal"] == ("head",)
    assert federation._parts.personal == ()
