"""What a config may name: classes and functions must be what they stand for, and nothing else is called."""

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
import yaml
from _helpers.configs import digits_config
from jsonargparse import Namespace

from pfl_lightning.cli import main
from pfl_lightning.cli.allowed import check_names
from pfl_lightning.errors import UsageError
from pfl_lightning.names import is_own_code
from pfl_lightning.study.check import config_errors

TOUCHED = """
from pathlib import Path
from torch import nn
from pfl_lightning.encoders import MLP
from pfl_lightning.methods import FedAvg

def _called(*args, **kwargs):
    Path(__file__).with_name("called").touch()

def undeclared(*args, **kwargs):
    _called()

def _use():
    Path(__file__).with_name("used").touch()

def encoder(input_shape) -> nn.Module:
    _use()
    return MLP(input_shape, hidden=(8,), out_features=8)

def method(encoder: nn.Module, num_classes: int) -> FedAvg:
    _use()
    return FedAvg(encoder, num_classes, epochs=1)

def listener(trainer, pl_module):
    _use()

class Anything:
    def __init__(self, *args, **kwargs):
        _called()

    def __call__(self, *args, **kwargs):
        _called()

class Needy(FedAvg):
    def __init__(self, encoder: nn.Module, num_classes: int, *, tool=None, **options):
        super().__init__(encoder, num_classes, **options)
"""
ANYTHING = {"class_path": "own_code.Anything"}
CASES = [
    ("model.encoder", "own_code.Anything"),
    ("model.encoder", "own_code.undeclared"),
    ("model.encoder", ANYTHING),
    ("model.encoder", ["mlp", "own_code.Anything"]),
    ("model.encoder", {"class_path": "pfl_lightning.encoders.RoundRobin", "init_args": {"encoders": [ANYTHING]}}),
    ("model.method", "own_code.undeclared"),
    ("model.method", ANYTHING),
    ("model.method.init_args.optimizer", "own_code.undeclared"),
    ("model.method.init_args.lr_scheduler", ANYTHING),
    ("model.engine", ANYTHING),
    ("data", ANYTHING),
    ("data.init_args.partition", ANYTHING),
    ("trainer.callbacks", [ANYTHING]),
    ("trainer.logger", ANYTHING),
    ("trainer.plugins", ANYTHING),
    ("trainer.strategy", ANYTHING),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(TOUCHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    monkeypatch.delenv("PFL_DEBUG", raising=False)
    yield tmp_path
    sys.modules.pop("own_code", None)


def fit(folder, changes):
    main(["fit", "--config", digits_config(folder, {"trainer.fast_dev_run": True} | changes)])


def refusal(folder, capsys, changes):
    with pytest.raises(SystemExit) as stopped:
        fit(folder, changes)
    said = stopped.value.code if isinstance(stopped.value.code, str) else capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(("option", "value"), CASES)
def test_what_is_not_what_it_stands_for_is_refused_and_not_called(folder, capsys, option, value):
    refusal(folder, capsys, {option: value})
    assert not (folder / "called").exists()


def test_nothing_of_the_standard_library_where_an_option_may_be_anything(folder, capsys):
    popen = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(folder / "called")]}}
    needy = {"class_path": "own_code.Needy", "init_args": {"tool": popen}}
    said = refusal(folder, capsys, {"model.method": needy})
    assert "model.method.tool: subprocess.Popen is not accepted" in said
    assert not (folder / "called").exists()


def test_nothing_of_the_standard_library_as_a_function(folder, capsys):
    listener = {"class_path": "LambdaCallback", "init_args": {"on_fit_start": "os.system"}}
    said = refusal(folder, capsys, {"trainer.callbacks": [listener]})
    assert "trainer.callbacks.on_fit_start: " in said
    assert "system is not accepted" in said


REFUSED = [
    "builtins.eval",
    "ctypes.CDLL",
    "functools.partial",
    "http.server.HTTPServer",
    "lightning.pytorch.LightningModule.load_from_checkpoint",
    "logging.FileHandler",
    "numpy.testing.rundocs",
    "operator.methodcaller",
    "own_code.alias",
    "own_code.prepared",
    "pfl_lightning.federation.preemption.requeue",
    "pfl_lightning.cli.main.main",
    "pfl_lightning.state.checkpoints.read_checkpoint",
    "torch.distributed.nn.RemoteModule",
    "torch.fx.GraphModule",
    "torch.hub.load",
    "torch.load",
    "torch.multiprocessing.spawn.spawn",
    "torch.nn.functional.importlib.import_module",  # by way of a module that is listed
    "torch.nn.functional.warnings.warn",
    "torch.os.system",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.tensorboard.SummaryWriter",
    "webbrowser.open",
]
LISTED = [
    "lightning.pytorch.callbacks.RichProgressBar",
    "lightning.pytorch.callbacks.progress.rich_progress.RichProgressBarTheme",
    "own_code.Anything",
    "own_code.undeclared",
    "pfl_lightning.datamodules.RandomFlip",
    "pfl_lightning.encoders.MLP",
    "torch.nn.GELU",
    "torch.nn.functional.relu",
    "torch.profiler.schedule",
    "torch.utils.data.WeightedRandomSampler",
    "torchmetrics.classification.MulticlassAUROC",
    "torchvision.datasets.MNIST",
    "torchvision.models.resnet18",
    "torchvision.transforms.v2.RandomCrop",
]


