"""Two GPUs for tests where there is none: the CPU's arithmetic behind tensors that say `cuda:0` or `cuda:1` and refuse
to be mixed.

What it can show: code that mixes devices, asks a CUDA tensor for NumPy, draws with a generator of the other device, or
takes a kernel that only CPUs have, raises as it does with CUDA; code under `device.type == "cuda"` runs; and what it
computes there is right. What it cannot show: speed, memory, what the kernels of CUDA round differently or do not
support, and streams. Its random numbers are another stream than the CPU's, as with CUDA, but not CUDA's.

A `Cuda` tensor wraps a CPU tensor. A dispatch mode sees every operation beneath autograd, unwraps its arguments, checks
that they are on one device, and wraps what comes out.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
COUNT = 2
FREE = 2**26
"""Bytes of memory that it says are free: enough for several prompts of a tiny model at a time, not for any number."""

DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;

struct PretendedGuard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const noexcept override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const noexcept override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
};
static impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new PretendedGuard());

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 2; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""
"""What PyTorch asks for the current device and stream; builds without CUDA fail without it in `.to` and `.backward`.

PyTorch looks for it once, before the first backward pass, and never forgets it: so a process pretends all its life.
"""

_CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten._unsafe_index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
_WITH_SCALARS = {torch.ops.aten.fill_.Tensor, torch.ops.aten.masked_fill.Tensor, torch.ops.aten.masked_fill_.Tensor}
"""Operations that are not pointwise by their tags, but take a CPU tensor without dimensions as a number."""

_OF_FLOATS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.dot.default,
}
"""What CUDA computes for floating-point numbers only."""


class Cuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    stored: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, stored: torch.Tensor, device: torch.device = CUDA, *, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:  # as accelerate calls the class of a parameter to have another
            return torch.nn.Parameter(stored, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            stored.size(),
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=stored.dtype,
            device=device,
        )
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first"
        )

    __array__ = numpy

    def untyped_storage(self) -> Any:
        return self.stored.untyped_storage()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Cuda({self.stored!r})"


_drawing_on_cuda: set[int] = set()
"""By address, since PyTorch hands on the generator, not the Python object around it."""


def _address(generator: Any) -> int:
    return generator._cdata


class _Kind(type(torch._C.Generator)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_Kind):
    """`torch.Generator`, also for a device that there is not."""

    def __new__(cls, device: Any = "cpu"):
        made = super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]
        if torch.device(device).type == "cuda":
            _drawing_on_cuda.add(_address(made))
        return made

    def __del__(self):
        _drawing_on_cuda.discard(_address(self))

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CUDA if _address(self) in _drawing_on_cuda else CPU


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the CPU, once it is sure that CUDA would have run it."""
    tensors: list[torch.Tensor] = []
    _each(tensors.append, (*args, *kwargs.values()))
    requested = kwargs.get("device")
    given = [tensor for tensor in tensors if isinstance(tensor, Cuda)]
    on_cuda = bool(given)
    if requested is not None:
        target = _indexed(torch.device(requested))
        kwargs = {**kwargs, "device": CPU} if target.type == "cuda" else kwargs
    else:
        target = args[0].device if func in _CROSSING or func in _INDEXING else (given[0].device if given else CPU)
    to_cuda = target.type == "cuda"
    generator = kwargs.get("generator")
    if generator is not None and (_address(generator) in _drawing_on_cuda) != to_cuda:
        raise RuntimeError(f"Expected a '{'cuda' if to_cuda else 'cpu'}' device type for generator")
    if not on_cuda and not to_cuda:
        return func(*args, **kwargs)
    if func in _INDEXING:
        _check_indexing(*args)
    elif requested is None and func not in _CROSSING:
        _check_alike(func, args, tensors)
    if str(func).endswith("_for_cpu.default"):
        raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend.")
    if func in _OF_FLOATS and not args[0].is_floating_point():
        raise RuntimeError(f"'{func}' is not implemented on CUDA for '{args[0].dtype}'")
    drawing = to_cuda and generator is None and torch.Tag.nondeterministic_seeded in func.tags
    with _own_numbers() if drawing else contextlib.nullcontext():
        out = func(*_each(_unwrapped, args), **{name: _each(_unwrapped, value) for name, value in kwargs.items()})
    if any(tensor.shape != tensor.stored.shape or tensor.stride() != tensor.stored.stride() for tensor in given):
        raise NotImplementedError(f"{func} reshapes a tensor in place: the pretended GPU cannot follow")
    wrapped = {id(tensor.stored): tensor for tensor in given}
    wrap = lambda made: wrapped.get(id(made)) if id(made) in wrapped else Cuda(made, target)  # noqa: E731
    return _each(wrap, out) if to_cuda else out


