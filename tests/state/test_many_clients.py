"""Thousands of clients cost what is personal and what takes part, in memory, on disk and in checkpoints."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from _helpers.methods import often
from _helpers.resume import play
from _helpers.toy import Toy, assert_same, for_toy, linear_encoder, normed_encoder, run, tiny_encoder, whole_state
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl_lightning.errors import FederationError
from pfl_lightning.methods import APPLE, METHODS, DualFed, FedBN, FedClassAvg, FedEMA, FedPAC, FedPer, LocalOnly, PFedHN
from pfl_lightning.state.checkpoints import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:.*compares 2 augmented views", "ignore:.*has no batch normalization")

ON_DISK, IN_MEMORY = {"client_state_memory_gb": 0}, {"client_state_memory_gb": None}


def stores(federation):
    """Every store of the federation that can hold anything."""
    found = [*federation.personal.stores, *federation.server.client_states()]
    return [store for store in found if store.most_bytes]


# ---------------------------------------------------------------------- in memory and on disk

CASES = {
    "LocalOnly": (LocalOnly, tiny_encoder, {}),
    "FedPer": (FedPer, tiny_encoder, {}),
    "FedPAC, heads on the server": (FedPAC, tiny_encoder, {}),
    "FedBN, counters without dimensions": (FedBN, normed_encoder, {}),
    "DualFed": (DualFed, normed_encoder, {}),
    "FedEMA, networks of the clients' own": (FedEMA, normed_encoder, {}),
    "FedClassAvg, two architectures": (FedClassAvg, [tiny_encoder, linear_encoder], {}),
    "LocalOnly in bfloat16": (LocalOnly, normed_encoder, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize(("method", "encoder", "options"), CASES.values(), ids=CASES)
def test_results_are_the_same_on_disk(tmp_path, method, encoder, options):
    fit, cohorts = for_toy(method, lr=0.05, epochs=1), ([0, 2, 3], [1, 2], [0, 3])
    options |= {"encoder": encoder, "cohorts": cohorts, "data": Toy(batch_size=9)}
    memory = run(fit, 3, store=IN_MEMORY, **options)
    disk = run(fit, 3, store=ON_DISK | {"spill_dir": str(tmp_path)}, **options)
    assert stores(disk)
    assert all(store.on_disk for store in stores(disk))
    assert not any(store.on_disk for store in stores(memory))
    assert_same(whole_state(disk), whole_state(memory))
    assert disk.validation_scores == memory.validation_scores
    assert disk.test_scores == memory.test_scores
    assert not list(tmp_path.iterdir())


@pytest.mark.repeated
@pytest.mark.parametrize(("first", "then"), [(ON_DISK, IN_MEMORY), (IN_MEMORY, ON_DISK)], ids=["from disk", "to disk"])
@pytest.mark.parametrize("case", [case for case in CASES if "," in case])
def test_a_run_resumes_with_states_on_disk_or_in_memory(tmp_path, case, first, then):
    method, encoder, options = CASES[case]
    fit = for_toy(method, lr=0.05, epochs=1)
    options |= {"encoder": encoder, "data": Toy(batch_size=9), "plugins": [AtomicCheckpointIO()]}
    whole = play(tmp_path / "whole", 4, fit, **options)
    play(tmp_path / "parts", 2, fit, store=first, **options)
    resumed = play(tmp_path / "parts", 4, fit, store=then, ckpt_path=str(tmp_path / "parts" / "last.ckpt"), **options)
    assert all(store.on_disk == (then is ON_DISK) for store in stores(resumed))
    assert_same(whole_state(resumed), whole_state(whole))
    assert resumed.test_scores == whole.test_scores


def test_small_states_stay_in_memory_by_default():
    assert not any(store.on_disk for store in stores(run(partial(LocalOnly, epochs=1))))


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_limits_without_meaning_are_refused(limit):
    with pytest.raises(ValueError, match="client_state_memory_gb must be a finite number of at least 0"):
        run(FedPer, store={"client_state_memory_gb": limit})


def test_a_missing_folder_is_refused_before_the_first_round(tmp_path):
    with pytest.raises(FederationError, match=r"cannot be stored in .*nowhere: No such file.*spill_dir"):
        run(FedPer, store=ON_DISK | {"spill_dir": str(tmp_path / "nowhere")})


def test_a_checkpoint_that_is_read_as_needed_outlives_its_file(tmp_path):
    """The loaded state is a copy: the file may be gone, or overwritten, in the next round."""
    fit, plugins = partial(FedPer, lr=0.05, epochs=1), [AtomicCheckpointIO()]
    first = play(tmp_path, 1, fit, plugins=plugins)
    path = tmp_path / "last.ckpt"
    resumed = run(fit, 1, ckpt_path=str(path), plugins=plugins)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same(whole_state(resumed), whole_state(first))


# ---------------------------------------------------------------------- cost of clients that do not take part


def checkpoint_of(method, clients, path, **options):
    """Checkpoint of a federation after two rounds in which clients 0 to 3 take part and six are evaluated."""
    saver = ModelCheckpoint(path, filename="saved")
    federation = run(
        for_toy(method, epochs=1),
        2,
        data=Toy([[0, 1, 2, 0]] * clients),
        cohorts=[[0, 1], [3, 1]],
        limit_val_batches=6,
        callbacks=[saver],
        enable_checkpointing=True,
        **options,
    )
    return federation, path / "saved.ckpt"


def tensors(value):
    """Every tensor of a checkpoint."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)