def names(path, form):
    """A config that names something where an option may be anything, in each form that a config has."""
    if form == "bare":
        return Namespace(model=Namespace(tool=pkgutil.resolve_name(path)))
    named = Namespace(class_path=path, init_args=Namespace())
    within = {"with arguments": named, "in a list": [named], "in a mapping": {"key": {"deeper": named}}}[form]
    return Namespace(model=Namespace(method=Namespace(class_path="own_code.Needy", init_args=Namespace(tool=within))))


@pytest.mark.parametrize("form", ["bare", "with arguments", "in a list", "in a mapping"])
def test_what_is_installed_is_taken_by_a_list(folder, form):
    with (folder / "own_code.py").open("a") as file:
        file.write("import functools, subprocess\nalias = subprocess.Popen\n")
        file.write("prepared = functools.partial(subprocess.run, ['true'])\n")
    for path in LISTED:
        check_names(names(path, form))
    for path in REFUSED:
        with pytest.raises(UsageError, match=r"tool\S*: \S+ is not accepted: .* in your own file, and name that"):
            check_names(names(path, form))
    assert not (folder / "called").exists()


def test_a_function_that_runs_source_code_is_no_encoder_though_it_returns_one(folder, capsys):
    path = "torch.fx.graph_module.reduce_graph_module"
    source = f"open({str(folder / 'called')!r}, 'w')"
    for encoder in (path, {"class_path": path, "init_args": {"body": {"_code": "x"}, "import_block": source}}):
        assert "model.encoder: " in refusal(folder, capsys, {"model.encoder": encoder})
    assert not (folder / "called").exists()


def running(folder, hook="setup"):
    called = {"class_path": "torch.utils.collect_env.run", "init_args": {"command": f"touch {folder / 'called'}"}}
    return {"trainer.callbacks": [{"class_path": "LambdaCallback", "init_args": {hook: called}}]}


@pytest.mark.parametrize("command", ["fit", "validate", "test", "partition", "personalize", "export", "predict"])
def test_a_command_of_an_installed_function_is_not_run_by_any_command(folder, command, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main([command, "--config", digits_config(folder, running(folder)), *["--client", "0"] * (command == "predict")])
    assert "trainer.callbacks.setup: torch.utils.collect_env.run is not accepted" in capsys.readouterr().err
    assert not (folder / "called").exists()


def test_nor_by_the_check_of_a_study(folder):
    (error,) = config_errors([yaml.safe_load(Path(digits_config(folder, running(folder))).read_text())])
    assert "torch.utils.collect_env.run is not accepted" in error
    assert not (folder / "called").exists()


@pytest.mark.parametrize(
    ("module", "own"),
    [("project.models", True), ("lib/python3.11/site-packages/package", False), ("lib/dist-packages/other", False)],
)
def test_own_code_is_what_no_package_manager_has_installed(tmp_path, monkeypatch, module, own):
    *folders, name = module.replace(".", "/").split("/")
    place = tmp_path.joinpath(*folders)
    place.mkdir(parents=True)
    (place / f"{name}.py").write_text("def made(): ...\nclass Made: ...\nfrom os import system\n")
    monkeypatch.syspath_prepend(str(place))
    found = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, found)
    assert [is_own_code(one) for one in (found.made, found.Made, found.system, print, [].append)] == [
        *(own, own),
        *(False, False, False),
    ]


def test_what_was_refused_made_nothing_else_either(folder, capsys):
    """The encoder is at fault; the callback before it in the config was not made."""
    marker = {"class_path": "own_code.Marked"}
    with (folder / "own_code.py").open("a") as file:
        file.write("from lightning.pytorch import Callback\nclass Marked(Callback):\n    __init__ = _called\n")
    said = refusal(folder, capsys, {"trainer.callbacks": [marker], "model.encoder": "os.system"})
    assert "'os.system' is not an encoder" in said
    assert not (folder / "called").exists()


ACCEPTED = {
    "an encoder function": {"model.encoder": "own_code.encoder"},
    "a list with one": {"model.encoder": ["own_code.encoder", "mlp"], "model.method.class_path": "LocalOnly"},
    "a method function": {"model.method": "own_code.method"},
    "a listener": {
        "trainer.callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "own_code.listener"}}]
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_declared_functions_of_your_own_are_accepted(folder, changes):
    fit(folder, changes)
    assert (folder / "used").exists()