def _indexed(device: torch.device) -> torch.device:
    """`cuda` is the first GPU."""
    return CUDA if device.type == "cuda" and device.index is None else device


def _each(change: Any, value: Any) -> Any:
    """Changes each tensor in what an operation takes or returns."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_each(change, part) for part in value]) if type(value) in (list, tuple) else value


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.stored if isinstance(tensor, Cuda) else tensor


def _check_alike(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """CPU tensors beside CUDA tensors are numbers without dimensions, in arithmetic that returns CUDA tensors."""
    arithmetic = torch.Tag.pointwise in func.tags or func in _WITH_SCALARS
    written = [args[0]] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else []
    gpus = sorted({str(tensor.device) for tensor in tensors if isinstance(tensor, Cuda)})
    if len(gpus) > 1 and any(isinstance(tensor, Cuda) and tensor.ndim for tensor in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(gpus)} in {func}")
    for tensor in tensors:
        if not isinstance(tensor, Cuda) and (tensor.ndim or not arithmetic or any(tensor is out for out in written)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {gpus[0]} and cpu in {func}")


def _check_indexing(indexed: torch.Tensor, indices: Any, values: torch.Tensor | None = None, *_: Any) -> None:
    here = (CPU, indexed.device)
    if any(index is not None and index.device not in here for index in indices):
        raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({here[1]})")
    if values is not None and values.ndim and values.device != indexed.device:
        raise RuntimeError("Expected all tensors to be on the same device, but values are not where they are put")


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Draws from the pretended device's default generator, not from the CPU's."""
    own, before = torch.cuda.default_generators[0], torch.get_rng_state()
    torch.set_rng_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def pretend() -> contextlib.ExitStack:
    """Pretends from now on that there is a GPU, in a process that loaded what `build` made before it imported PyTorch.

    The stack that it returns has to stay open.
    """
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: COUNT,
        "current_device": lambda: 0,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (FREE, 2 * FREE),
        "get_device_name": lambda *_: "pretended",
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "default_generators": (Generator(CUDA),) * COUNT,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.current_device = answers["current_device"]
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the mode belongs to this thread
    modeling_utils.caching_allocator_warmup = lambda *_: None  # it reckons with more than a gigabyte of free memory
    torch.Generator = Generator
    _device_constructors()  # remembers the functions that `with torch.device(...)` is about, before they are wrapped
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor")):
        setattr(owner, name, _built(getattr(owner, name)))
    torch.nn.Module._apply = _swapping(torch.nn.Module._apply)
    stack = contextlib.ExitStack()
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode belongs to this thread
    stack.enter_context(_Mode())
    return stack


def _built(build: Any) -> Any:
    """Builds on the CPU, then moves."""

    def built(*args: Any, device: Any = None, **more: Any) -> Any:
        source = args[0] if args else more.get("data")
        if device is None and isinstance(source, Cuda):
            device = source.device
        if device is None or torch.device(device).type != "cuda":
            return build(*args, **more, **({} if device is None else {"device": device}))
        if isinstance(source, Cuda):
            args = (source.detach().cpu(), *args[1:])
        wants = more.pop("requires_grad", False)
        return build(*args, **more, device="cpu").to(device).requires_grad_(wants)

    return built


def _swapping(apply: Any) -> Any:
    """Moves modules by swapping their parameters' contents: `.data =` cannot turn a tensor into a `Cuda`."""

    def applied(self: torch.nn.Module, *args: Any, **more: Any) -> torch.nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, *args, **more)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return applied


def compiler() -> str | None:
    """The system's C++ compiler, if it has one."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(folder: Path) -> Path:
    """Returns the library with `DEVICE`; a process loads it before it imports PyTorch, then calls `pretend`."""
    home, source, library = Path(torch.__file__).parent, folder / "device.cpp", folder / "device.so"
    source.write_text(DEVICE, encoding="utf-8")
    paths = [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-lc10", "-ltorch_cpu"]
    subprocess.run([str(compiler()), str(source), *paths, *flags, "-o", str(library)], check=True)
    return library
