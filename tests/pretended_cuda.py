"""A CUDA device for machines without one: numbers are the CPU's, places are a GPU's.

Each storage remembers whether it would lie on the GPU. Tensors tell so when they are asked for their device, operations
on tensors of two places fail as CUDA's do, and kernels, waits of the host for the device and copies to it are counted.
What it cannot show: time, memory, CUDA's rounding and its dtypes, and branches in C++, which see the CPU. Only the
thread that entered has the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import bitsandbytes  # noqa: F401  it looks for a GPU's library when it is imported
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NAME = "Pretended GPU"
MEMORY = 80 * 2**30
OURS = ("server_app/", "pluralllm/", "client_app/", "appa_flwr/", "experiments/")
untouched = torch._C.DisableTorchFunction

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""May take indices from the host, for an upload; with a mask the host has to wait for how many there are."""
ACROSS = {"copy_", "set_"}


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor's storage was placed on the pretended device."""
    with untouched():
        return _has_storage(tensor) and getattr(tensor.untyped_storage(), "_on_gpu", False)


def _place(tensor: Tensor, gpu: bool) -> Tensor:
    with untouched():
        if _has_storage(tensor):
            tensor.untyped_storage()._on_gpu = gpu
    return tensor


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _tensors(*parts: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _kind(device: Any) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _source() -> str:
    """The line of ours that is running; the shortest name that finds it."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and any(part in name for part in OURS):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@dataclass
class Counts:
    """What a GPU would have had to do: kernels by operation; waits and uploads by operation and our line of source."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploads: Counter[tuple[str, str]] = field(default_factory=Counter)


class Device:
    """The pretended GPU; `counts` may be replaced by new ones at any time."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.places = [False]  # where a tensor made of nothing comes to lie; the last counts
        self.depth = 0  # operators under way: within, tensors are where they really are
        self.flash = 0  # within torch's own choice of an attention kernel

    @contextmanager
    def placing(self, gpu: bool) -> Iterator[None]:
        self.places.append(gpu)
        try:
            yield
        finally:
            self.places.pop()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count the block's work apart."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def wait(self, operation: str) -> None:
        self.counts.waits[operation, _source()] += 1

    def upload(self, operation: str) -> None:
        self.counts.uploads[operation, _source()] += 1


class _Generator(torch._C.Generator):
    """Gives the CPU's random numbers on either device, but only to tensors of its own."""

    def __new__(cls, device: object = "cpu") -> _Generator:
        made: _Generator = super().__new__(cls, "cpu")
        made.gpu = _kind(device) == "cuda"
        return made

    def __init__(self, device: object = "cpu") -> None:
        del device

    @property
    def device(self) -> torch.device:
        return CUDA if self.gpu else CPU


class _Functions(TorchFunctionMode):
    """What names a device: factories, moves, and ways out of torch."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        given = _tensors(args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and on_gpu(first) and name in ("numpy", "__array__", "tolist"):
            if name != "tolist":
                raise TypeError(f"can't convert {CUDA} device type tensor to numpy. Use Tensor.cpu() first.")
            self.device.wait(name)
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._move(func, first, args[1:], kwargs)
        if func is Tensor.pin_memory:
            return first
        kwargs.pop("pin_memory", None)
        asked = kwargs.get("device")
        if asked is not None and _kind(asked) == "meta":
            return func(*args, **kwargs)
        gpu = _kind(asked) == "cuda" if asked is not None else any(map(on_gpu, given))
        if asked is not None and gpu:
            kwargs["device"] = CPU
            if name in ("tensor", "as_tensor"):
                self.device.upload(name)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != ("cuda" if gpu else "cpu"):
            raise RuntimeError(f"Expected a '{'cuda' if gpu else 'cpu'}' device type for generator in {name}")
        attention = func is torch.nn.functional.scaled_dot_product_attention
        self.device.flash += attention
        try:
            with self.device.placing(gpu):
                result = func(*args, **kwargs)
        finally:
            self.device.flash -= attention
        if asked is not None and isinstance(result, Tensor) and all(result is not t for t in given):
            _place(result, gpu)
        return result

    def _move(self, func: Any, tensor: Tensor, rest: Any, kwargs: dict[str, Any]) -> Tensor:
        if func is Tensor.to:
            copy = kwargs.pop("copy", False)
            to, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        else:
            to, dtype, copy = CUDA if func is Tensor.cuda else CPU, None, False
        if tensor.is_meta or (to is not None and to.type == "meta"):
            if to is not None and to.type == "cuda":
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            return func(tensor, *rest, **kwargs)
        here = on_gpu(tensor)
        there = here if to is None else to.type == "cuda"
        with self.device.placing(here):
            result = Tensor.to(tensor, dtype or tensor.dtype, copy=copy or here != there)
        if here != there:
            if result.requires_grad and not result.is_leaf:
                raise NotImplementedError("no gradient crosses the pretended devices")
            _place(result, there)
            self.device.upload("to") if there else self.device.wait("to")
        return result


class _Operators(TorchDispatchMode):
    """Every operator, also those of backward passes: refuses two places, places what is new, counts."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, name, kwargs = self.device, func.overloadpacket.__name__, kwargs or {}
        given = _tensors(args, kwargs)
        gpu = any(map(on_gpu, given)) if given else device.places[-1]
        if gpu and given:
            self._check(func, name, args, given)
        with untouched():
            known = {t.untyped_storage()._cdata for t in given if _has_storage(t)}
        device.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            device.depth -= 1
        worked = func._schema.is_mutable
        for made in _tensors(result):
            with untouched():
                new = _has_storage(made) and made.untyped_storage()._cdata not in known
            if new:
                _place(made, gpu)
                worked = True
        if gpu and worked and "empty" not in name:
            device.counts.kernels[name] += 1
        return result

    def _check(self, func: Any, name: str, args: Any, given: list[Tensor]) -> None:
        device, host = self.device, [t for t in given if not on_gpu(t)]
        if name in ACROSS:
            if host:
                device.upload(name) if on_gpu(args[0]) else device.wait(name)
            return
        if name.endswith("_for_cpu") and not device.flash:
            raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend.")
        indices = [i for i in args[1] if i is not None] if name in INDEXING else []
        if indices and host and on_gpu(args[0]) and all(any(t is i for i in indices) for t in host):
            device.upload(name)
        # A number on the host is a kernel's argument, but no result of one.
        elif any(t.dim() for t in host) or (host and func._schema.is_mutable and not on_gpu(given[0])):
            placed = ", ".join(f"{'cuda' if on_gpu(t) else 'cpu'}{list(t.shape)}" for t in given)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {CUDA} and cpu! "
                f"(in {name} of {placed}, {_source()})"
            )
        sized_by_data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices) if indices else sized_by_data:
            device.wait(name)


