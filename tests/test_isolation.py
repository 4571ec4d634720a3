"""A client never sees another client's data: neither through the data module nor through its results."""

from functools import partial

import lightning as L
import pytest
import torch
from _helpers.methods import EVERY_METHOD, under
from _helpers.toy import CLIENTS, LABELS, GivenCohorts, Toy, for_toy, run
from _helpers.views import WithUnlabeled, flat_encoder
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.callbacks import FederatedLoop
from pfl_lightning.methods import FedAvg, FedPAC

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")

ENGINES = {"SequentialEngine": (SequentialEngine,), "TrainerEngine": (TrainerEngine,)}
READS_NOTHING = {"__get__", "size", "dim", "__len__", "untyped_storage", "data_ptr", "is_floating_point"}


class Touched(TorchFunctionMode):
    """Notes which rows of some tensors are read, and on whose behalf; what is no selection of rows reads all."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
        self.sizes = {name: len(tensor) for name, tensor in tensors.items()}
        self.client = None
        self.rows = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.client is not None and func.__name__ not in READS_NOTHING:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    name = self.storages.get(_plain(tensor).untyped_storage().data_ptr())
                    if name is not None:
                        rows = args[2].tolist() if func.__name__ == "index_select" else range(self.sizes[name])
                        self.rows.setdefault((self.client, name), set()).update(rows)
        return func(*args, **(kwargs or {}))


def _plain(tensor):
    """The tensor inside what ``torch.func`` wraps while it differentiates."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


class _Whose(L.Callback):
    def __init__(self, touched):
        self.touched = touched

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.touched.client = ("fit", int(batch))

    def on_train_batch_end(self, *args):
        self.touched.client = None

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.touched.client = ("evaluation", int(batch))

    def on_validation_batch_end(self, *args):
        self.touched.client = None


@pytest.mark.repeated
@pytest.mark.parametrize(("method", "engine"), under(ENGINES, ["SequentialEngine"]))
def test_only_a_clients_own_samples_are_read_and_no_attribute_goes_on(method, engine, caplog):
    data = Toy()
    data.setup()
    samples = data._ready.samples
    names = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    touched = Touched({name: getattr(samples, name) for name in names})
    fit = for_toy(method, epochs=1, fine_tune="all")
    with touched:
        run(fit, 2, data=data, engine=engine(), callbacks=[_Whose(touched)])
    assert "was changed by the first local fit" not in caplog.text

    train, validation, test = ([set(rows.tolist()) for rows in part] for part in data.partition.lists)
    assert not set.intersection(*train)
    for client in range(CLIENTS):
        fitted = train[client] | (validation[client] if method.__name__ == "FedFomo" else set())  # which weighs by them
        assert touched.rows[("fit", client), "train_inputs"] == fitted
        assert touched.rows[("fit", client), "train_targets"] == fitted
        assert (("fit", client), "test_inputs") not in touched.rows
        assert touched.rows[("evaluation", client), "train_inputs"] == train[client] | validation[client]
        assert touched.rows[("evaluation", client), "test_inputs"] == test[client]


@pytest.mark.repeated
@pytest.mark.parametrize(("method", "engine"), under(ENGINES, []))
def test_only_a_clients_own_samples_without_labels_are_read_in_its_fit_alone(method, engine):
    data = WithUnlabeled(novel_clients=1)
    data.setup()
    touched = Touched({"unlabeled": data._ready.samples.unlabeled_inputs})
    fit = for_toy(method, epochs=1, fine_tune="head")
    with touched:
        more = {"loop": FederatedLoop(), "engine": engine(), "callbacks": [_Whose(touched)]}
        run(fit, data=data, encoder=flat_encoder, **more)
    own = {client: set(data.client_data(client).unlabeled.indices.tolist()) for client in data.participating}
    expected = {(("fit", client), "unlabeled"): rows for client, rows in own.items()}
    assert touched.rows == (expected if method.uses_unlabeled_data else {})


def garbage_but_for(client):
    """Everybody else's samples become garbage."""
    first = sum(len(own) for own in LABELS[:client])

    def change(inputs, targets):
        own = inputs[first : first + len(LABELS[client])].clone()
        inputs.copy_(100 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1)))
        inputs[first : first + len(own)] = own

    return change


@pytest.mark.repeated
@EVERY_METHOD
def test_garbage_at_the_others_does_not_reach_a_clients_update(method):
    def first_updates(data):
        found = {}

        class Recorded(method):
            def make_update(self, context, before):
                update = super().make_update(context, before)
                found[context.client] = {name: tensor.clone() for name, _, tensor in update.tensors()}
                found[context.client] |= {f"own {n}": t.clone() for n, t in self.state_dict().items()}
                return update

        run(for_toy(Recorded, epochs=1), data=data, limit_val_batches=0)
        return found

    for client in (0, 3):
        clean, dirty = first_updates(Toy()), first_updates(Toy(change=garbage_but_for(client)))
        for name, tensor in clean[client].items():
            assert torch.equal(tensor, dirty[client][name]), name
        others = [k for k in range(CLIENTS) if k != client]
        changes = "own encoder.0.weight" if method.__name__ != "FedBABU" else "weights.encoder.0.weight"
        assert all(not torch.equal(clean[k][changes], dirty[k][changes]) for k in others)


class Remembering(FedAvg):
    """Counts fits in each place where an author may keep something."""

    shared = ("encoder.*", "head.*")

    def __init__(self, encoder, num_classes, *, seen, **options):
        super().__init__(encoder, num_classes, **options)
        self.seen, self.attribute = seen, []
        self.register_buffer("fits", torch.zeros(()))
        self.register_buffer("of_this_fit", torch.zeros(()), persistent=False)

    def before_fit(self, context):
        self.attribute = [*self.attribute, context.client]
        self.fits += 1
        self.of_this_fit = torch.tensor(float(context.client))
        return context.client

    def make_update(self, context, before):
        kept = (before, int(self.of_this_fit), int(self.fits))
        self.seen.append((context.client, *kept, self.attribute))
        return super().make_update(context, before)


def test_an_attribute_leaks_to_the_next_client_and_what_the_guide_names_instead_does_not():
    seen = []
    run(partial(Remembering, seen=seen, lr=0.05, epochs=1), 2, cohorts=[[0, 1], [2, 0]])
    assert [found[:3] for found in seen] == [(client, client, client) for client in (0, 1, 2, 0)]
    assert [found[3] for found in seen] == [1, 1, 1, 2]  # of client 0 in its second fit
    assert [found[4] for found in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 0]]


def test_nothing_but_messages_crosses():
    """What a broadcast holds is all of the server's that a fit can reach."""
    seen = []

    class Recorded(FedPAC):
        def receive(self, broadcast):
            seen.append({name: tuple(tensor.shape) for name, _, tensor in broadcast.tensors()})
            super().receive(broadcast)

    run(partial(Recorded, epochs=1), 2, loop=GivenCohorts([0, 1]), limit_val_batches=0)
    assert len(seen) == 4
    assert all(set(shapes) == set(seen[0]) for shapes in seen)
    assert sorted(name.split(".")[0] for name in seen[0]) == ["centroids", "present", *["weights"] * 6]
