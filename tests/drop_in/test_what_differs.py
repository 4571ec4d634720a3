"""What differs from a plain run: each line of the list in docs/drop_in.md, as it is said there."""

import re
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassF1Score

from pfl_lightning import FederatedLoop, predict_clients
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPAC, FedPer, FedRep

CLIENTS, ROUNDS, EPOCHS, BATCH_SIZE = 3, 2, 2, 5
TRAIN, VALIDATION, TEST = 36, 18, 12

DOCS = Path(__file__).parents[2] / "docs" / "drop_in.md"


def samples(number: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.randint(CLASSES, (number,), generator=draw))


class Noting(Net):
    """Notes what it finds in its hooks; the notes are the class's, as are all of its attributes."""

    notes: ClassVar[dict[str, list[Any]]] = defaultdict(list)

    def __init__(self) -> None:
        super().__init__()
        self.score = MulticlassF1Score(CLASSES, average="macro")
        self.evaluations = 0
        self.register_buffer("mark", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def setup(self, stage: str) -> None:
        self.notes["setup"].append(stage)

    def on_train_start(self) -> None:
        trainer = self.trainer
        self.notes["trainer"].append((trainer.max_epochs, {*map(type, trainer.callbacks)} & {Outside, FederatedLoop}))
        self.notes["batches"].append((trainer.num_training_batches, int(trainer.estimated_stepping_batches)))
        self.notes["momentum"].append(len(self.optimizers().state))
        self.notes["start"].append((self.current_epoch, self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes["sizes"].append(len(batch[1]))
        self.notes["attribute"].append(getattr(self, "last", None))
        self.last = [batch_idx]
        if batch_idx == 0:
            warnings.warn("the first batch", stacklevel=1)
        self.mark += batch[0].mean()
        self.seen += len(batch[1])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.score.update(self(batch[0]), batch[1])
        self.notes["validated"].append(len(batch[1]))
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("f1", self.score.compute())
        self.score.reset()
        self.notes["of an evaluation"].append(self.evaluations)
        self.evaluations += 1
        self.notes["evaluation"].append(
            (self.current_epoch, self.global_step, "train_loss" in self.trainer.callback_metrics)
        )
        if self.logger is not None:
            self.logger.log_metrics({"own": 1.0})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_end(self) -> None:
        self.notes["rate"].append(self.optimizers().param_groups[0]["lr"])


@dataclass
class Run:
    """What a run has shown."""

    module: Noting
    trainer: L.Trainer
    loop: FederatedLoop
    notes: dict[str, list[Any]]
    outside: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    folder: Path = Path()


class Outside(L.Callback):
    """A callback of the Trainer."""

    def __init__(self, notes: dict[str, list[Any]]) -> None:
        self.notes = notes

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.notes["epochs"].append(trainer.current_epoch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.notes["step"].append(trainer.global_step)


def loaders() -> list[Any]:
    return [DataLoader(samples(n, n), BATCH_SIZE, shuffle=n == TRAIN) for n in (TRAIN, VALIDATION)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Run:
    Noting.notes.clear()
    loop, notes = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1, epochs=EPOCHS), defaultdict(list)
    folder = tmp_path_factory.mktemp("logs")
    trainer = quiet_trainer(ROUNDS, loop, Outside(notes), logger=CSVLogger(folder), num_sanity_val_steps=2)
    module = Noting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders())
    notes["warnings"] = [str(each.message) for each in caught if "the first batch" in str(each.message)]
    return Run(module, trainer, loop, {name: list(own) for name, own in Noting.notes.items()}, notes, folder)


def lines() -> list[str]:
    """Those of the list, with what stands in bold."""
    text = (
        DOCS.read_text().partition("## What differs from your plain run")[2].partition("\n```")[0].partition("\n## ")[0]
    )
    return re.findall(r"^- (?:\*\*)(.+?)\*\*", text, flags=re.MULTILINE)


def test_each_line_of_the_list_has_a_test():
    names = [name for name, value in globals().items() if name.startswith("test_") and value.__doc__ is not None]
    tested = {line for name in names for line in globals()[name].__doc__.strip(".").split(", ")}
    assert 10 < len(lines()) <= 26
    assert set(lines()) == tested


def test_rounds(run):
    """Rounds."""
    assert run.outside["epochs"] == [0, 1]
    assert run.notes["sizes"] == [5, 5, 2] * EPOCHS * CLIENTS * ROUNDS  # each client's 12 of 36 items
    assert run.outside["step"] == [ROUNDS]


def test_logged_values(run):
    """Logged values."""
    scores, found = run.loop.federation.validation_scores, run.trainer.callback_metrics
    sizes = [len(run.loop.data.client_data(client).validation) for client in range(CLIENTS)]
    for name in ("val_loss", "f1"):
        mean = sum(n * scores[client].logged[name] for client, n in enumerate(sizes)) / sum(sizes)
        assert float(found[name]) == pytest.approx(mean, abs=1e-6)
    pooled, model = MulticlassF1Score(CLASSES, average="macro"), run.loop.federation.global_model().eval()
    for client in range(CLIENTS):
        for inputs, classes in run.loop.data.client_data(client).validation.loader(5):
            pooled.update(model(inputs), classes)
    assert abs(float(pooled.compute()) - float(found["f1"])) > 1e-4  # a mean of scores is no score


def test_optimizers(run):
    """Optimizers."""
    assert run.notes["momentum"] == [0] * CLIENTS * ROUNDS


def test_counts_in_local_fits(run):
    """Schedules and counts."""
    assert run.notes["start"] == [(0, 0)] * CLIENTS + [(EPOCHS, 3 * EPOCHS)] * CLIENTS
    assert run.notes["batches"] == [(3, 3 * EPOCHS * ROUNDS)] * CLIENTS * ROUNDS
    assert run.notes["rate"] == pytest.approx([0.2 / 4] * CLIENTS + [0.2 / 16] * CLIENTS)


@pytest.mark.parametrize("method", [FedPAC, FedRep])
def test_phases(method):
    """Phases."""

    class Phased(Net):
        seen: ClassVar[list[Any]] = []

        def configure_optimizers(self) -> Any:
            self.seen.append("optimizers")
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            self.seen.append("fit")

        def on_train_epoch_start(self) -> None:
            self.seen.append((self.current_epoch, self.trainer.max_epochs, self.fc.weight.requires_grad))

    trainer = quiet_trainer(2, FederatedLoop(method=method, num_clients=1, seed=1, head="fc"))
    trainer.fit(Phased(), *loaders())
    assert (Phased.seen.count("optimizers"), Phased.seen.count("fit")) == (4, 4)
    epochs = [seen for seen in Phased.seen if isinstance(seen, tuple)]
    assert epochs == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]


def test_counts_in_evaluations(run):
    """Counts in evaluations."""
    sanity, rounds = run.notes["evaluation"][:2], run.notes["evaluation"][2:]
    assert [own[:2] for own in sanity] == [(0, 0)] * 2  # clients
    assert [own[:2] for own in rounds] == [(0, 1)] * CLIENTS + [(1, 2)] * CLIENTS


def test_evaluated_items(run):
    """Evaluated items."""
    data = run.loop.data
    for client in range(CLIENTS):
        assert 0 < len(data.client_data(client).validation) <= len(data.client_data(client).train)
    models = [run.loop.federation.client_model(client) for client in range(CLIENTS)]
    assert len(models) == len(run.loop.federation.validation_scores) == CLIENTS


def test_items_that_are_set_aside():
    """Items set aside."""
    loop = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1)
    quiet_trainer(1, loop).fit(Net(), DataLoader(samples(90, 1), BATCH_SIZE))
    parts = [loop.data.client_data(client) for client in range(CLIENTS)]
    kept = sum(len(part.train) + len(part.validation) for part in parts)
    assert abs(kept - 0.75 * 90) < 1  # a quarter of all for tests
    assert all(0 < len(part.test) <= len(part.train) for part in parts)
    assert all(abs(len(part.validation) - 0.1 * kept / CLIENTS) < 1 for part in parts)


def test_attributes(run):
    """Python attributes."""
    found = run.notes["attribute"]
    assert found[: 3 * EPOCHS] == [None, [0], [1], [2], [0], [1]]
    assert found[:: 3 * EPOCHS] == [None] * CLIENTS + [[2]] * CLIENTS * (ROUNDS - 1)  # each client's own
    assert run.loop.federation.client_model(0).last == [2]
    assert run.notes["of an evaluation"] == [0] * (2 + CLIENTS * ROUNDS)


def test_after_the_fit(run):
    """After the fit."""
    expected = run.loop.federation.global_model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.module.state_dict().items())
    assert not hasattr(run.module, "last")


