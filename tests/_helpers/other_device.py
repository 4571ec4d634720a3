"""A device that is not the CPU, on a machine without one: its tensors compute on the CPU and never mix with the CPU's.

Torch's key for devices of third parties is given to a tensor subclass that holds a tensor of the CPU. An operation of
both kinds is an error where it would be one on a GPU, as are a generator of the CPU on the device and `numpy()` of its
tensors. Lightning gets an accelerator of this name. All of this is for good: :func:`install` is called in a process of
its own, that of `other_device_cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretended"

MAY_MIX = {"aten._to_copy.default", "aten.copy_.default", "aten.is_pinned.default", "aten._pin_memory.default"}
"""Operations that are made to go from device to device."""

INDEXED = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index.")
"""Operations on a tensor that take indices from the CPU, too."""

single = False
"""Whether the device has no double precision, as Apple's."""

products = {"device": 0, "cpu": 0}
"""Matrix products so far, by where they were."""

watchers: list[Callable[[str, Any, Any], None]] = []
"""Called with the name, the arguments and the result of every operation that involves the device."""


def device() -> torch.device:
    """The device."""
    return torch.device(NAME, 0)


class DeviceTensor(torch.Tensor):
    """A tensor of the device."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device(),
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # so that nn.Module.to swaps it in
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> DeviceTensor:
        return DeviceTensor(inner["held"])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied: torch.Tensor = DeviceTensor(self.held.clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:  # a checkpoint is loaded on the CPU
        return self.held.detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        for watch in watchers:
            watch("tolist", (self,), None)
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy: use Tensor.cpu() first")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Inside, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the CPU, after a check that a device would do it."""
    name, found = str(func), []
    tree_map_only(torch.Tensor, found.append, (args, kwargs))
    there = [one for one in found if isinstance(one, DeviceTensor)]
    here = [one for one in found if not isinstance(one, DeviceTensor)]
    if there and name not in MAY_MIX:
        check_places(name, args, here)
    asked = kwargs.get("device")
    on_device = bool(there) if asked is None else torch.device(asked).type == NAME
    if name == "aten.copy_.default":
        on_device = isinstance(args[0], DeviceTensor)
    if kwargs.get("generator") is not None and on_device:
        raise RuntimeError(f"{name}: expected a {NAME!r} device type for generator but found 'cpu'")
    if "mm" in name:
        products["device" if there else "cpu"] += 1
    plain_args, plain = tree_map_only(DeviceTensor, lambda tensor: tensor.held, (args, dict(kwargs)))
    if asked is not None:
        plain["device"] = torch.device("cpu")
    if plain.get("pin_memory"):
        plain["pin_memory"] = False
    result = func(*plain_args, **plain)
    if name == "aten._to_copy.default" and result is plain_args[0]:
        result = result.clone()
    known = {id(one.held): one for one in there}  # of operations in place

    if single and on_device and any(t.dtype == torch.float64 for t in tree_leaves(result) if hasattr(t, "dtype")):
        raise TypeError(f"{name}: Cannot convert a {NAME} Tensor to float64 dtype as it doesn't support float64")

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        return DeviceTensor(tensor) if on_device else tensor

    result = tree_map_only(torch.Tensor, placed, result)
    for watch in watchers if there or on_device else ():
        watch(name, args, result)
    return result


def check_places(name: str, args: Any, here: list[torch.Tensor]) -> None:
    """Refuse tensors of the CPU beside those of the device; a single number may be anywhere."""
    wrong = [one for one in here if one.dim() > 0]
    if name.startswith(INDEXED) and isinstance(args[0], DeviceTensor):
        wrong = [one for one in args[2:3] if type(one) is torch.Tensor and one.dim() > 0]  # what is put there
    if wrong:
        shapes = [tuple(one.shape) for one in wrong]
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, of the CPU are {shapes}")


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class OtherAccelerator(CPUAccelerator):
    """Lightning's accelerator of this device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [device()]

    @staticmethod
    def name() -> str:
        return NAME


def install() -> None:
    """Make the device known to torch and Lightning: ``Trainer(accelerator="pretended")``."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(number, device=...) makes it here, and then moves it
    torch.backends.cudnn.enabled = False
    AcceleratorRegistry.register(NAME, OtherAccelerator, description="pretends")
    choose = _AcceleratorConnector._choose_strategy

    def choose_strategy(connector: Any) -> Any:
        if isinstance(connector.accelerator, OtherAccelerator):
            return SingleDeviceStrategy(device=device())  # Lightning takes the CPU for what it does not know
        return choose(connector)

    _AcceleratorConnector._choose_strategy = choose_strategy  # type: ignore[method-assign]
