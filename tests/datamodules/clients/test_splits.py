"""Client views and their loaders, against slow and obvious versions."""

import gc

import lightning as L
import pytest
import torch

from pfl_lightning import data
from pfl_lightning.datamodules import BatchTransform, ClientSplit, RandomCrop, RandomFlip

NORMALISE = BatchTransform((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
AUGMENT = BatchTransform((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), (RandomCrop(2), RandomFlip()))


def make_part(size: int = 23, transform: BatchTransform = NORMALISE) -> ClientSplit:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (100, 3, 6, 6), dtype=torch.uint8, generator=random)
    targets = torch.randint(0, 5, (100,), generator=random)
    return ClientSplit(inputs, targets, torch.randperm(100, generator=random)[:size], transform)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same(batches, expected):
    batches, expected = list(batches), list(expected)
    assert len(batches) == len(expected)
    for (inputs, targets), (wanted_inputs, wanted_targets) in zip(batches, expected, strict=True):
        assert torch.equal(inputs, wanted_inputs)
        assert torch.equal(targets, wanted_targets)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5, 23])
def test_batches_are_those_of_a_plain_loop(batch_size, drop_last):
    part = make_part()
    loader = part.loader(batch_size, generator=seeded(), shuffle=True, drop_last=drop_last)
    inputs = NORMALISE.normalize(torch.stack([part._inputs[i] for i in part.indices]))
    generator = seeded()
    for _ in range(3):  # every pass is an epoch with an order of its own
        batches = torch.randperm(23, generator=generator).split(batch_size)
        batches = [b for b in batches if len(b) == batch_size or not drop_last]
        assert len(loader) == len(batches)
        assert_same(loader, [(inputs[b], part.targets[b]) for b in batches])


def test_augmented_batches_draw_the_order_first_and_then_batch_by_batch():
    part = make_part(transform=AUGMENT)
    loader = part.loader(10, generator=seeded(), shuffle=True, augment=True)
    assert loader.augmented
    generator = seeded()
    expected = []
    for batch in torch.randperm(23, generator=generator).split(10):
        pictures = AUGMENT.augment(part.raw_inputs[batch], generator)
        expected.append((AUGMENT.normalize(pictures), part.targets[batch]))
    assert_same(loader, expected)
    inputs, targets = loader.tensors()
    assert torch.equal(inputs, AUGMENT.normalize(part.raw_inputs))
    assert torch.equal(targets, part.targets)


def test_unshuffled_batches_keep_the_order_of_the_split():
    part = make_part()
    loader = part.loader(10)
    assert_same(loader, loader)
    inputs, targets = loader.tensors()
    assert torch.equal(torch.cat([x for x, _ in loader]), inputs)
    assert torch.equal(torch.cat([y for _, y in loader]), targets)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64


def test_asking_for_augmentation_without_any_is_no_augmentation():
    part = make_part()
    loader = part.loader(10, augment=True)
    assert not loader.augmented
    assert_same(loader, part.loader(10))