def storage_bytes(value):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors(value))


# The server of PFedHN has an embedding of each client, a client of APPLE a number for each.
ALIKE = [method for method in METHODS if method not in (APPLE, PFedHN)]


@pytest.mark.parametrize("method", often(ALIKE), ids=lambda method: method.__name__)
def test_what_a_federation_keeps_does_not_grow_with_its_clients(tmp_path, method):
    kept, sizes = [], []
    for clients in (8, 120):
        federation, path = checkpoint_of(method, clients, tmp_path / str(clients))
        server = storage_bytes(list(federation.server.buffers())) + storage_bytes(list(federation.server.parameters()))
        personal = sum(store.num_bytes for store in stores(federation))
        content = torch.load(path, weights_only=True)
        kept.append((server, personal, storage_bytes(content), len(list(tensors(content)))))
        sizes.append(path.stat().st_size)
    assert kept[0] == kept[1]
    assert sizes[1] == pytest.approx(sizes[0], abs=1000)


@pytest.mark.parametrize("encoder", [tiny_encoder, [tiny_encoder, linear_encoder]], ids=["one", "two architectures"])
@pytest.mark.parametrize("store", [ON_DISK, IN_MEMORY], ids=["disk", "memory"])
def test_two_thousand_clients_make_the_checkpoint_of_twenty(tmp_path, encoder, store):
    few, many = (
        checkpoint_of(LocalOnly, clients, tmp_path / str(clients), encoder=encoder, store=store)[1].stat().st_size
        for clients in (20, 2000)
    )
    assert many == pytest.approx(few, abs=1000)


MEASURE = """
import sys, torch
from pfl_lightning.state.checkpoints import AtomicCheckpointIO
from pfl_lightning.state.client_states import ClientStates

def anonymous():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1])

def stored(place):
    states = ClientStates({"w": torch.zeros(250_000)}, 1000)  # a gigabyte, if it were written
    if place == "disk":
        states.move_to_disk(sys.argv[1])
    return states

for place in ("disk", "memory"):
    path, row, before = sys.argv[1] + "/states.ckpt", torch.zeros(250_000), anonymous()
    states = stored(place)
    for client in range(1000):
        states.get(client)
    for client in range(60):
        states.set(client, {"w": row})
    print(anonymous() - before)
    AtomicCheckpointIO().save_checkpoint(
        {"state_dict": states.state_dict(), "pytorch-lightning_version": "2"}, path
    )
    print(anonymous() - before)
    other, content = stored(place), AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    other.load_state_dict(content["state_dict"])
    print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_memory_that_written_rows_take(tmp_path):
    """Sixty rows of a megabyte are written, saved and loaded; anonymous memory is what cannot be given up."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for kilobytes, rows in zip(map(int, output.split()), (0, 0, 0, 60, 60, 120), strict=True):
        assert rows * 976 - 1 <= kilobytes < rows * 977 + 15_000