def test_warnings(run):
    """Warnings."""
    (message,) = run.outside["warnings"]
    assert "client 0" in message


def test_class_attributes(run):
    """Class attributes and globals."""
    assert len(run.notes["rate"]) == CLIENTS * ROUNDS
    assert Noting.notes is type(run.loop.federation.client_model(0)).notes


def test_buffers(run):
    """Buffers."""
    client = run.loop.federation.client_model(0)
    assert int(client.seen) == 12 * EPOCHS * ROUNDS  # its own
    assert int(run.module.seen) == 0
    assert float(run.module.mark) != 0.0  # a mean over the clients


def test_the_trainer_inside(run):
    """`self.trainer`."""
    assert run.notes["trainer"] == [(EPOCHS * ROUNDS, set())] * CLIENTS * ROUNDS


def test_callback_metrics(run):
    """`self.trainer.callback_metrics`."""
    assert not any(own[2] for own in run.notes["evaluation"])  # train_loss
    assert {"train_loss", "val_loss", "val_accuracy/mean"} <= run.trainer.callback_metrics.keys()


def test_callbacks(run):
    """Callbacks."""

    class OfBatches(L.Callback):
        seen: ClassVar[list[Any]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch)

    loop = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1, local_callbacks=[OfBatches()])
    quiet_trainer(1, loop).fit(Net(), *loaders())
    assert [len(batch) for batch in OfBatches.seen] == [2] * 3 * CLIENTS  # inputs and classes
    OfBatches.seen.clear()
    with pytest.warns(UserWarning, match="OfBatches"):
        quiet_trainer(1, OfBatches(), FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1)).fit(Net(), *loaders())
    assert torch.cat(OfBatches.seen).tolist() == [0, 1, 2]  # numbers of clients