@pytest.mark.parametrize("transform", [NORMALISE, AUGMENT])
def test_other_inputs_come_in_the_same_batches(transform):
    part = make_part(transform=transform)
    features = torch.arange(23.0)[:, None]
    generator = seeded()
    loader = part.loader(4, generator=generator, shuffle=True, augment=True)
    other = loader.with_inputs(features)
    assert not other.augmented
    assert_same(other, [(features[b], part.targets[b]) for b in torch.randperm(23, generator=seeded()).split(4)])
    assert torch.equal(other.tensors()[0], features)
    # One generator object serves both: the next epoch of either continues where the last one stopped.
    twin = seeded()
    torch.randperm(23, generator=twin)
    second = torch.randperm(23, generator=twin)[:4]
    assert torch.equal(next(iter(loader))[1], part.targets[second])
    with pytest.raises(ValueError, match=r"one row per sample of the split \(23\), got 5"):
        loader.with_inputs(features[:5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 24, "drop_last": True},
            "batch_size is 24, the split has 23 samples; lower batch_size to at most 23",
        ),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 5, "shuffle": True}, "needs a generator"),
        ({"batch_size": 5, "augment": True}, "needs a generator"),
        ({"batch_size": 5, "views": 0}, "views must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_part(transform=AUGMENT).loader(**arguments)


def test_an_empty_split_has_no_batches():
    part = make_part(0)
    assert len(part) == 0
    assert list(part.loader(5)) == []
    assert part.class_counts(5).tolist() == [0] * 5


def test_splits_share_the_stored_samples_and_count_their_classes():
    part = make_part()
    assert part.class_counts(6).tolist() == [int((part.targets == c).sum()) for c in range(6)]
    inputs = torch.zeros(10, 2)
    parts = [ClientSplit(inputs, torch.zeros(10, dtype=torch.int64), torch.tensor([k]), NORMALISE) for k in range(3)]
    assert all(part._inputs is inputs for part in parts)


def test_a_loader_serves_a_lightning_trainer():
    class Count(L.LightningModule):
        seen = 0

        def training_step(self, batch, batch_idx):
            self.seen += len(batch[0])

        def configure_optimizers(self):
            return None

    module = Count()
    trainer = L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(module, make_part().loader(5, generator=seeded(), shuffle=True))
    assert module.seen == 46


@pytest.mark.parametrize("shuffle", [False, True])
def test_views_without_augmentation_are_the_same_sample_again(shuffle):
    part = make_part()
    plain = part.loader(5, generator=seeded(), shuffle=shuffle)
    loader = part.loader(5, generator=seeded(), shuffle=shuffle, views=3)
    for (inputs, targets), (one, labels) in zip(loader, plain, strict=True):
        assert inputs.shape == (len(targets), 3, 3, 6, 6)
        assert inputs.is_contiguous()
        assert torch.equal(targets, labels)
        assert all(torch.equal(inputs[:, view], one) for view in range(3))
    assert torch.equal(loader.tensors()[0], plain.tensors()[0])


def test_views_are_augmented_as_one_batch_in_which_those_of_a_sample_are_neighbors():
    part = make_part(transform=AUGMENT)
    loader = part.loader(10, generator=seeded(), shuffle=True, augment=True, views=2)
    assert loader.augmented
    generator = seeded()
    for batch, (inputs, targets) in zip(torch.randperm(23, generator=generator).split(10), loader, strict=True):
        rows = torch.stack([part.raw_inputs[i] for i in batch.tolist() for _ in range(2)])
        expected = AUGMENT.normalize(AUGMENT.augment(rows, generator))
        assert torch.equal(inputs, torch.stack([expected[0::2], expected[1::2]], dim=1))
        assert torch.equal(targets, part.targets[batch])
        assert (inputs[:, 0] != inputs[:, 1]).flatten(1).any(dim=1).sum() > len(batch) / 2


def test_one_view_draws_and_looks_as_without_views():
    part = make_part(transform=AUGMENT)
    loaders = [part.loader(10, generator=seeded(), shuffle=True, augment=True, **views) for views in ({}, {"views": 1})]
    for _ in range(2):
        assert_same(*loaders)


def test_other_inputs_keep_the_views():
    part = make_part(transform=AUGMENT)
    loader = part.loader(4, generator=seeded(), shuffle=True, augment=True, views=2)
    features = torch.arange(23.0)[:, None]
    other = loader.with_inputs(features)
    assert other.views == 2
    order = torch.randperm(23, generator=seeded()).split(4)
    assert_same(other, [(features[b][:, None].expand(-1, 2, -1), part.targets[b]) for b in order])


def test_the_stored_samples_survive_normalization_in_place():
    inputs = torch.rand(30, 3, 6, 6)
    before = inputs.clone()
    part = ClientSplit(inputs, torch.zeros(30, dtype=torch.int64), torch.arange(30), AUGMENT)
    for _ in range(2):
        list(part.loader(10, generator=seeded(), augment=True, views=2))
    assert torch.equal(inputs, before)
    assert torch.equal(part.loader(30).tensors()[0], AUGMENT.normalize(before))


@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_pieces_together_are_the_split(size):
    part = make_part(transform=AUGMENT)
    pieces = list(part.split(size))
    assert [len(piece) for piece in pieces] == [min(size, 23 - start) for start in range(0, 23, size)]
    inputs, targets = zip(*(piece.loader(7).tensors() for piece in pieces), strict=True)
    expected = part.loader(7).tensors()
    assert torch.equal(torch.cat(inputs), expected[0])
    assert torch.equal(torch.cat(targets), expected[1])


def test_selected_samples_are_those_at_the_positions():
    part = make_part()
    chosen = part.select(torch.tensor([4, 0, 22]))
    inputs, targets = part.loader(23).tensors()
    got, classes = chosen.loader(3).tensors()
    assert torch.equal(got, inputs[[4, 0, 22]])
    assert torch.equal(classes, targets[[4, 0, 22]])
    assert len(chosen) == 3
    assert len(part) == 23


def test_a_data_set_that_fits_is_copied_to_a_device_once(monkeypatch):
    """One copy for all clients and fits, which ends with the data set; its values: engines/test_other_device."""
    part, device = make_part(), torch.device("meta")
    others = [part.select(torch.arange(5)), part.select(torch.tensor([20, 3, 3]))]
    for room, copied in ((4 * part._inputs.nbytes - 1, False), (4 * part._inputs.nbytes, True)):
        data._COPIES.clear()
        monkeypatch.setattr(data, "free_memory", lambda _, room=room: room)
        found = [split.loader(2, device=device).stored()[0] for split in (part, *others)]
        assert [(inputs.device, len(inputs)) for inputs in found] == [(device, 23), (device, 5), (device, 3)]
        held = [copy[device] for copy in data._COPIES.values()]
        assert [copy is not None for copy in held] == [copied]
        assert data.copy_on(device, part._inputs) is held[0]
    del part, others
    gc.collect()
    assert not data._COPIES


def test_a_data_set_stays_off_the_cpu_and_what_a_client_sees_in_its_own_way_is_not_copied():
    part = make_part()
    assert data.copy_on(torch.device("cpu"), part._inputs) is None
    assert torch.equal(part.inputs_on(torch.device("cpu")), part._inputs[part.indices])
