"""A CUDA device for machines without one: numbers are the CPU's, places are a GPU's.

Each storage remembers whether it would lie on the GPU. Tensors tell so when they are asked for their device, and
operations on tensors of two places fail as CUDA's do. Only the thread that entered has the device.
"""

from contextlib import contextmanager
from types import SimpleNamespace

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
untouched = torch._C.DisableTorchFunction


def on_gpu(tensor):
    """Whether a tensor's storage was placed on the pretended device."""
    with untouched():
        return _has_storage(tensor) and getattr(tensor.untyped_storage(), "_on_gpu", False)


def _place(tensor, gpu):
    with untouched():
        if _has_storage(tensor):
            tensor.untyped_storage()._on_gpu = gpu
    return tensor


def _has_storage(tensor):
    return tensor.layout == torch.strided and not tensor.is_meta


def _tensors(*parts):
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _kind(device):
    return "cuda" if isinstance(device, int) else torch.device(device).type


class _Device:
    def __init__(self):
        self.places = [False]  # where a tensor made of nothing comes to lie; the last counts
        self.depth = 0  # operators under way: within, tensors are where they really are

    @contextmanager
    def placing(self, gpu):
        self.places.append(gpu)
        try:
            yield
        finally:
            self.places.pop()


class _Generator(torch._C.Generator):
    """Gives the CPU's random numbers on either device, but only to tensors of its own."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made.gpu = _kind(device) == "cuda"
        return made

    def __init__(self, device="cpu"):
        del device

    @property
    def device(self):
        return CUDA if self.gpu else CPU


class _Functions(TorchFunctionMode):
    """What names a device: factories, moves, and ways out of torch."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, _, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        given = _tensors(args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and on_gpu(first) and name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {CUDA} device type tensor to numpy. Use Tensor.cpu() first.")
        if func in (Tensor.to, Tensor.cpu):
            return self._move(func, first, args[1:], kwargs)
        kwargs.pop("pin_memory", None)
        asked = kwargs.get("device")
        if asked is not None and _kind(asked) == "meta":
            return func(*args, **kwargs)
        gpu = _kind(asked) == "cuda" if asked is not None else any(map(on_gpu, given))
        if asked is not None and gpu:
            kwargs["device"] = CPU
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != ("cuda" if gpu else "cpu"):
            raise RuntimeError(f"Expected a '{'cuda' if gpu else 'cpu'}' device type for generator in {name}")
        with self.device.placing(gpu):
            result = func(*args, **kwargs)
        if asked is not None and isinstance(result, Tensor) and all(result is not t for t in given):
            _place(result, gpu)
        return result

    def _move(self, func, tensor, rest, kwargs):
        if func is Tensor.to:
            copy = kwargs.pop("copy", False)
            to, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        else:
            to, dtype, copy = CPU, None, False
        if tensor.is_meta or (to is not None and to.type == "meta"):
            return func(tensor, *rest, **kwargs)
        here = on_gpu(tensor)
        there = here if to is None else to.type == "cuda"
        with self.device.placing(here):
            result = Tensor.to(tensor, dtype or tensor.dtype, copy=copy or here != there)
        if here != there:
            if result.requires_grad and not result.is_leaf:
                raise NotImplementedError("no gradient crosses the pretended devices")
            _place(result, there)
        return result


class _Operators(TorchDispatchMode):
    """Every operator, also those of backward passes: refuses two places and places what is new."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        device, kwargs = self.device, kwargs or {}
        given = _tensors(args, kwargs)
        gpu = any(map(on_gpu, given)) if given else device.places[-1]
        if gpu and given:
            self._check(func, given)
        with untouched():
            known = {t.untyped_storage()._cdata for t in given if _has_storage(t)}
        device.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            device.depth -= 1
        for made in _tensors(result):
            with untouched():
                new = _has_storage(made) and made.untyped_storage()._cdata not in known
            if new:
                _place(made, gpu)
        return result

    def _check(self, func, given):
        name, host = func.overloadpacket.__name__, [t for t in given if not on_gpu(t)]
        if name == "copy_":
            return
        # A number on the host is a kernel's argument, but no result of one.
        if any(t.dim() for t in host) or (host and func._schema.is_mutable and not on_gpu(given[0])):
            placed = ", ".join(f"{'cuda' if on_gpu(t) else 'cpu'}{list(t.shape)}" for t in given)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {CUDA} and cpu! "
                f"(in {name} of {placed})"
            )


def _nothing(*_, **__):
    """What is asked of the GPU without an answer."""


def _answers():
    """What torch says of its device."""
    cuda = {
        **dict.fromkeys(("empty_cache", "set_device", "manual_seed_all"), _nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: 0),
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: NAME,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
    }
    accelerator = {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_stream": lambda *_: SimpleNamespace(is_capturing=lambda: False),
    }
    return {torch.cuda: cuda, torch.accelerator: accelerator}


def _sequence(tensors):
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _forget_devices():
    """Libraries look for devices once and keep the answer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for found in vars(import_utils).values():
        if hasattr(found, "cache_clear") and any(word in found.__name__ for word in ("cuda", "gpu", "torch")):
            found.cache_clear()


@contextmanager
def pretended_cuda():
    """Within the block this thread has a CUDA device."""
    device, real = _Device(), Tensor.device

    def place_of(tensor):
        with untouched():
            return CUDA if not device.depth and on_gpu(tensor) else real.__get__(tensor)

    def backward(tensors, gradients=None, keep=False):
        """Without leaving the modes, which recomputed passes and own gradients need."""
        tensors = _sequence(tensors)
        gradients = _sequence(gradients) if gradients is not None else (None,) * len(tensors)
        with device.placing(any(map(on_gpu, tensors))):
            made = torch.autograd._make_grads(tensors, gradients, is_grads_batched=False)
            ways = {"allow_unreachable": True, "accumulate_grad": True}
            torch.autograd.graph._engine_run_backward(tensors, made, keep, False, (), **ways)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads would not have the device
        for owner, answers in _answers().items():
            for name, answer in answers.items():
                patched.setattr(owner, name, answer)
        patched.setattr(Tensor, "device", property(place_of))
        patched.setattr(Tensor, "is_cuda", property(on_gpu))
        patched.setattr(Tensor, "is_cpu", property(lambda tensor: tensor.device.type == "cpu"))
        patched.setattr(Tensor, "backward", backward)
        patched.setattr(torch.autograd, "backward", backward)
        patched.setattr(torch, "Generator", _Generator)
        _forget_devices()
        try:
            with _Functions(device), _Operators(device):
                yield
        finally:
            _forget_devices()