def test_loggers(run):
    """`self.logger`."""
    (file,) = run.folder.rglob("metrics.csv")
    names = file.read_text().splitlines()[0].split(",")
    assert "client_0/own" in names
    assert not any("client_1" in name or name == "own" for name in names)


def test_setup_is_called_once(run):
    """Hooks."""
    assert run.notes["setup"] == ["fit"]
    assert len(run.notes["start"]) == CLIENTS * ROUNDS


class Divided(Net):
    """Looks at its data before and after there are clients."""

    seen: ClassVar[list[int]] = []

    def train_dataloader(self) -> Any:
        self.samples = samples(TRAIN, 1)
        self.counts = torch.bincount(self.samples.tensors[1], minlength=CLASSES)
        return DataLoader(self.samples, BATCH_SIZE)

    def on_train_start(self) -> None:
        self.seen.append((int(self.counts.sum()), len(self.samples)))


def test_data_before_there_are_clients():
    """Data before there are clients."""
    Divided.seen.clear()
    quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=4, seed=1)).fit(Divided(), val_dataloaders=loaders()[1])
    assert Divided.seen == [(TRAIN, TRAIN // 4)] * 4


class Harder(Dataset[Any]):
    def __init__(self) -> None:
        self.level, self.hardness, self.own = 0, torch.zeros(1), samples(TRAIN, 1)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, place: int) -> Any:
        return self.own[place]


class Curriculum(Net):
    seen: ClassVar[list[Any]] = []

    def on_train_start(self) -> None:
        dataset = self.trainer.train_dataloader.dataset
        dataset.level += 1
        dataset.hardness += 1
        self.seen.append((dataset.level, int(dataset.hardness)))


def test_data_sets():
    """Data sets."""
    Curriculum.seen.clear()
    loop = FederatedLoop(method=FedAvg, num_clients=2, seed=1)
    quiet_trainer(2, loop).fit(Curriculum(), DataLoader(Harder(), BATCH_SIZE), loaders()[1])
    assert Curriculum.seen == [(1, 1), (1, 2), (2, 3), (2, 4)]


class Shown(Net):
    orders: ClassVar[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.orders.append(batch[0])
        return super().training_step(batch, batch_idx)


def test_random_draws():
    """Random draws."""

    def order(*callbacks: Any) -> torch.Tensor:
        Shown.orders.clear()
        L.seed_everything(5, verbose=False)
        quiet_trainer(1, *callbacks).fit(Shown(), *loaders())
        return torch.cat(Shown.orders)

    plain, one, again = order(), *(order(FederatedLoop(method=FedAvg, num_clients=1, seed=1)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, plain)
    assert torch.equal(one.sort(dim=0).values, plain.sort(dim=0).values)


def test_samplers():
    """Samplers."""
    Shown.orders.clear()
    weights = torch.arange(float(TRAIN))
    loader = DataLoader(samples(TRAIN, 1), BATCH_SIZE, sampler=WeightedRandomSampler(weights, 2 * TRAIN))
    loop = FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1)
    quiet_trainer(1, loop).fit(Shown(), loader, loaders()[1])
    assert abs(sum(map(len, Shown.orders)) - 2 * TRAIN) < CLIENTS  # each client's share, rounded
    own = {tuple(row.tolist()) for row in torch.cat(Shown.orders[: len(Shown.orders) // CLIENTS])}
    assert own <= {tuple(item[0].tolist()) for item in Rows(loop.data.client_data(0).train)}


class Rows:
    """Items of a client."""

    def __init__(self, part: Any) -> None:
        self.items = [part.source.dataset[place] for place in part.indices.tolist()]

    def __iter__(self) -> Any:
        return iter(self.items)


class EveryFourth(Net):
    """Steps its optimizer after every fourth batch, of which an epoch has three; notes how an epoch begins."""

    begun: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.fc.weight.grad is None)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 4 == 3:
            self.optimizers().step()


def test_accumulated_gradients():
    """Optimizers."""
    for callbacks, expected in (([], False), ([FederatedLoop(method=FedAvg, num_clients=1, seed=1)], True)):
        EveryFourth.begun.clear()
        quiet_trainer(2, *callbacks).fit(EveryFourth(), DataLoader(samples(12, 1), BATCH_SIZE))
        assert EveryFourth.begun == [True, expected]


class Outlying(Net):
    """Goes far in the second client's second fit."""

    fits: ClassVar[list[int]] = []

    def on_train_end(self) -> None:
        self.fits.append(0)
        if len(self.fits) == CLIENTS + 2:
            with torch.no_grad():
                self.fc.weight += 1e7


@pytest.mark.parametrize(("ratio", "left_out"), [({}, 1), ({"max_update_ratio": None}, 0)])
def test_left_out(ratio, left_out):
    """Left out."""
    Outlying.fits.clear()
    module, trainer = Outlying(), quiet_trainer(2, FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1, **ratio))
    trainer.fit(module, *loaders())
    assert int(trainer.callback_metrics["train/clients_left_out"]) == left_out
    assert (float(module.fc.weight.detach().abs().max()) > 1e3) == (not left_out)


def test_predictions():
    """Predictions."""

    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    module, loop = Predicting(), FederatedLoop(method=FedPer, num_clients=CLIENTS, seed=1, head="fc")
    first = {name: value.clone() for name, value in module.fc.state_dict().items()}
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, *loaders())
    assert all(torch.equal(module.fc.state_dict()[name], value) for name, value in first.items())
    (found,) = trainer.predict(module, DataLoader(samples(4, 1), batch_size=4))
    assert torch.equal(found, loop.federation.global_model().eval()(samples(4, 1).tensors[0]))
    own = predict_clients(loop.federation, DataLoader(samples(4, 1), batch_size=4))
    expected = loop.federation.client_model(1).eval()(samples(4, 1).tensors[0])
    assert torch.equal(torch.cat(own[1]), expected)
    assert not torch.equal(expected, found)


def test_checkpoints(run, tmp_path):
    """Checkpoints."""
    run.trainer.strategy.connect(run.loop.federation)
    run.trainer.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["state_dict"].keys() == run.module.state_dict().keys()
    assert content["optimizer_states"] == []
    assert "pfl_lightning_federation" in content
    for name, value in run.module.state_dict().items():
        assert torch.equal(content["state_dict"][name], value)


@pytest.mark.parametrize(
    "options", [{"max_steps": 3}, {"min_steps": 3}, {"val_check_interval": 0.5}, {"overfit_batches": 1}]
)
def test_what_is_refused(options):
    """Refused."""
    trainer = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=CLIENTS, seed=1), **options)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        trainer.fit(Net(), *loaders())
