"""Two views of a user's items are two readings of them, whose random draws are seeded for round and client."""

import random
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from _helpers.project import Net, run_project
from _helpers.toy import FEATURES, INPUTS, SMALL_SIMCLR
from torch.utils.data import DataLoader, Dataset, default_collate

from pfl_lightning.datamodules import IID, FromLoaders
from pfl_lightning.methods import PFLSSL, Calibre
from pfl_lightning.seeding import seeded_generator

ITEMS = 12
DRAWS = {
    "torch": lambda: torch.randn(INPUTS),
    "numpy": lambda: torch.from_numpy(np.random.standard_normal(INPUTS)).float(),  # noqa: NPY002
    "random": lambda: torch.tensor([random.gauss(0, 1) for _ in range(INPUTS)]),
}


class Noise(Dataset):
    """Items that are what a transform draws, and classes."""

    def __init__(self, library, items=ITEMS):
        self.library, self.items = library, items

    def __len__(self):
        return self.items

    def __getitem__(self, place):
        return DRAWS[self.library](), place % 2


class Project(L.LightningDataModule):
    """In the items' own order, so that a difference of two batches is one of draws."""

    def __init__(self, library, **options):
        super().__init__()
        self.library, self.options = library, {"batch_size": 3, **options}

    def train_dataloader(self):
        return DataLoader(Noise(self.library), **self.options)

    def val_dataloader(self):
        return DataLoader(Noise(self.library, 6), batch_size=3)


def views(library, round=0, client=0, passes=1, **options):
    """All views of a client's passes in a local fit: (passes, batches, 2, items, inputs)."""
    data = FromLoaders(IID(2), datamodule=Project(library, **options))
    data.setup()
    torch.manual_seed(3)  # as the engines do before a fit
    generator = seeded_generator(1, "fit/0", round, client)
    loader = data.client_data(client).train.loader(3, generator=generator, shuffle=True, views=2)
    try:
        found = [torch.stack([torch.stack([view[0] for view in batch]) for batch in loader]) for _ in range(passes)]
    finally:
        data.release()
    return torch.stack(found)


def disturb():
    """What was drawn before leaves no trace."""
    random.random()
    np.random.random(7)  # noqa: NPY002


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("library", ["numpy", "random"])
def test_readings_are_seeded_for_pass_round_and_client(library, shuffle):
    found = views(library, passes=2, shuffle=shuffle)
    disturb()
    assert torch.equal(views(library, passes=2, shuffle=shuffle), found)
    others = [views(library, 1, 0, 2, shuffle=shuffle), views(library, 0, 1, 2, shuffle=shuffle)]
    every = torch.cat([found, *others]).flatten(0, 3)  # no two readings have drawn the same
    assert len(every.unique(dim=0)) == len(every) == 3 * 2 * ITEMS


@pytest.mark.parametrize("library", ["numpy", "random"])
def test_the_users_own_generators_go_on_as_if_nothing_had_been_read(library):
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = random.random(), np.random.random()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    views(library)
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002


@pytest.mark.parametrize("library", DRAWS)
def test_readings_do_not_depend_on_the_number_of_workers(library):
    """Torch's draws in this process are those of the fit, which has no workers: these are seeded for each batch."""
    found = [views(library, passes=2, num_workers=workers) for workers in (0, 1, 2)]
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[0], found[1]) == (library != "torch")
    every = found[2].flatten(0, 3)
    assert len(every.unique(dim=0)) == len(every)


SEEN: list[torch.Tensor] = []


def noting(objective, views):
    """Note the second view that an objective is given."""
    SEEN.append(views[2].detach().clone())


def watched(encoder):
    made = SMALL_SIMCLR(encoder)
    made.register_forward_pre_hook(noting)
    return made


def second_views(data, **options):
    """Those of a run of two rounds of two clients: (rounds, clients, epochs, items, inputs)."""
    SEEN.clear()
    federation, _ = run_project(
        PFLSSL, 2, module=Net(), data=data, objective=watched, num_clients=2, epochs=2, head="fc", **options
    )
    own = len(SEEN) // 8
    found = torch.stack([torch.cat(SEEN[start : start + own]) for start in range(0, len(SEEN), own)])
    return federation, found.unflatten(0, (2, 2, 2))


@pytest.mark.parametrize("library", DRAWS)
def test_second_views_of_a_run_are_reproducible_and_of_their_round_and_client(library):
    federation, found = second_views(Project(library))
    disturb()
    again, repeated = second_views(Project(library))
    assert torch.equal(found, repeated)
    for client, score in federation.validation_scores.items():  # by neighbors among items that are read once more
        assert score.accuracy == again.validation_scores[client].accuracy
    every = found.flatten(0, 3)
    assert len(every.unique(dim=0)) == len(every)


class TwoValidations(L.LightningDataModule):
    """Training items in their own order, and two loaders of others for the validation."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def items(self, number, seed):
        draw = torch.Generator().manual_seed(seed)
        return [(torch.randn(INPUTS, generator=draw), place % 3) for place in range(number)]

    def train_dataloader(self):
        return DataLoader(self.items(24, 1), batch_size=4, shuffle=True)

    def val_dataloader(self):
        loaders = [DataLoader(self.items(18, 2), batch_size=5), DataLoader(self.items(9, 3), batch_size=2)]
        return dict(zip("ab", loaders, strict=True)) if self.options.get("named") else loaders


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("method", [PFLSSL, partial(Calibre, clusters=2)])
@pytest.mark.filterwarnings("ignore:.*two views")
def test_neighbors_are_those_of_the_items_of_every_validation_loader(method, named):
    data = TwoValidations(named=named)
    federation, trainer = run_project(
        method, module=Net(), data=data, objective=SMALL_SIMCLR, num_clients=3, epochs=1, head="fc"
    )
    divided, right, seen = trainer.datamodule, [], []
    for client in range(3):
        own, body = divided.client_data(client), federation.client_model(client).body

        def features(part, body=body):
            inputs, classes = default_collate([part.source.dataset[place] for place in part.indices.tolist()])
            with torch.no_grad():
                return body(inputs).double(), classes

        assert own.validation.sizes == (8, 8)
        known, classes = features(own.train)
        both = [features(part) for part in own.validation.parts]
        asked, expected = (torch.cat(each) for each in zip(*both, strict=True))
        assert known.shape[1] == FEATURES
        nearest = torch.cdist(known, asked, compute_mode="donot_use_mm_for_euclid_dist").argmin(0)
        right.append(float((classes[nearest] == expected).double().mean()))
        seen.append(federation.validation_scores[client])
        assert seen[-1].num_samples == len(expected) == sum(own.validation.sizes)
        assert not seen[-1].logged
    assert [score.accuracy for score in seen] == pytest.approx(right)
    assert float(trainer.callback_metrics["val_accuracy/mean"]) == pytest.approx(sum(right) / 3)