def _nothing(*_: object, **__: object) -> None:
    """What is asked of the GPU without an answer."""


class _Stream(nullcontext):  # type: ignore[type-arg]
    """A stream, an event, a choice of device: there is one of each."""

    device, device_index = CUDA, 0

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    synchronize = wait_stream = record = wait_event = _nothing

    def is_capturing(self) -> bool:
        return False


def _answers(gpus: int) -> dict[Any, dict[str, Any]]:
    """What torch says of its devices."""

    def state(*_: object) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    about = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32, gcnArchName=""
    )
    silent = (
        *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "set_rng_state", "init"),
        *("set_rng_state_all", "reset_peak_memory_stats", "_lazy_init", "_lazy_call", "ipc_collect"),
    )
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    cuda = {
        **dict.fromkeys(silent, _nothing),
        **dict.fromkeys(memory, lambda *_: 0),
        **dict.fromkeys(("device", "stream", "Stream", "Event", "current_stream", "default_stream"), _Stream),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: gpus,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": lambda *_: about,
        "get_device_capability": lambda *_: (about.major, about.minor),
        "get_device_name": lambda *_: NAME,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats": lambda *_: {},
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()] * gpus,
    }
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: gpus,
        "current_device_index": lambda: 0,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "current_stream": _Stream,
    }
    return {torch.cuda: cuda, torch.accelerator: accelerator, torch.version: {"cuda": "12.8"}}


def _backward(device: Device, tensors: Any, gradients: Any, keep: bool | None, create: bool, inputs: Any) -> None:
    """`torch.autograd.backward` without leaving the modes, which recomputed passes and own gradients need."""
    tensors, inputs = _sequence(tensors), _sequence(inputs or ())
    gradients = _sequence(gradients) if gradients is not None else (None,) * len(tensors)
    with device.placing(any(map(on_gpu, tensors))):
        made = torch.autograd._make_grads(tensors, gradients, is_grads_batched=False)
        torch.autograd.graph._engine_run_backward(
            tensors,
            made,
            create if keep is None else keep,
            create,
            inputs,
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _sequence(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _forget_devices() -> None:
    """Libraries look for devices once and keep the answer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for found in vars(import_utils).values():
        if hasattr(found, "cache_clear") and any(word in found.__name__ for word in ("cuda", "gpu", "torch")):
            found.cache_clear()


@contextmanager
def pretended_cuda(*, gpus: int = 1) -> Iterator[Device]:
    """Within the block this thread has CUDA devices, of which the first is used."""
    device = Device()
    real = Tensor.device

    def place_of(tensor: Tensor) -> torch.device:
        with untouched():
            return CUDA if not device.depth and on_gpu(tensor) else real.__get__(tensor)

    def backward(
        tensors: Any,
        gradients: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: None = None,
        inputs: Any = None,
    ) -> None:
        _backward(device, tensors, gradients, retain_graph, create_graph, inputs)

    def of_tensor(
        tensor: Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        _backward(device, tensor, gradient, retain_graph, create_graph, inputs)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads would not have the device
        for owner, answers in _answers(gpus).items():
            for name, answer in answers.items():
                patched.setattr(owner, name, answer)
        patched.setattr(Tensor, "device", property(place_of))
        patched.setattr(Tensor, "is_cuda", property(on_gpu))
        patched.setattr(Tensor, "is_cpu", property(lambda tensor: tensor.device.type == "cpu"))
        patched.setattr(Tensor, "get_device", lambda tensor: 0 if on_gpu(tensor) else -1)
        patched.setattr(Tensor, "backward", of_tensor)
        patched.setattr(torch.autograd, "backward", backward)
        patched.setattr(torch, "Generator", _Generator)
        _forget_devices()
        stack.callback(_forget_devices)
        modes: tuple[AbstractContextManager[Any], ...] = (_Functions(device), _Operators(device))
        for mode in modes:
            stack.enter_context(mode)
        yield device
