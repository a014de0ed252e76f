"""The pretended device itself: what it refuses, what it lets pass, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretended_cuda import CPU, CUDA, NAME, pretended_cuda
from torch import nn

from server_app.engine.sequences import pad_prompts


def on(device, *shape):
    return torch.ones(*shape or (3,), device=device)


def backward_through_two_places():
    with torch.enable_grad():
        layer = nn.Linear(3, 3)
        layer(on(CUDA)).sum().backward()


MIXED = "two devices"
REFUSED = {
    "a sum of two places": (lambda: on(CUDA) + on(CPU), MIXED),
    "a matrix product": (lambda: on(CPU, 3, 3) @ on(CUDA), MIXED),
    "tensors joined": (lambda: torch.cat([on(CUDA), on(CPU)]), MIXED),
    "foreach": (lambda: torch._foreach_add([on(CUDA)], [on(CPU)]), MIXED),
    "a result on the host": (lambda: torch.zeros((), device=CPU).add_(on(CUDA, 1)[0]), MIXED),
    "an index on the device into the host": (lambda: on(CPU)[torch.zeros(1, dtype=torch.long, device=CUDA)], MIXED),
    "a layer left behind": (backward_through_two_places, MIXED),
    "numpy": (lambda: on(CUDA).numpy(), r"Use Tensor\.cpu\(\)"),
    "numpy in other words": (lambda: np.asarray(on(CUDA)), r"Use Tensor\.cpu\(\)"),
    "the host's generator": (lambda: torch.rand(3, generator=torch.Generator(), device=CUDA), "generator"),
    "the device's generator on the host": (lambda: torch.rand(3, generator=torch.Generator(CUDA)), "generator"),
    "a kernel of the host": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[on(CUDA, 1, 1, 4, 8)] * 3),
        "CUDA",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses(name):
    attempt, words = REFUSED[name]
    with pretended_cuda(), pytest.raises((RuntimeError, TypeError, NotImplementedError), match=words):
        attempt()


def test_what_a_gpu_takes():
    with pretended_cuda(gpus=2):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_name(0) == NAME
        number = torch.tensor(2.0)  # a kernel's argument
        assert (on(CUDA) * number).device == CUDA
        assert on(CUDA)[torch.tensor([0, 2])].device == CUDA
        assert on("cuda").new_zeros(2).is_cuda
        assert on(0).to("cpu").numpy().tolist() == [1, 1, 1]
        assert torch.zeros_like(on(CUDA)).get_device() == 0
        assert torch.full((2,), 1).is_cpu
        assert nn.functional.scaled_dot_product_attention(*[on(CUDA, 1, 1, 4, 8)] * 3).is_cuda
        moved = nn.Linear(3, 2).to("cuda")
        moved(on(CUDA)).sum().backward()
        assert moved.weight.device == moved.weight.grad.device == CUDA
        torch.optim.AdamW(moved.parameters(), foreach=True).step()
        kept = on(CPU)
        kept.copy_(on(CUDA))
        assert kept.is_cpu
    assert not torch.cuda.is_available()
    assert torch.ones(1).device == CPU


def test_random_numbers_are_the_hosts():
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(3))
    with pretended_cuda():
        there = torch.rand(4, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
        assert there.is_cuda
        assert torch.equal(there.cpu(), drawn)


def test_counts():
    with pretended_cuda() as device, torch.no_grad():
        x = on(CUDA, 2, 3)
        layer = nn.Linear(3, 4, bias=False, device="cuda")
        with device.counting() as found:
            y = layer(x).relu().view(8)[:4].add_(1.0)  # three kernels; views cost nothing
        assert found.kernels == {"mm": 1, "relu": 1, "add_": 1}
        assert not found.waits
        with device.counting() as found:
            bool((y > 0).all())
            y[y > 0]
            y.tolist()
            y.cpu()
            torch.tensor([1.0], device="cuda")
            y[torch.tensor([0])]
            y.copy_(torch.ones(4))
        waited = [operation for operation, _ in found.waits.elements()]
        assert sorted(waited) == ["_local_scalar_dense", "index", "to", "tolist"]
        assert sorted(operation for operation, _ in found.uploads.elements()) == ["copy_", "index", "tensor"]
        assert not device.counts.waits  # the block's work was counted apart


def test_our_own_line_is_named():
    with pretended_cuda() as device:
        ids_JP, mask_JP = pad_prompts([[1, 2], [3]], pad_id=0, device=CUDA)
        assert ids_JP.is_cuda
        assert mask_JP.is_cuda
        assert all(line.startswith("engine/sequences.py:") for _, line in device.counts.uploads)
        assert device.counts.uploads.total() == 2
