"""Configs with one mistake each, made from a small working one; a run of each; and what is wrong with how it ended."""

import contextlib
import copy
import io
import random
import resource
import signal
import warnings
from dataclasses import dataclass
from unittest import mock

import yaml

from pfl_lightning.cli import main
from pfl_lightning.cli.federated_cli import FederatedCLI

ALL_SUBCOMMANDS = FederatedCLI.subcommands()
SECONDS, MEMORY = 120, 12 * 2**30
MAX_LINES, MAX_WIDTH = 5, 1200

BASE = {
    "seed_everything": 0,
    "run_dir": "runs/fuzz",
    "model": {
        "method": {
            "class_path": "pfl_lightning.methods.FedPAC",
            "init_args": {"lr": 0.02, "epochs": 1, "head_lr": 0.1, "head_epochs": 1, "momentum": 0.5},
        },
        "encoder": "mlp",
        "engine": {"class_path": "pfl_lightning.SequentialEngine", "init_args": {"gradient_clip_val": 1.0}},
    },
    "data": {
        "class_path": "pfl_lightning.datamodules.Digits",
        "init_args": {
            "batch_size": 20,
            "validation_share": 0.2,
            "novel_clients": 0,
            "augment": [{"class_path": "pfl_lightning.datamodules.RandomRotation", "init_args": {"degrees": 15}}],
            "partition": {
                "class_path": "pfl_lightning.datamodules.DominantClasses",
                "init_args": {"num_clients": 3, "samples_per_client": 20},
            },
        },
    },
    "personalize": {"train": "linear", "epochs": 1, "lr": 0.01},
    "loop": {"cohort": 1.0, "min_clients": 1},
    "checkpoint": {"monitor": "val_accuracy/mean", "mode": "max"},
    "trainer": {
        "max_epochs": 1,
        "fast_dev_run": True,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val_accuracy/mean", "patience": 3}}],
    },
}
METHODS = {
    "FedAvg": {"fine_tune": "head", "fine_tune_epochs": 1, "fine_tune_lr": 0.01},
    "FedRep": {"head_epochs": 1, "head_lr": 0.1},
    "FedProx": {"mu": 0.01},
    "Ditto": {"lam": 0.1, "personal_epochs": 1, "personal_lr": 0.1},
    "FedProto": {"alignment": 1.0},
    "FedGH": {"server_lr": 0.01},
    "FedBABU": {"fine_tune_epochs": 1},
    "FedAvg ": {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}},
    "DCPFL": {"virtual_features": 10, "calibration_epochs": 1, "server_lr": 0.01},
    "FedPAC": {"threshold": 0.001},
}
PARTITIONS = {
    "IID": {},
    "ClassesPerClient": {"classes_per_client": 3},
    "DirichletOverClasses": {"alpha": 0.5},
    "DirichletOverClients": {"alpha": 0.5},
    "DominantClasses": {"uniform_share": 0.2},
}
ENCODERS = (
    "mlp",
    ["mlp", "mlp"],
    {"class_path": "pfl_lightning.encoders.MLP", "init_args": {"hidden": [8], "out_features": 8}},
    {"class_path": "pfl_lightning.encoders.ByShare", "init_args": {"encoders": ["mlp", "mlp"], "shares": [0.5, 0.5]}},
)
# Counts are small or absurd: a million epochs are allowed, and take their time.
VALUES = (
    *(
        -1,
        0,
        1,
        2,
        -(10**18),
        10**18,
        10**400,
        0.5,
        -0.5,
        1e30,
        -1e30,
        1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(
        None,
        True,
        False,
        "",
        " ",
        "x",
        "None",
        "1e",
        "0x10",
        "1,2",
        "\0",
        "é😀",
        "a" * 5000,
        "${HOME}",
        "{",
        "[1, 2",
        "*",
    ),
    *([], [[]], [None], [1, 2], ["x"], {}, {"a": 1}, {"class_path": "x"}, {"class_path": None}, {"init_args": {}}),
    *(
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.hub.load",
        "no.such.module",
        "pfl_lightning",
        "..",
        ".x",
    ),
    *(
        {"class_path": "os.system"},
        {"class_path": "subprocess.Popen", "init_args": {"args": ["true"]}},
        "functools.partial",
    ),
    *({"class_path": "torch.nn.Linear", "init_args": {"in_features": -1}}, "pfl_lightning.methods.FedAvg", [10**400]),
    *(
        "/dev/null/x",
        "no/such/file.yaml",
        "linear",
        "max",
        "auto",
        "mlp",
        "best",
        20,
        1e-320,
        "2026-01-01",
        "1:30",
        {1: 2},
    ),
)
NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    50,
    300,
    -0.0,
    0.5,
    1.5,
    1e-320,
    1e-8,
    1e8,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
NUMBERS += (-(2**31), 2**31, 2**62, 2**63, 2**64, 10**18, 10**30, 10**400)
CLASSES = (
    *(
        f"methods.{name}"
        for name in ("FedAvg", "FedPAC", "FedBN", "FedGH", "LocalOnly", "FedClassAvg", "DualFed", "Calibre")
    ),
    *(
        f"datamodules.{name}"
        for name in ("IID", "Domains", "FromFile", "Quantity", "ConceptShift", "FeatureShift", "Digits")
    ),
    *(f"datamodules.{name}" for name in ("STL10", "ImageFolder", "FromDatasets", "RandomCrop", "ColorJitter")),
    *(
        "encoders.ResNet18",
        "encoders.ByClient",
        "encoders.RoundRobin",
        "encoders.FedPACCNN",
        "encoders.EncoderAssignment",
    ),
    *("VectorizedEngine", "TrainerEngine", "engines.Engine", "callbacks.ResultsWriter", "callbacks.FederatedLoop"),
)
TEXTS = (
    "\t",
    "\0",
    "%",
    "&a ",
    "*a",
    "!!python/object/apply:os.system ['true']",
    "- ",
    ": ",
    "{",
    "]",
    '"',
    "\ufeff",
    "? ",
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what is wrong with it, if anything, and its last words."""

    wrong: str
    said: str


def mutated(seed):
    """A config as text, with one mistake (or, by chance, none)."""
    rng = random.Random(seed)
    config = copy.deepcopy(BASE)
    name = rng.choice(list(METHODS))
    shared = {"lr": 0.02, "epochs": 1, "momentum": 0.5}
    if name in ("FedPAC", "FedRep"):
        shared |= {"head_lr": 0.1, "head_epochs": 1}
    config["model"]["method"] = {
        "class_path": f"pfl_lightning.methods.{name.strip()}",
        "init_args": shared | copy.deepcopy(METHODS[name]),
    }
    rule = rng.choice(list(PARTITIONS))
    config["data"]["init_args"]["partition"]["class_path"] = f"pfl_lightning.datamodules.{rule}"
    config["data"]["init_args"]["partition"]["init_args"] |= PARTITIONS[rule]
    config["model"]["encoder"] = copy.deepcopy(rng.choice(ENCODERS))
    return rng.choice((_alike, _alike, _alike, _alike, _value, _value, _key, _structure, _text))(config, rng)


def _places(config):
    """Every mapping and list of a config, with each of its keys."""
    found, waiting = [], [config]
    while waiting:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


def dump(config):
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _alike(config, rng):
    """Another value of the same kind, which the parser accepts: it is refused later, or by nothing."""
    places = [(h, k) for h, k in _places(config) if isinstance(h[k], int | float | str) and not isinstance(h[k], bool)]
    holder, key = rng.choice(places)
    value = holder[key]
    if isinstance(value, str):
        found = [other[k] for other, k in _places(BASE) if isinstance(other[k], str)]
        classes = [f"pfl_lightning.{name}" for name in CLASSES]
        kinds = classes if key == "class_path" else [*found, *(text for text in VALUES if isinstance(text, str))]
    else:
        kinds = [number for number in NUMBERS if isinstance(value, float) or isinstance(number, int)]
    holder[key] = rng.choice(kinds)
    return dump(config)


def _value(config, rng):
    holder, key = rng.choice(_places(config))
    holder[key] = copy.deepcopy(rng.choice(VALUES))
    return dump(config)


def _key(config, rng):
    holder, key = rng.choice([(holder, key) for holder, key in _places(config) if isinstance(holder, dict)])
    value = holder[key]
    how = rng.choice(("typo", "gone", "twice", "number", "null", "empty", "dots", "moved"))
    if how == "twice":
        text = dump(config)
        line = next((line for line in text.splitlines() if line.lstrip(" -").startswith(f"{key}: ")), None)
        return text.replace(line, f"{line}\n{line.replace('- ', '  ', 1)}") if line else text
    del holder[key]
    if how == "moved":
        other = rng.choice([other for other, _ in _places(config) if isinstance(other, dict)] or [config])
        other[key] = value
    elif how != "gone":
        new = {"typo": f"{key[:-1]}" or "x", "number": 7, "null": None, "empty": "", "dots": f"{key}.{key}"}[how]
        holder[new] = value
    return dump(config)


def _structure(config, rng):
    holder, key = rng.choice(_places(config))
    value = holder[key]
    nested = value
    for _ in range(rng.choice((3, 30, 3000))):
        nested = [nested]
    changes = {
        "list": lambda: [value],
        "pair": lambda: [value, copy.deepcopy(value)],
        "mapping": lambda: {str(key): value},
        "text": lambda: str(value),
        "class": lambda: {"class_path": value},
        "arguments": lambda: {"init_args": value},
        "other": lambda: copy.deepcopy(rng.choice(_places(config))[0]),
        "nested": lambda: nested,
    }
    how = rng.choice(list(changes))
    if how == "nested":
        levels = rng.choice((3, 30, 3000))
        holder[key] = "NESTED"
        return dump(config).replace("NESTED", "[" * levels + "1" + "]" * levels)
    holder[key] = changes[how]()
    return dump(config)


def _text(config, rng):
    text = dump(config)
    lines = text.splitlines()
    line, place = rng.randrange(len(lines)), rng.randrange(len(text))
    return rng.choice(
        (
            text[:place],
            text[:place] + rng.choice(TEXTS) + text[place:],
            "\n".join(lines[:line] + lines[line + 1 :]),
            "\n".join([*lines[:line], " " + lines[line], *lines[line + 1 :]]),
            "\n".join([*lines[:line], lines[line].lstrip(), *lines[line + 1 :]]),
            "",
            "a: &a [*a]\n",
            f"--- \n{text}\n---\n{text}",
            "[" + text + "]",
            text.replace("\n", "\r\n"),
            text.replace(": ", ":", 1),
        )
    )


def write(path, text):
    """Write a config; an odd one has bytes that are no UTF-8."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


@contextlib.contextmanager
def limits():
    """Limits of time and memory for what runs within."""

    def over(*_):
        raise KeyboardInterrupt(f"took over {SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def only_fit():
    """The subcommands without those that are not run: their parsers would take most of the time."""
    return {"fit": ALL_SUBCOMMANDS["fit"]}


def outcome(path, *more):
    """Run ``pfl fit`` with a config, and judge how it ended."""
    out, errors = io.StringIO(), io.StringIO()
    try:
        with (
            limits(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
            warnings.catch_warnings(),
            mock.patch.object(FederatedCLI, "subcommands", staticmethod(only_fit)),
        ):
            warnings.simplefilter("ignore")
            main(["fit", "--config", str(path), *more])
    except SystemExit as stopped:
        if stopped.code in (None, 0):
            return Outcome("", "")
        text = errors.getvalue()
        said = stopped.code if isinstance(stopped.code, str) else text[max(text.find("pfl: "), 0) :]
        return Outcome(judge(said), said)
    except BaseException as error:
        return Outcome(f"traceback: {type(error).__name__}", f"{type(error).__name__}: {error}"[:2000])
    return Outcome("", "")


def judge(said):
    """What is wrong with an error message, if anything."""
    lines = said.strip().splitlines()
    if not said.startswith("pfl: ") or len(lines[0]) < 15:
        return "no message"
    if "Traceback" in said:
        return "traceback in the message"
    if "Namespace(" in said or "NestedArg(" in said or "<class" in said:
        return "internals of the parser"
    if len(lines) > MAX_LINES or max(map(len, lines)) > MAX_WIDTH:
        return f"{len(lines)} lines of up to {max(map(len, lines))} characters"
    return ""
